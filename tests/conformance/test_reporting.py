"""Reports of a save: `writer.last_save`, `on_save`, one line in the log; and the `repr` of writer and reader."""

from __future__ import annotations

import dataclasses
import io
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from dcp_nvcomp import NvcompReader, NvcompWriter, SaveStats, tools
from tests.checkpoints import file_names

from .plugins import OURS, quiet_stock
from .values import random_bits, trained

pytestmark = quiet_stock


def _every_kind() -> dict[str, Any]:
    return {
        "w": trained(torch.bfloat16, (700, 800)),
        "m": trained(torch.float32, (700, 800)),
        "noise": random_bits(torch.int64, (1000,)),
        "tiny": torch.tensor(3.0),
        "step": 5,
    }


def _tensor_nbytes() -> int:
    return sum(value.nbytes for value in _every_kind().values() if isinstance(value, torch.Tensor))


def _payload_nbytes(value: Any) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


def test_last_save(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path)
    assert writer.last_save is None
    dcp.save(_every_kind(), storage_writer=writer)
    stats = writer.last_save
    assert dataclasses.is_dataclass(stats)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.save_id = "x"
    metadata = OURS.reader(tmp_path).read_metadata()
    assert stats.save_id == metadata.storage_meta.save_id and len(stats.save_id) == 32
    assert stats.checkpoint_id == str(tmp_path)
    assert stats.uncompressed_nbytes == _tensor_nbytes() + _payload_nbytes(5)
    assert stats.ratio == stats.uncompressed_nbytes / stats.stored_nbytes > 1.15

    assert set(stats.files) == {name for name in file_names(tmp_path) if name.endswith(".distcp")}
    on_disk = sum((tmp_path / name).stat().st_size for name in stats.files)
    assert stats.encoded_nbytes < on_disk == stats.stored_nbytes < stats.encoded_nbytes + 40_000


def test_sizes_and_totals_mean_the_same_everywhere(tmp_path: Path) -> None:
    """The blocks alone; headers, footers and the gaps of alignment are in `stored_nbytes` only, as in `inspect`."""
    writer = OURS.writer(tmp_path)
    dcp.save(_every_kind(), storage_writer=writer)
    stats, found = writer.last_save, tools.inspect(tmp_path)
    assert stats.encoded_nbytes == stats.totals.encoded_nbytes
    assert stats.encoded_nbytes == pytest.approx(found.totals.encoded_nbytes, abs=4200)
    assert stats.stored_nbytes == found.file_nbytes == sum(stats.file_nbytes.values())
    assert stats.ratio == found.ratio
    assert set(stats.seconds) == {"plan", "encode", "write", "commit"}
    assert all(seconds >= 0 for seconds in stats.seconds.values()) and stats.total_seconds > 0
    for totals in (stats.by_codec, stats.by_dtype):
        assert sum(total.uncompressed_nbytes for total in totals.values()) == stats.uncompressed_nbytes
        assert sum(total.encoded_nbytes for total in totals.values()) == stats.encoded_nbytes
        assert sum(total.records for total in totals.values()) == len(_every_kind())
        for total in totals.values():
            assert total.ratio == pytest.approx(total.uncompressed_nbytes / total.encoded_nbytes)
    by_dtype = {name.removeprefix("torch."): total for name, total in stats.by_dtype.items()}
    assert by_dtype["bfloat16"].uncompressed_nbytes == 700 * 800 * 2 and by_dtype["bfloat16"].ratio > 1.3
    assert (by_dtype["float32"].uncompressed_nbytes, by_dtype["float32"].records) == (700 * 800 * 4 + 4, 2)
    assert by_dtype["int64"].uncompressed_nbytes == 8000
    assert by_dtype["int64"].encoded_nbytes < 8300, "noise is stored as it is"


