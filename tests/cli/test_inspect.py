"""`dcp-nvcomp inspect`: what it shows of real checkpoints, and how it fails."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint._extension import ZStandard

from dcp_nvcomp import tools
from dcp_nvcomp.cli.common import parse_storage_options
from dcp_nvcomp.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptDataError,
    IncompleteCheckpointError,
    StorageError,
)
from dcp_nvcomp.saving.stats import SaveStats, Totals
from tests.checkpoints import data_file, flip, save, save_stock
from tests.cli.checkpoints import run as run_command
from tests.conftest import S3Store
from tests.faults import forked


def every_kind() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {f"layers.{i}.weight": torch.randn(256, 200, generator=generator).bfloat16() for i in (0, 2, 10)},
        "table": torch.randn(300, 200, generator=generator),
        "ids": torch.arange(40_000),
        "step": torch.tensor(7),
        "bias": torch.randn(100, generator=generator),
        "empty": torch.zeros(0, 3),
        "config": {"lr": 0.1},
        "[bold]\x1b[31m\u2603": torch.zeros(5, dtype=torch.int8),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SaveStats]:
    path = tmp_path_factory.mktemp("inspect") / "step-1"
    stats = save(path, every_kind()).last_save
    assert stats is not None
    return path, stats


@pytest.fixture
def copy(saved: tuple[Path, SaveStats], tmp_path: Path) -> Path:
    """A checkpoint that the test may spoil."""
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


run = partial(run_command, "inspect")


# ---- what it shows ----


def test_sizes_are_those_of_the_save(saved: tuple[Path, SaveStats]) -> None:
    path, stats = saved
    found = tools.inspect(path)
    assert (found.layout, found.save_id) == ("dcp_nvcomp", stats.save_id)
    assert found.by_codec == stats.by_codec
    assert found.by_dtype == stats.by_dtype
    assert found.totals == stats.totals
    assert {file.name: file.nbytes for file in found.files} == stats.file_nbytes
    assert found.ratio == stats.ratio > 1


def test_items(saved: tuple[Path, SaveStats]) -> None:
    found = tools.inspect(saved[0]).items
    fqns = [item.fqn for item in found]
    assert [fqn for fqn in fqns if "layers" in fqn] == [f"model.layers.{i}.weight" for i in (0, 2, 10)]
    items = {item.fqn: item for item in found}
    table = items["table"]
    assert (table.kind, table.dtype, table.shape, table.packed) == ("tensor", "float32", (300, 200), False)
    assert (table.totals.records, table.totals.uncompressed_nbytes) == (1, 240_000)
    assert 150_000 < table.totals.encoded_nbytes < 230_000
    assert all(codec.startswith("planes") for codec in table.codecs)
    assert items["step"].shape == ()
    assert items["step"].packed
    assert items["empty"].totals == Totals(1, 0, 0)
    assert (items["config.lr"].kind, items["config.lr"].dtype, items["config.lr"].shape) == ("bytes", "bytes", None)


def test_shares_of_a_pack_add_up(tmp_path: Path) -> None:
    tensors = {f"{i:02}": torch.arange(i + 1, dtype=torch.int64) for i in range(30)}
    save(tmp_path / "c", tensors)
    found = tools.inspect(tmp_path / "c")
    assert all(item.packed for item in found.items)
    assert found.totals.uncompressed_nbytes == 8 * 30 * 31 // 2
    (file,) = found.files
    assert found.totals.encoded_nbytes < file.nbytes - file.footer_nbytes < found.totals.encoded_nbytes + 4200
    largest, smallest = found.items[-1].totals, found.items[0].totals
    assert largest.encoded_nbytes == pytest.approx(30 * smallest.encoded_nbytes, abs=30)


def test_table(saved: tuple[Path, SaveStats]) -> None:
    path, _ = saved
    status, output, errors = run(str(path))
    assert (status, errors) == (0, "")
    assert f"{path} is a dcp-nvcomp checkpoint" in output.splitlines()[0]
    row = next(line for line in output.splitlines() if line.startswith("table "))
    assert re.search(r"float32 +\[300, 200\] +1 +planes-zstd +240\.0 kB +\d+\.\d kB +1\.\d{3}", row)
    assert re.search(r"^total +10 keys +10 ", output, re.MULTILINE)
    for title in ("key", "dtype", "codec"):
        assert re.search(rf"^{title} .*before +after +ratio", output, re.MULTILINE)
    assert "\x1b" not in output and "[bold]\\x1b[31m" in output, "keys can not paint the terminal"


def test_json(saved: tuple[Path, SaveStats]) -> None:
    path, stats = saved
    document = json.loads(run(str(path), "--json")[1])
    assert document == tools.inspect(path).to_json()
    (table,) = [item for item in document["items"] if item["fqn"] == "table"]
    assert {key: value for key, value in table.items() if key not in ("encoded_nbytes", "ratio")} == {
        "fqn": "table",
        "kind": "tensor",
        "dtype": "float32",
        "shape": [300, 200],
        "codecs": ["planes-zstd"],
        "packed": False,
        "shards": 1,
        "uncompressed_nbytes": 240_000,
    }
    assert document["files"][0]["name"] == stats.files[0]


def test_only_metadata_and_footers_are_read(copy: Path) -> None:
    file = data_file(copy)
    (described,) = tools.inspect(copy).files
    with file.open("r+b") as stream:
        stream.write(bytes(described.nbytes - described.footer_nbytes - 40))  # header and payloads
    assert tools.inspect(copy).files == (described,)


# ---- stock checkpoints ----


@pytest.mark.parametrize("extensions", [[], [ZStandard()]], ids=["plain", "zstd"])
def test_stock_checkpoint(extensions: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "stock"
    save_stock(path, every_kind(), _extensions=extensions)
    found = tools.inspect(path)
    codec = "stock-zstd" if extensions else "stock"
    assert (found.layout, list(found.by_codec)) == ("stock", [codec])
    items = {item.fqn: item for item in found.items}
    assert items["table"].totals.uncompressed_nbytes == 240_000
    assert items["table"].shape == (300, 200)
    assert items["config.lr"].dtype == "bytes"
    assert found.totals.encoded_nbytes == found.file_nbytes == data_file(path).stat().st_size
    status, output, _ = run(str(path))
    assert status == 0
    assert "is a stock DCP checkpoint" in output
    data_file(path).unlink()
    with pytest.raises(StorageError, match="missing"):
        tools.inspect(path)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        *((("{}", "--option", option), 2, "KEY=VALUE") for option in ("foo", "=1", "a-b=1", "")),
        *((arguments, 2, "") for arguments in ((), ("{}", "b"), ("{}", "--nonsense"))),
        (("{}", "--option", "nonsense=1"), 1, "nonsense"),
        (("{}/.metadata",), 1, "Error: "),
    ],
)
def test_mistakes(saved: tuple[Path, SaveStats], arguments: tuple[str, ...], status: int, message: str) -> None:
    found, output, errors = run(*(argument.replace("{}", str(saved[0])) for argument in arguments))
    assert (found, output) == (status, "")
    assert message in errors


# ---- how it fails ----


SPOILT: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "no checkpoint": (shutil.rmtree, CheckpointNotFoundError, "There is no checkpoint here"),
    "incomplete": (
        lambda copy: [file.unlink() for file in [copy / ".metadata", *copy.glob("__*.metadata")]],
        IncompleteCheckpointError,
        "never finished",
    ),
    "damaged footer": (lambda copy: flip(data_file(copy), -100), CorruptDataError, "fails its CRC"),
    "damaged metadata": (
        lambda copy: (copy / ".metadata").write_bytes(b"\x80\x04cos\nsystem\n."),
        Exception,
        "os.system",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_spoilt(copy: Path, how: str) -> None:
    """As of a load; tests/errors has all."""
    spoil, error, message = SPOILT[how]
    spoil(copy)
    with pytest.raises(error, match=message):
        tools.inspect(copy)
    status, output, errors = run(str(copy))
    assert (status, output) == (1, "")
    assert re.fullmatch(rf"Error: .*{message}.*\n", errors)


def test_a_secret_of_digits_is_text() -> None:
    text = {"password": "0123", "passphrase": "1e5", "secret": "1.10", "key": "7", "username": "12"}
    given = [*(f"{name}={value}" for name, value in text.items()), "gss_auth=false", "sas_token=null", "anon=true"]
    found = parse_storage_options([*given, "port=22", 'token={"a": 1}', 'account_key="1"'])
    parsed = {"gss_auth": False, "sas_token": None, "anon": True, "port": 22, "token": {"a": 1}, "account_key": "1"}
    assert found == text | parsed


@pytest.mark.parametrize("name", ["path", "verify", "storage_options"])
def test_options_of_the_reader_are_not_storage_options(name: str, saved: tuple[Path, SaveStats]) -> None:
    with pytest.raises(ConfigurationError, match="not an option of the storage"):
        tools.inspect(saved[0], storage_options={name: "x"})


# ---- from outside ----


def test_storage_options_reach_the_storage(s3_store: S3Store) -> None:
    url, options = s3_store
    save(url, every_kind(), **options)
    given = [f"{name}={value}" for name, value in options.items() if name != "endpoint_url"]
    given.append("client_kwargs=" + json.dumps({"endpoint_url": options["endpoint_url"]}))
    arguments = [argument for option in given for argument in ("--option", option)]
    status, output, errors = run(url, "--json", *arguments)
    assert (status, errors) == (0, "")
    assert json.loads(output)["totals"]["items"] == 10
    status, _, errors = run(url + "/nothing", *arguments)
    assert (status, errors.count("\n")) == (1, 1)
    assert "There is no checkpoint here" in errors


def test_as_a_command(saved: tuple[Path, SaveStats], tmp_path: Path) -> None:
    done = forked.execute_module("dcp_nvcomp", "inspect", str(saved[0]), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["totals"]["items"] == 10
    done = forked.execute_module("dcp_nvcomp", "inspect", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: There is no checkpoint here.*\n", done.stderr)
