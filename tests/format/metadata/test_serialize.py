"""What stock torch, without this package, sees in our `.metadata`; and how large it is."""

from __future__ import annotations

import dataclasses
import enum
import io
import json
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp import save
from dcp_nvcomp.errors import MetadataError
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.format.metadata.shards import StockItem
from dcp_nvcomp.format.metadata.summary import SUMMARY_NBYTES, Summary, summary_at_end
from dcp_nvcomp.format.names import METADATA_NAME, rank_metadata_name, rank_of_metadata_name, save_metadata_name
from tests.checkpoints import save as dcp_save
from tests.format.metadata.test_sharing import metadata_of, some_items

STOCK_READER = """
import json, sys
sys.modules["dcp_nvcomp"] = None  # importing it fails
from torch.distributed.checkpoint import FileSystemReader
metadata = FileSystemReader(sys.argv[1]).read_metadata()
tensors = {fqn: [str(item.properties.dtype), item.size] for fqn, item in metadata.state_dict_metadata.items()}
values = [[index.fqn, index.offset, value] for index, value in metadata.storage_data.items()]
print(json.dumps([tensors, metadata.planner_data, values, metadata.storage_meta.save_id]))
"""


def many(count: int) -> Metadata:
    file = ("__0_0_" + "5d" * 16 + ".distcp", 1 << 30, 1 << 20, 0xFFFFFFFF)
    metadata = Metadata({}, {}, {}, StorageMeta("s3://bucket/run/step-1000", "5d" * 16), "1.0.0")
    for number in range(count):
        fqn = f"model.layers.{number:05d}.attention.weight"
        shard = ChunkStorageMetadata(torch.Size([0]), torch.Size([256]))
        metadata.state_dict_metadata[fqn] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([256]), [shard]
        )
        metadata.planner_data[fqn] = tuple(fqn.split("."))
        metadata.storage_data[MetadataIndex(fqn, [0], 0)] = (file, number)
    return metadata


def test_stock_torch_reads_it_without_this_package(tmp_path: Path) -> None:
    (tmp_path / METADATA_NAME).write_bytes(serialize_metadata(many(2)))
    command = [sys.executable, "-W", "error", "-c", STOCK_READER, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    tensors, planner_data, values, save_id = json.loads(done.stdout)
    names = [f"model.layers.0000{number}.attention.weight" for number in range(2)]
    assert tensors == {name: ["torch.float32", [256]] for name in names}
    assert planner_data == {name: name.split(".") for name in names}
    file = ["__0_0_" + "5d" * 16 + ".distcp", 1 << 30, 1 << 20, 0xFFFFFFFF]
    assert values == [[name, [0], [file, number]] for number, name in enumerate(names)]
    assert save_id == "5d" * 16


def test_no_release_of_python_writes_a_call_of_getattr(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = serialize_metadata(many(2))

    def early(self: enum.Enum, protocol: int) -> tuple[Any, ...]:  # as Python 3.11.2 has it
        return getattr, (type(self), self.name)

    (kind,) = {type(value) for value in TensorProperties().__getstate__() if isinstance(value, enum.Enum)}
    monkeypatch.setattr(kind, "__reduce_ex__", early)
    assert b"getattr" in pickle.dumps(many(2))  # that is what would be written
    assert serialize_metadata(many(2)) == expected


def test_size_of_many_small_tensors() -> None:
    assert len(serialize_metadata(many(10_000))) <= 260 * 10_000


def test_every_flipped_bit_is_noticed() -> None:
    data = bytearray(serialize_metadata(many(1)))
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(MetadataError):
                parse_metadata(bytes(data), path="x")
            data[position] ^= 1 << bit
    assert parse_metadata(bytes(data), path="x").version == many(1).version


def test_trailer() -> None:
    data = serialize_metadata(many(1))
    pickled = data[:-12]
    assert data[-12:] == crc32c(pickled).to_bytes(4, "little") + b"DCPNVcrc"
    assert pickle.dumps(pickle.loads(data), protocol=4) == pickled, "unpicklers do not mind what follows"
    assert pickle.load(io.BytesIO(data)).version == many(1).version
    assert list(parse_metadata(pickled, path="x").state_dict_metadata) == ["model.layers.00000.attention.weight"]
    for damaged in (data[:-1], data[:-8], data + b"x", data + data[-12:], data[-12:], data[-8:], pickled + data[-8:]):
        with pytest.raises(MetadataError):
            parse_metadata(damaged, path="x")


def test_nothing_but_tuples_is_written() -> None:
    metadata = many(1)
    metadata.storage_data = {MetadataIndex("w"): StockItem("a", 0, 1, ())}
    with pytest.raises(AssertionError):
        serialize_metadata(metadata)


@pytest.mark.parametrize(
    "name",
    [
        ".metadata",
        save_metadata_name("12" * 16),  # an id may have no letter in it
        "__01.metadata",
        "__-1.metadata",
        "__1.metadata.tmp",
        "x__1.metadata",
        "__1.metadata\n",
        "__\u0661.metadata",
    ],
)
def test_names_that_are_no_ranks(name: str) -> None:
    assert rank_of_metadata_name(name) is None
    assert rank_metadata_name(12) == "__12.metadata" and rank_of_metadata_name("__12.metadata") == 12


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


@pytest.mark.parametrize(
    "changed",
    [
        {"step": 12, "metrics": {"loss": 0.5, "accuracy": 1, "inf": math.inf}},
        {"more": {"rungs": 12, "notes": {"by": "x"}}},  # what later versions add
    ],
)
def test_all_of_a_summary_is_kept(changed: dict[str, Any]) -> None:
    summary = dataclasses.replace(SUMMARY, **changed)
    text, plain = summary.to_text(), SUMMARY.to_text()
    assert text is not None and summary_at_end(text.encode()) == summary
    assert plain is not None and "step" not in plain and "metrics" not in plain
    huge = dataclasses.replace(SUMMARY, more={"note": "x" * SUMMARY_NBYTES})
    assert huge.to_text() is None and summary_at_end(serialize_metadata(metadata_of(some_items()), huge)) is None


@pytest.mark.parametrize(
    "wrong",
    [
        *({"step": step} for step in (-1, "1", 10**400)),
        *({"metrics": {"loss": loss}} for loss in ("low", 10**400, -(10**400), True)),
        *({"saved_seconds": seconds} for seconds in (math.nan, math.inf, 10**400)),
        *({name: 10**400} for name in ("ranks", "uncompressed_nbytes")),
        {"stored_nbytes": 1 << 63},
        {"keys": math.inf},
    ],
)
def test_what_no_run_writes_is_refused(wrong: dict[str, Any]) -> None:
    values = {name: value for name, value in dataclasses.asdict(SUMMARY).items() if name != "more"}
    for changed, is_read in (({"step": 7, "metrics": {"loss": math.nan}}, True), (wrong, False)):
        text = json.dumps({**values, "step": 1, **changed})
        found = summary_at_end(f"DCPNVsum{crc32c(text.encode()):08x}{text}".encode())
        assert (found is not None) == is_read


@given(st.data(), st.binary(max_size=200))
def test_damage_is_noticed(data: st.DataObject, junk: bytes) -> None:
    text = SUMMARY.to_text()
    assert text is not None
    damaged = bytearray(text.encode())
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] = data.draw(st.integers(0, 255).filter(lambda byte: byte != damaged[at]))
    found = summary_at_end(bytes(damaged))
    assert found is None or found == SUMMARY  # hexadecimal digits may be of either case
    assert summary_at_end(b"DCPNVsum" + junk) is None
