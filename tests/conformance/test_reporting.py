"""What a save tells: `writer.last_save`, `on_save` and one line in the log."""

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

from .plugins import OURS, file_names, quiet_stock
from .values import random_bits, trained

pytestmark = quiet_stock


def _state() -> dict[str, Any]:
    return {
        "w": trained(torch.bfloat16, (700, 800)),
        "m": trained(torch.float32, (700, 800)),
        "noise": random_bits(torch.int64, (1000,)),
        "tiny": torch.tensor(3.0),
        "step": 5,
    }


def _tensor_nbytes() -> int:
    return sum(value.nbytes for value in _state().values() if isinstance(value, torch.Tensor))


def _payload_nbytes(value: Any) -> int:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.tell()


def test_last_save(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path)
    assert writer.last_save is None
    dcp.save(_state(), storage_writer=writer)
    stats = writer.last_save
    assert dataclasses.is_dataclass(stats)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.save_id = "x"
    metadata = OURS.reader(tmp_path).read_metadata()
    assert stats.save_id == metadata.storage_meta.save_id and len(stats.save_id) == 32
    assert stats.checkpoint_id == str(tmp_path)
    assert stats.uncompressed_nbytes == _tensor_nbytes() + _payload_nbytes(5)
    assert stats.ratio == pytest.approx(stats.uncompressed_nbytes / stats.encoded_nbytes)
    assert stats.ratio > 1.15

    assert set(stats.files) == {name for name in file_names(tmp_path) if name.endswith(".distcp")}
    on_disk = sum((tmp_path / name).stat().st_size for name in stats.files)
    assert stats.encoded_nbytes <= on_disk < stats.encoded_nbytes + 40_000


def test_totals_add_up(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path)
    dcp.save(_state(), storage_writer=writer)
    stats = writer.last_save
    for totals in (stats.by_codec, stats.by_dtype):
        assert sum(total.uncompressed_nbytes for total in totals.values()) == stats.uncompressed_nbytes
        # The whole counts what no record owns too: headers, footers and the gaps of alignment.
        encoded_nbytes = sum(total.encoded_nbytes for total in totals.values())
        assert encoded_nbytes <= stats.encoded_nbytes < encoded_nbytes + 20_000
        assert sum(total.records for total in totals.values()) == len(_state())
        for total in totals.values():
            assert total.ratio == pytest.approx(total.uncompressed_nbytes / total.encoded_nbytes)
    by_dtype = {name.removeprefix("torch."): total for name, total in stats.by_dtype.items()}
    assert by_dtype["bfloat16"].uncompressed_nbytes == 700 * 800 * 2
    assert by_dtype["bfloat16"].ratio > 1.3
    assert by_dtype["float32"].uncompressed_nbytes == 700 * 800 * 4 + 4
    assert by_dtype["float32"].records == 2
    assert by_dtype["int64"].uncompressed_nbytes == 8000
    assert by_dtype["int64"].encoded_nbytes < 8300, "noise is stored as it is"


def test_seconds_of_each_stage(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path)
    dcp.save(_state(), storage_writer=writer)
    stats = writer.last_save
    assert set(stats.seconds) == {"plan", "encode", "write", "commit"}
    assert all(seconds >= 0 for seconds in stats.seconds.values())
    assert stats.total_seconds > 0


def test_last_save_is_that_of_the_last(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path / "a")
    dcp.save(_state(), storage_writer=writer)
    first = writer.last_save
    dcp.save({"x": torch.ones(10)}, storage_writer=writer, checkpoint_id=tmp_path / "b")
    assert writer.last_save.save_id != first.save_id
    assert writer.last_save.checkpoint_id == str(tmp_path / "b")
    assert writer.last_save.uncompressed_nbytes == 40
    assert first.uncompressed_nbytes > 40


def test_empty_save(tmp_path: Path) -> None:
    writer = OURS.writer(tmp_path)
    dcp.save({}, storage_writer=writer)
    assert writer.last_save.uncompressed_nbytes == 0
    assert writer.last_save.ratio > 0


def test_on_save_gets_it_once_after_the_commit(tmp_path: Path) -> None:
    told = []

    def on_save(stats: Any) -> None:
        told.append((stats, (tmp_path / ".metadata").exists()))

    writer = OURS.writer(tmp_path, on_save=on_save)
    dcp.save(_state(), storage_writer=writer)
    assert told == [(writer.last_save, True)]
    dcp.save(_state(), storage_writer=writer)
    assert len(told) == 2 and told[1] == (writer.last_save, True)


def test_one_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="dcp_nvcomp")
    writer = OURS.writer(tmp_path)
    dcp.save(_state(), storage_writer=writer)
    lines = [record for record in caplog.records if record.name.split(".")[0] == "dcp_nvcomp"]
    assert len(lines) == 1, [record.getMessage() for record in lines]
    assert lines[0].levelno == logging.INFO
    message = lines[0].getMessage()
    assert str(tmp_path) in message and "\n" not in message
    ratio = re.search(r"ratio (\d+\.\d+)", message)
    assert ratio is not None and float(ratio[1]) == pytest.approx(writer.last_save.ratio, abs=0.01)


def test_load_logs_nothing_at_info(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dcp.save(_state(), storage_writer=OURS.writer(tmp_path))
    caplog.set_level(logging.INFO, logger="dcp_nvcomp")
    caplog.clear()
    dcp.load({"step": None}, storage_reader=OURS.reader(tmp_path))
    assert not [record for record in caplog.records if record.name.split(".")[0] == "dcp_nvcomp"]


def test_no_bar_without_a_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dcp.save(_state(), storage_writer=OURS.writer(tmp_path, progress=True))
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""
