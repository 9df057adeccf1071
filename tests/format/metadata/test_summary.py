"""The summary at the end of `.metadata`: found without parsing the rest, and of no meaning to other readers."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader

from dcp_nvcomp import NvcompWriter, save
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.format.metadata.summary import SUMMARY_NBYTES, Summary, summary_at_end
from tests.checkpoints import save as dcp_save
from tests.format.metadata.test_sharing import metadata_of, some_items

SUMMARY = Summary("ab" * 16, 1.5, 4, 10, 1000, 800, "1.2.3")


def test_it_is_found_in_the_last_bytes() -> None:
    data = serialize_metadata(metadata_of(some_items()), SUMMARY)
    assert summary_at_end(data) == summary_at_end(data[-SUMMARY_NBYTES:]) == SUMMARY
    assert SUMMARY.ratio == 1.25
    assert dataclasses.replace(SUMMARY, uncompressed_nbytes=0).ratio == 1.0


def test_readers_see_what_they_saw() -> None:
    metadata = metadata_of(some_items())
    with_it, without = (serialize_metadata(metadata, summary) for summary in (SUMMARY, None))
    assert parse_metadata(with_it, path="x") == parse_metadata(without, path="x")
    assert pickle.loads(with_it) == metadata
    assert not hasattr(metadata, "dcp_nvcomp_summary"), "the caller's object stays as it is"
    assert summary_at_end(without) is None


@pytest.mark.parametrize("writer", ["save", "dcp.save"])
def test_every_save_writes_one(tmp_path: Path, writer: str) -> None:
    state = {"w": torch.zeros(1000), "step": 3}
    for number in range(3):
        path = tmp_path / str(number)
        if writer == "save":
            save(state, path, no_dist=True)
        else:
            dcp_save(path, state)
        found = summary_at_end((path / ".metadata").read_bytes()[-SUMMARY_NBYTES:])
        assert found is not None
        assert (found.ranks, found.keys) == (1, 2)
        assert found.stored_nbytes == sum(file.stat().st_size for file in path.glob("*.distcp"))
        assert found.uncompressed_nbytes > 4000
        assert (path / f"__{found.save_id}.metadata").exists()
        assert FileSystemReader(path).read_metadata().state_dict_metadata.keys() == {"w", "step"}


def test_of_another_writer_there_is_none(tmp_path: Path) -> None:
    writer = NvcompWriter(tmp_path)
    assert summary_at_end(repr(writer).encode()) is None


def test_what_later_versions_add_is_kept() -> None:
    later = dataclasses.replace(SUMMARY, more={"rungs": 12, "notes": {"by": "x"}})
    text = later.to_text()
    assert text is not None and summary_at_end(text.encode()) == later


def test_step_and_metrics_of_a_run_are_kept() -> None:
    of_a_run = dataclasses.replace(SUMMARY, step=12, metrics={"loss": 0.5, "accuracy": 1})
    text = of_a_run.to_text()
    assert text is not None and summary_at_end(text.encode()) == of_a_run


def test_of_a_save_outside_a_run_nothing_is_said_of_steps() -> None:
    text = SUMMARY.to_text()
    assert text is not None and "step" not in text and "metrics" not in text


@pytest.mark.parametrize("wrong", [{"step": -1}, {"step": "1"}, {"step": 1, "metrics": {"loss": "low"}}])
def test_steps_that_no_run_writes_are_refused(wrong: dict[str, Any]) -> None:
    values = {name: value for name, value in dataclasses.asdict(SUMMARY).items() if name != "more"}
    text = json.dumps({**values, **wrong})
    assert summary_at_end(f"DCPNVsum{crc32c(text.encode()):08x}{text}".encode()) is None


def test_one_that_is_too_long_is_left_out() -> None:
    huge = dataclasses.replace(SUMMARY, more={"note": "x" * SUMMARY_NBYTES})
    assert huge.to_text() is None
    assert summary_at_end(serialize_metadata(metadata_of(some_items()), huge)) is None


@given(st.data())
def test_damage_is_noticed(data: st.DataObject) -> None:
    text = SUMMARY.to_text()
    assert text is not None
    damaged = bytearray(text.encode())
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != damaged[at]))
    found = summary_at_end(bytes(damaged))
    assert found is None or found == SUMMARY  # hexadecimal digits may be of either case


@given(st.binary(max_size=200))
def test_any_bytes_may_come(data: bytes) -> None:
    assert summary_at_end(b"DCPNVsum" + data) is None
