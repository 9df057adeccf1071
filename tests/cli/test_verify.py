"""`dcp-nvcomp verify` finds every damage, names where it is, and goes on."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dcp_nvcomp import NvcompWriter, tools
from dcp_nvcomp.errors import CheckpointError, CheckpointReplacedError, StorageError
from dcp_nvcomp.format.framing import Tables
from dcp_nvcomp.maintenance.checks import ERROR, WARNING
from dcp_nvcomp.maintenance.verify import Verification
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import data_file, file_names, flip, save_stock
from tests.cli.checkpoints import change_footer, change_metadata, model_state, run, save_model
from tests.effort import sampled


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "step-1"
    save_model(path)
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A checkpoint that the test may spoil."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def footer_offset(path: Path) -> int:
    return int.from_bytes(data_file(path).read_bytes()[-40:-32], "little")


# ---- a sound checkpoint ----


@pytest.mark.parametrize("full", [False, True])
def test_sound(saved: Path, full: bool) -> None:
    seen: list[tuple[int, int]] = []
    found = tools.verify(saved, full=full, progress=lambda done, total: seen.append((done, total)))
    nbytes = data_file(saved).stat().st_size
    assert (found.findings, found.is_sound, found.undecoded_blocks) == ((), True, 0)
    assert (found.files, found.nbytes, found.layout, found.full) == (1, nbytes, "dcp_nvcomp", full)
    assert found.blocks == 4  # the weight, the table, the object, and what is packed
    assert seen[-1] == (nbytes, nbytes)
    status, output, errors = run("verify", str(saved), *["--full"] * full)
    assert (status, errors) == (0, "")
    assert re.fullmatch(rf"{saved} is sound: 4 blocks, .* in 1 data file checked\.\n", output)


def test_progress_on_a_terminal(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar goes to standard error, and is taken away at the end."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    status, output, errors = run("verify", str(saved))
    nbytes = data_file(saved).stat().st_size
    assert (status, "sound" in output) == (0, True)
    assert f"{nbytes / 1000:.1f}/{nbytes / 1000:.1f} kB" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", errors)


def test_large_blocks(tmp_path: Path) -> None:
    """Several reads, blocks of more than one row, a record that begins at a multiple of 4096."""
    content = {"w": torch.randn(1 << 20, 6), "small": torch.ones(3)}
    dcp.save(content, storage_writer=NvcompWriter(tmp_path, engine="cpu"), no_dist=True)
    found = tools.verify(tmp_path, full=True)
    assert found.findings == ()
    assert found.nbytes == data_file(tmp_path).stat().st_size > 16 << 20
    bad = [1 << 20, 9 << 20, 17 << 20]
    for offset in bad:
        flip(data_file(tmp_path), offset)
    found = tools.verify(tmp_path)
    ranges = [finding.byte_range for finding in found.findings]
    assert len(ranges) == 3
    assert all(span is not None and span[0] <= at < span[1] for span, at in zip(ranges, bad, strict=True))
    assert {finding.fqns for finding in found.findings} == {("w",)}


# ---- damage ----


def verified(path: Path, *, full: bool = False) -> Verification:
    """The findings, which the command must have too."""
    found = tools.verify(path, full=full)
    options = ["--full"] if full else []
    status, output, _ = run("verify", str(path), *options)
    assert status == (0 if found.is_sound else 1)
    lines = output.splitlines()
    assert len([line for line in lines if line.startswith(("ERROR ", "WARNING "))]) == len(found.findings)
    assert json.loads(run("verify", str(path), "--json", *options)[1]) == found.to_json()
    return found


def _of_another_save(file: Path) -> None:
    save_model(file.parent.parent / "other")
    shutil.copy(data_file(file.parent.parent / "other"), file)


def test_every_bad_block_is_named(copy: Path) -> None:
    file = data_file(copy)
    first = 16
    for offset in (first, footer_offset(copy) - 1):
        flip(file, offset)
    findings = verified(copy).findings
    assert len(findings) == 2
    for finding, offset in zip(findings, (first, footer_offset(copy) - 1), strict=True):
        assert finding.file == file.name
        assert finding.fqns
        assert finding.byte_range is not None
        assert finding.byte_range[0] <= offset < finding.byte_range[1]
        assert "CRC" in finding.what


def test_all_keys_of_a_pack_are_named(copy: Path) -> None:
    text = data_file(copy).read_bytes()
    at = text.index(model_state()["bias"].numpy().tobytes()[:2])
    flip(data_file(copy), at)
    (finding,) = verified(copy).findings
    assert set(finding.fqns) == {"bias", "scale"}


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "header": (lambda file: flip(file, 3), "does not begin like"),
    "footer": (lambda file: flip(file, -60), "footer fails its CRC"),
    "trailer": (lambda file: flip(file, -9), "footer fails its CRC"),
    "truncated": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes; `.metadata` says"),
    "grown": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "bytes; `.metadata` says"),
    "empty": (lambda file: file.write_bytes(b""), "has 0 bytes"),
    "missing": (lambda file: file.unlink(), "No such file"),
    "directory": (lambda file: (file.unlink(), file.mkdir()), "not a plain file|is a directory"),
    "of another save": (_of_another_save, "not the one that `.metadata` names"),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_file(copy: Path, how: str) -> None:
    damage, message = DAMAGES[how]
    name = data_file(copy).name
    damage(data_file(copy))
    (finding,) = verified(copy).findings
    assert (finding.severity, finding.file) == (ERROR, name)
    assert re.search(message, finding.what)


def test_other_files_are_checked_all_the_same(tmp_path: Path) -> None:
    save_model(tmp_path, single_file_per_rank=False)
    files = sorted(tmp_path.glob("*.distcp"))
    assert len(files) > 2
    files[0].unlink()
    flip(files[-1], 17)
    findings = verified(tmp_path).findings
    assert {finding.file for finding in findings} == {files[0].name, files[-1].name}


@pytest.mark.parametrize("spoil", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b"", None])
def test_copy_that_differs(copy: Path, spoil: Callable[[bytes], bytes] | None) -> None:
    """One that is missing is not as bad."""
    (file,) = copy.glob("__*.metadata")
    if spoil is None:
        file.unlink()
    else:
        file.write_bytes(spoil(file.read_bytes()))
    found = verified(copy)
    (finding,) = found.findings
    assert (finding.severity, finding.file) == (WARNING if spoil is None else ERROR, file.name)
    assert found.is_sound == (spoil is None)


def test_metadata_that_names_no_save(copy: Path) -> None:
    """Then it is unknown which copy is its own."""

    def forget(metadata: Metadata) -> None:
        assert metadata.storage_meta is not None
        metadata.storage_meta.save_id = None

    change_metadata(copy, forget)
    found = verified(copy)
    assert found.is_sound
    assert ["not a save id" in finding.what for finding in found.findings] == [True]


def test_unreadable_metadata(copy: Path, tmp_path: Path) -> None:
    (copy / ".metadata").write_bytes(b"\x80\x04.")
    with pytest.raises(CheckpointError):
        tools.verify(copy)
    status, output, errors = run("verify", str(copy))
    assert (status, output, errors.count("\n")) == (1, "", 1)
    status, _, errors = run("verify", str(tmp_path / "nothing"))
    assert status == 1 and "There is no checkpoint here" in errors
    assert run("verify")[0] == 2


# ---- metadata that reads well and is wrong: both copies alike ----


def _first(metadata: Metadata, fqn: str) -> MetadataIndex:
    return next(index for index in metadata.storage_data if index.fqn == fqn)


def _swap_records(metadata: Metadata) -> None:
    one, other = _first(metadata, "weight"), _first(metadata, "table")
    data = metadata.storage_data
    data[one], data[other] = data[other], data[one]


def _renumber(metadata: Metadata) -> None:
    index = _first(metadata, "weight")
    metadata.storage_data[index] = (metadata.storage_data[index][0], 99)


def _reshape(metadata: Metadata) -> None:
    item = metadata.state_dict_metadata["weight"]
    item.size = torch.Size([16, 24])
    item.chunks[0].sizes = torch.Size([16, 24])


def _grow(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"].size = torch.Size([25, 16])


def _retype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"].properties.dtype = torch.float16


def _shift(metadata: Metadata) -> None:
    metadata.state_dict_metadata["weight"].size = torch.Size([25, 16])
    metadata.state_dict_metadata["weight"].chunks[0].offsets = torch.Size([1, 0])


WRONG: dict[str, tuple[Callable[[Metadata], Any], str, str]] = {
    "swapped": (_swap_records, ERROR, "footer disagrees"),
    "beyond": (_renumber, ERROR, "names record 99"),
    "reshaped": (_reshape, ERROR, "footer disagrees"),
    "grown": (_grow, ERROR, "leave a part of this tensor unsaved"),
    "retyped": (_retype, WARNING, "stored as bfloat16"),
    "not stored": (lambda m: m.storage_data.pop(_first(m, "weight")), ERROR, "does not say where the shard"),
    "object not stored": (lambda m: m.storage_data.pop(_first(m, "config.lr")), ERROR, "where this object"),
    "not listed": (lambda m: m.state_dict_metadata.pop("weight"), ERROR, "not listed"),
    "no shard": (_shift, ERROR, "lists no shard"),
}


@pytest.mark.parametrize("how", WRONG)
def test_metadata_that_disagrees(copy: Path, how: str) -> None:
    change, severity, message = WRONG[how]
    change_metadata(copy, change)
    found = verified(copy)
    assert found.is_sound == (severity == WARNING)
    assert any(re.search(message, finding.what) and finding.severity == severity for finding in found.findings)
    assert {fqn for finding in found.findings for fqn in finding.fqns} <= {"weight", "table", "config.lr"}


# ---- decoded bytes ----


def test_full_checks_decoded_bytes(copy: Path) -> None:
    def change(description: dict[str, Any], tables: Tables) -> None:
        tables.uncompressed_crc[0] ^= 1

    change_footer(copy, change)
    assert verified(copy).findings == ()
    (finding,) = verified(copy, full=True).findings
    assert "decoded bytes fail their CRC" in finding.what


def test_blocks_that_only_a_gpu_decodes(tmp_path: Path) -> None:
    """The bytes are zstd's; a CPU can't look into them anyway."""
    content = {"w": torch.zeros(4000, dtype=torch.int32)}
    dcp.save(content, storage_writer=NvcompWriter(tmp_path, engine="cpu", codec="zstd"), no_dist=True)

    def change(description: dict[str, Any], tables: Tables) -> None:
        for chain in description["codecs"]:
            for codec in chain:
                if codec["name"] == "zstd":
                    codec["name"] = "ans"
                    codec["configuration"] |= {"data_type": "|u1", "nvcomp_version": "6.0.0"}

    change_footer(tmp_path, change)
    found = verified(tmp_path, full=True)
    assert (found.is_sound, found.findings, found.undecoded_blocks, found.blocks) == (True, (), 1, 1)
    assert "1 of the blocks were not decoded" in run("verify", str(tmp_path), "--full")[1]
    assert verified(tmp_path).undecoded_blocks == 0
    flip(data_file(tmp_path), 20)
    assert not verified(tmp_path, full=True).is_sound


# ---- reading again ----


@pytest.mark.parametrize("times", [1, 3])
def test_what_fails_is_read_again(saved: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A flip on the way is no damage; one that comes again is."""
    real, failures = PosixFilesystem.read, [times]

    def read(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        data = bytearray(real(self, name, start, stop))
        if start == 16 and failures[0]:
            failures[0] -= 1
            data[0] ^= 1
        return bytes(data)

    monkeypatch.setattr(PosixFilesystem, "read", read)
    found = tools.verify(saved, thread_count=1)
    assert failures == [max(0, times - 2)]
    assert found.is_sound == (times == 1)


def test_a_block_that_can_not_be_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector: the other blocks of the same read are checked all the same."""
    real = PosixFilesystem.read

    def read(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        if start <= 16 < stop and name.endswith(".distcp"):
            raise StorageError("bad sector", errno=errno.EIO)
        return real(self, name, start, stop)

    monkeypatch.setattr(PosixFilesystem, "read", read)
    found = tools.verify(saved)
    (finding,) = found.findings
    assert (finding.what, found.blocks) == ("bad sector", 4)
    assert finding.byte_range is not None
    assert finding.byte_range[0] == 16


def test_a_storage_that_does_not_answer(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the checkpoint then; and each block would take as long as the storage is given."""
    real, asked = PosixFilesystem.read, list[str]()

    def read(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        if start >= 16 and name.endswith(".distcp"):
            asked.append(name)
            raise StorageError("no answer", errno=errno.ETIMEDOUT)
        return real(self, name, start, stop)

    monkeypatch.setattr(PosixFilesystem, "read", read)
    with pytest.raises(StorageError, match="no answer"):
        tools.verify(saved, thread_count=1)
    assert len(asked) <= 4


def test_replaced_meanwhile(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(shutil.copytree(saved, tmp_path / "c"))
    real = PosixFilesystem.read

    def read(self: PosixFilesystem, *arguments: Any) -> bytes:
        monkeypatch.undo()
        save_model(path, seed=1)
        return real(self, *arguments)

    monkeypatch.setattr(PosixFilesystem, "read", read)
    with pytest.raises(CheckpointReplacedError, match="verify again"):
        tools.verify(path)
    assert tools.verify(path).findings == ()


# ---- other layouts ----


def test_metadata_of_ranks(tmp_path: Path) -> None:
    dcp.save(model_state(), storage_writer=NvcompWriter(tmp_path, engine="cpu"), use_collectives=False)
    assert ".metadata" not in file_names(tmp_path)
    found = verified(tmp_path, full=True)
    assert (found.findings, found.files) == ((), 1)
    shutil.move(tmp_path / "__0.metadata", tmp_path / "__1.metadata")
    (finding,) = verified(tmp_path).findings
    assert "rank 0 is missing" in finding.what
    shutil.move(tmp_path / "__1.metadata", tmp_path / "__0.metadata")
    flip(data_file(tmp_path), 20)
    assert len(verified(tmp_path).findings) == 1


@pytest.mark.parametrize("extensions", [[], [ZStandard()]], ids=["plain", "zstd"])
def test_stock(tmp_path: Path, extensions: list[Any]) -> None:
    save_stock(tmp_path, model_state(), _extensions=extensions)
    for full in (False, True):
        found = verified(tmp_path, full=full)
        assert (found.findings, found.layout) == ((), "stock")
        assert found.blocks == len(model_state())
    assert "no checksums of its own" in run("verify", str(tmp_path))[1]
    file = data_file(tmp_path)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    (finding,) = verified(tmp_path).findings
    assert finding.file == file.name
    assert finding.fqns
    if extensions:
        file.write_bytes(data[:4] + bytes(8) + data[12:])
        assert not verified(tmp_path).is_sound
    file.unlink()
    assert len(verified(tmp_path).findings) == len(model_state())


class Marked(torch.Tensor):
    """A subclass that only this test can import."""


def test_stock_subclass(tmp_path: Path) -> None:
    """What is in it can't be looked at without importing it; that is no damage."""
    content = {"w": torch.ones(3).as_subclass(Marked)}  # type: ignore[no-untyped-call]
    dcp.save(content, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    assert verified(tmp_path).findings == ()
    found = verified(tmp_path, full=True)
    assert found.is_sound
    assert [(finding.severity, finding.fqns) for finding in found.findings] == [(WARNING, ("w",))]


# ---- every byte ----


def undetected(path: Path, file: Path, offsets: Sequence[int], mask: int) -> list[int]:
    """Offsets at which a flip goes unnoticed."""
    data, missed = file.read_bytes(), []
    for offset in offsets:
        file.write_bytes(data[:offset] + bytes([data[offset] ^ mask]) + data[offset + 1 :])
        try:
            if not tools.verify(path, thread_count=1).findings:
                missed.append(offset)
        except CheckpointError:
            pass
    file.write_bytes(data)
    return missed


@pytest.mark.parametrize("pattern", [".metadata", "__*.metadata", "*.distcp"])
@pytest.mark.parametrize(
    ("step", "mask"),
    [(29, 1), pytest.param(1, 1, marks=pytest.mark.slow), pytest.param(1, 0x80, marks=pytest.mark.slow)],
)
def test_every_flipped_byte_is_found(copy: Path, pattern: str, step: int, mask: int) -> None:
    """Each byte of each file is covered: by a CRC, as a magic number, as a zero that must be, or by the other copy."""
    (file,) = copy.glob(pattern)
    nbytes = file.stat().st_size
    assert nbytes > 500
    assert undetected(copy, file, sampled(range(0, nbytes, step), 7), mask) == []
    assert tools.verify(copy).findings == ()


def test_a_key_without_a_name(tmp_path: Path) -> None:
    content = {"": torch.tensor(1.5), "w": torch.ones(300, 300)}
    dcp.save(content, storage_writer=NvcompWriter(tmp_path, engine="cpu", single_file_per_rank=False), no_dist=True)
    for file in tmp_path.glob("*.distcp"):
        flip(file, 16)
    assert {finding.fqns for finding in verified(tmp_path).findings} == {("",), ("w",)}