def test_last_save_is_that_of_the_last(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path / "a")
    dcp.save(_every_kind(), storage_writer=writer)
    first = writer.last_save
    dcp.save({"x": torch.ones(10)}, storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert writer.last_save.save_id != first.save_id
    assert writer.last_save.checkpoint_id == str(tmp_path / "b")
    assert writer.last_save.uncompressed_nbytes == 40
    assert first.uncompressed_nbytes > 40


def test_on_save_gets_it_once_after_the_commit(tmp_path: Path) -> None:
    told = []

    def on_save(stats: Any) -> None:
        told.append((stats, (tmp_path / ".metadata").exists()))

    writer = OURS.writer(tmp_path, on_save=on_save)
    dcp.save(_every_kind(), storage_writer=writer)
    assert told == [(writer.last_save, True)]
    dcp.save(_every_kind(), storage_writer=writer)
    assert len(told) == 2 and told[1] == (writer.last_save, True)


@pytest.mark.parametrize(
    ("elements", "printed"),
    [
        (0, "saved 0 bytes as "),
        (100, "saved 400 bytes as "),
        (3000, "saved 12.0 kB as 12."),
        (2500000, "saved 10.0 MB"),
    ],
)
def test_printed_sizes_fit_the_save(tmp_path: Path, elements: int, printed: str) -> None:
    writer = OURS.writer(tmp_path, codec="none")
    dcp.save({"x": torch.zeros(elements)} if elements else {}, storage_writer=writer)
    assert printed in str(writer.last_save) and "0.000" not in str(writer.last_save)
    assert writer.last_save.uncompressed_nbytes == 4 * elements and writer.last_save.ratio > 0


def test_stats_of_what_save_returned(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path)
    metadata = dcp.save(_every_kind(), storage_writer=writer)
    assert SaveStats.of(metadata) == writer.last_save
    assert SaveStats.of(OURS.reader(tmp_path).read_metadata()) is None
    assert SaveStats.of(dcp.save(_every_kind(), storage_writer=FileSystemWriter(tmp_path / "stock"))) is None


def test_stats_never_get_into_a_checkpoint(tmp_path: Path) -> None:
    """Planners may cache the metadata object, and save it again."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = f"test-{tmp_path}"  # the cache is the class's
    writer = OURS.writer(tmp_path)
    for name in "ab":
        metadata = dcp.save(_every_kind(), storage_writer=writer, checkpoint_id=tmp_path / name, planner=planner)
        assert SaveStats.of(metadata) == writer.last_save
    for path in tmp_path.glob("*/.metadata"):
        assert b"SaveStats" not in path.read_bytes(), path


def test_repr_shows_path_and_options(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert repr(NvcompWriter(path)) == f"NvcompWriter({path!r})"
    assert repr(NvcompReader(path)) == f"NvcompReader({path!r})"
    writer = NvcompWriter(path, False, codec="zstd", thread_count=64, on_save=print, auto_mkdir=True)
    options = "single_file_per_rank=False, thread_count=64, codec='zstd', on_save=..., auto_mkdir=..."
    assert repr(writer) == f"NvcompWriter({path!r}, {options})"
    reader = NvcompReader(path, verify="full", safe_objects=True, trusted_globals=["torch.Size"], engine="cpu")
    assert repr(reader) == (
        f"NvcompReader({path!r}, verify='full', trusted_globals=('torch.Size',), safe_objects=True, engine='cpu')"
    )
    reader.reset("elsewhere")
    writer.path = "there"
    assert "'elsewhere'" in repr(reader) and "'there'" in repr(writer)


@pytest.mark.parametrize("kind", [NvcompWriter, NvcompReader])
def test_repr_shows_no_secret(kind: Any) -> None:
    made = kind("s3://bucket/run", key="AKIDEXAMPLE", secret="hunter2", config_kwargs={"proxies": {"http": "hunter2"}})
    assert repr(made) == f"{kind.__name__}('s3://bucket/run', key=..., secret=..., config_kwargs=...)"
    made.path = "smb://user:hunter2@host/share"
    assert "hunter2" not in repr(made) and "user" in repr(made) and "host/share" in repr(made)


def test_a_save_and_a_load_log_one_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dcp_nvcomp")
    writer, reader = OURS.writer(tmp_path), OURS.reader(tmp_path)
    dcp.save(_every_kind(), storage_writer=writer)
    dcp.load({"step": None}, storage_reader=reader)
    saved, loaded = (record for record in caplog.records if record.name.split(".")[0] == "dcp_nvcomp")
    for line in (saved, loaded):
        assert line.levelno == logging.INFO
        assert str(tmp_path) in line.getMessage() and "\n" not in line.getMessage()
    ratio = re.search(r"ratio (\d+\.\d+)", saved.getMessage())
    assert ratio is not None and float(ratio[1]) == pytest.approx(writer.last_save.ratio, abs=0.01)
    assert loaded.getMessage() == str(reader.last_load)


def test_no_bar_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dcp.save(_every_kind(), storage_writer=OURS.writer(tmp_path, progress=True))
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""
