"""Masters that a save derives from weights: exact whatever is loaded, half as large, and never without their weight."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import dcp_nvcomp
from dcp_nvcomp import NvcompWriter, convert, open_checkpoint
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, CorruptDataError
from dcp_nvcomp.format.record import Record
from dcp_nvcomp.loading import bases
from dcp_nvcomp.saving.derived import pairs, together, weight_fqn
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.tools import consolidate, verify
from tests.checkpoints import assert_loads, data_file, load, save
from tests.format.footers import footers_of
from tests.format.independent_reader import read_data_file
from tests.states import assert_same

State = dict[str, Any]

DERIVED = {"optimizer.master.*": "model.*"}
SHAPES = {
    "blocks of whole rows": (100, 700),
    "boxes": (2100, 1030),
    "one row": (1, 70_000),
    "one dimension": (300_001,),
    "four dimensions": (64, 32, 5, 7),
    "small": (7, 3),
}


def trained(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> State:
    """Weights in bfloat16, masters, and another tensor of each."""
    generator, state = torch.Generator().manual_seed(seed), State()
    for name, shape in shapes.items():
        master = 0.02 * torch.randn(shape, generator=generator)
        state[f"optimizer.master.{name}"], state[f"model.{name}"] = master, master.bfloat16()
        state[f"optimizer.exp_avg.{name}"] = 1e-4 * torch.randn(shape, generator=generator)
    return state


def records_of(path: Path) -> dict[str, tuple[Record, str | None]]:
    """Each record, and the key of the one that it is derived from."""
    return {
        record.fqn: (record, None if record.base is None else footer.records[record.base].fqn)
        for footer in footers_of(path)
        for record in footer.records
    }


def derived_in(path: Path) -> dict[str, str]:
    return {fqn: base for fqn, (_, base) in records_of(path).items() if base is not None}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A checkpoint of all shapes; not to be changed."""
    path, state = tmp_path_factory.mktemp("derived") / "c", trained(SHAPES)
    save(path, state, derived=DERIVED)
    return path, state


def test_masters_of_large_tensors_are_derived(whole: tuple[Path, State]) -> None:
    path, state = whole
    expected = {f"optimizer.master.{name}": f"model.{name}" for name in SHAPES if name != "small"}
    assert derived_in(path) == expected
    for footer in footers_of(path):
        for record in footer.records:
            if record.base is not None:
                assert footer.record_encoded_nbytes(record) <= record.uncompressed_nbytes * 0.502 + 4096
    assert_loads(path, state)


@pytest.mark.parametrize("prefix", ["model", "optimizer.master", "optimizer.exp_avg"])
def test_some_keys_alone(whole: tuple[Path, State], prefix: str) -> None:
    path, state = whole
    assert_loads(path, {fqn: value for fqn, value in state.items() if fqn.startswith(prefix)})


def test_masters_alone_are_loaded_with_few_reads(whole: tuple[Path, State], monkeypatch: pytest.MonkeyPatch) -> None:
    path, state = whole
    reads: list[int] = []
    read = PosixFilesystem.read
    monkeypatch.setattr(
        PosixFilesystem, "read", lambda self, *given: reads.append(given[2] - given[1]) or read(self, *given)
    )
    wanted = {fqn: value for fqn, value in state.items() if fqn.startswith("optimizer.master")}
    assert_loads(path, wanted)
    of_weights = sum(
        footers_of(path)[0].record_encoded_nbytes(record)
        for record, _ in records_of(path).values()
        if record.fqn.startswith("model.") and record.pack is None
    )
    assert len(reads) < 16, "one for each run of weights, and the footer's"
    assert sum(reads) < 1.2 * of_weights + (1 << 20)


def test_weights_that_are_loaded_too_are_read_once(
    whole: tuple[Path, State], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = whole
    monkeypatch.setattr(PosixFilesystem, "parallel_reads", 1)  # no thread is ahead of the one that places weights
    with caplog.at_level("INFO"):
        load(path, state, thread_count=1)
    (line,) = [one.message for one in caplog.records if one.message.startswith("loaded")]
    stored = sum(file.stat().st_size for file in path.glob("*.distcp")) / 1e6
    read = float(line.split("of which ")[1].split(" MB")[0])
    assert read == pytest.approx(stored, rel=0.01)


def test_regions(whole: tuple[Path, State]) -> None:
    path, state = whole
    with open_checkpoint(path) as checkpoint:
        for name, where in {
            "boxes": (slice(1500, 1777), slice(333, 999)),
            "blocks of whole rows": (slice(3, 4), slice(0, 700)),
            "one dimension": (slice(150_000, 300_001),),
            "four dimensions": (slice(60, 64), slice(0, 3), slice(1, 2), slice(6, 7)),
        }.items():
            fqn = f"optimizer.master.{name}"
            assert_same(checkpoint[fqn][where], state[fqn][where])


def test_the_independent_reader(whole: tuple[Path, State]) -> None:
    path, state = whole
    (file,) = path.glob("*.distcp")
    found = {fqn: elements for (fqn, _), (*_, elements) in read_data_file(file.read_bytes()).items()}
    assert {fqn: value.view(torch.uint8).numpy().tobytes() for fqn, value in state.items()} == found


def test_verify_and_convert(whole: tuple[Path, State], tmp_path: Path) -> None:
    path, state = whole
    assert verify(path, full=True).is_sound
    convert(path, tmp_path / "d", to="dcp-nvcomp")
    assert derived_in(tmp_path / "d") == {}
    assert_loads(tmp_path / "d", state)


@pytest.mark.parametrize(
    "options", [{"single_file_per_rank": False}, {"thread_count": 4}], ids=["a file each", "files"]
)
def test_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(PosixFilesystem, "file_nbytes_worthwhile", 1 << 20)
    monkeypatch.setattr(PosixFilesystem, "output_streams", lambda self, *given: 4)
    state = trained(SHAPES)
    save(tmp_path, state, derived=DERIVED, **options)
    assert len(list(tmp_path.glob("*.distcp"))) > 1
    assert len(derived_in(tmp_path)) == 5
    assert_loads(tmp_path, state)


def test_asynchronous_saves(tmp_path: Path) -> None:
    state = trained({"a": (500, 700)})
    for step in range(2):
        path = tmp_path / str(step)
        dcp_nvcomp.async_save(state, path, no_dist=True, derived=DERIVED).upload_completion.result()
        assert derived_in(path) == {"optimizer.master.a": "model.a"}
        assert_loads(path, state)


def changed(name: str) -> State:
    """A state whose master is not derived, for a reason."""
    state = trained({"a": (300, 700)})
    weight, master = state["model.a"], state["optimizer.master.a"]
    state |= {
        "another weight": {"model.a": trained({"a": (300, 700)}, seed=1)["model.a"]},
        "a weight that was cut": {"model.a": (master.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)},
        "another shape": {"model.a": weight.reshape(700, 300)},
        "another dtype": {"model.a": master.half()},
        "a master of another dtype": {"optimizer.master.a": master.double()},
        "a master that is the weight": {"optimizer.master.a": weight.float()},
        "no weight": {"model.a": 5},
        "zeros": {"model.a": torch.zeros_like(weight), "optimizer.master.a": torch.zeros_like(master)},
        "another layout": {"model.a": weight.t().contiguous().t()},
    }[name]
    return state


@pytest.mark.parametrize(
    "name",
    [
        *("another weight", "a weight that was cut", "another shape", "another dtype", "a master of another dtype"),
        *("a master that is the weight", "no weight", "zeros", "another layout"),
    ],
)
def test_what_is_not_a_rounded_master_is_stored_as_usual(tmp_path: Path, name: str) -> None:
    state = changed(name)
    save(tmp_path / "a", state, derived=DERIVED)
    save(tmp_path / "b", state)
    assert derived_in(tmp_path / "a") == {}
    usual, own = ({fqn: one.chain for fqn, (one, _) in records_of(tmp_path / path).items()} for path in "ba")
    assert own == usual
    assert_loads(tmp_path / "a", state)


def test_a_part_that_was_not_rounded(tmp_path: Path) -> None:
    state = trained({"a": (3000, 700)})
    state["model.a"][1000:1040].add_(1)
    save(tmp_path, state, derived=DERIVED)
    assert derived_in(tmp_path) == {"optimizer.master.a": "model.a"}
    (footer,) = footers_of(tmp_path)
    record = records_of(tmp_path)["optimizer.master.a"][0]
    flags = footer.tables.flags[record.first_block : record.first_block + record.block_count].tolist()
    assert 0 in flags and sum(flag & 4 for flag in flags) > 2 * len(flags)
    assert_loads(tmp_path, state)
    assert_loads(tmp_path, {"optimizer.master.a": state["optimizer.master.a"]})


def test_strided_tensors(tmp_path: Path) -> None:
    state = trained({"a": (700, 3000)})
    state = {fqn: value.t() for fqn, value in state.items()}
    save(tmp_path, state, derived=DERIVED)
    assert_loads(tmp_path, state)


def test_two_masters_of_one_weight(tmp_path: Path) -> None:
    state = trained({"a": (300, 700)})
    state["ema.a"] = state["optimizer.master.a"].clone()
    save(tmp_path, state, derived={**DERIVED, "ema.*": "model.*"})
    assert len(derived_in(tmp_path)) == 1
    assert_loads(tmp_path, state)


def test_other_codecs_ignore_it(tmp_path: Path) -> None:
    state = trained({"a": (300, 700)})
    save(tmp_path, state, derived=DERIVED, codec="zstd")
    assert derived_in(tmp_path) == {}
    assert_loads(tmp_path, state)


def test_references(tmp_path: Path) -> None:
    """What is shared keeps its base where it is; a checkpoint that is made whole gets both."""
    state = trained({"a": (300, 700), "b": (300, 700)})
    dcp_nvcomp.save(state, tmp_path / "1", no_dist=True, derived=DERIVED, reference=())
    state = {**state, **trained({"b": (300, 700)}, seed=1)}
    dcp_nvcomp.save(state, tmp_path / "2", no_dist=True, derived=DERIVED, reference=tmp_path / "1")
    assert derived_in(tmp_path / "2") == {f"optimizer.master.{name}": f"model.{name}" for name in "ab"}
    assert_loads(tmp_path / "2", state)
    # the weight is shared, and its master is not: it has nothing to be derived from
    state["optimizer.master.a"] = state["optimizer.master.a"] * (1 + 2**-20)
    dcp_nvcomp.save(state, tmp_path / "3", no_dist=True, derived=DERIVED, reference=tmp_path / "2")
    assert_loads(tmp_path / "3", state)
    consolidate(tmp_path / "2")
    shutil.rmtree(tmp_path / "1")
    assert derived_in(tmp_path / "2") == {f"optimizer.master.{name}": f"model.{name}" for name in "ab"}
    assert verify(tmp_path / "2", full=True).is_sound


def test_a_master_alone_is_made_whole_with_its_base(tmp_path: Path) -> None:
    state = trained({"a": (300, 700)})
    dcp_nvcomp.save(state, tmp_path / "1", no_dist=True, derived=DERIVED, reference=())
    master = {"optimizer.master.a": state["optimizer.master.a"]}
    dcp_nvcomp.save(master, tmp_path / "2", no_dist=True, reference=tmp_path / "1")
    consolidate(tmp_path / "2")
    shutil.rmtree(tmp_path / "1")
    assert_loads(tmp_path / "2", master)
    assert verify(tmp_path / "2", full=True).is_sound


def damaged(path: Path, fqn: str) -> tuple[int, int]:
    """Flip a bit in the first block of a record; returns its byte range."""
    (footer,) = footers_of(path)
    start, stop = footer.block_offsets[records_of(path)[fqn][0].first_block :][:2].tolist()
    (file,) = path.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[start + 5] ^= 1
    file.write_bytes(data)
    return start, stop


@pytest.mark.parametrize("verified", ["stored", "full"])
@pytest.mark.parametrize("fqn", ["model.a", "optimizer.master.a"])
def test_damage_is_found_where_it_is(tmp_path: Path, fqn: str, verified: str) -> None:
    state = trained({"a": (300, 700)})
    save(tmp_path, state, derived=DERIVED)
    byte_range = damaged(tmp_path, fqn)
    with pytest.raises(CheckpointException) as raised:
        load(tmp_path, {"optimizer.master.a": state["optimizer.master.a"]}, verify=verified)
    (error,) = raised.value.failures.values()
    error = getattr(error, "exc", error)
    error = error[0] if isinstance(error, tuple) else error
    assert isinstance(error, CorruptDataError)
    assert (error.fqn, error.byte_range) == (fqn, byte_range)
    found = verify(tmp_path, full=True).findings
    assert {one.byte_range for one in found} == {byte_range}


def test_a_weight_that_changes_in_a_save_fails_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a master is derived from is what was stored, and not what comes after it."""
    state = trained({"a": (300, 700)})
    encode_from = CpuEngine.encode_from

    def train(self: CpuEngine, base: Any, *given: Any) -> Any:
        state["model.a"][5, 5] += 1
        return encode_from(self, base, *given)

    monkeypatch.setattr(CpuEngine, "encode_from", train)
    with pytest.raises(CheckpointError, match="changed while both were saved") as raised:
        dcp_nvcomp.save(state, tmp_path, no_dist=True, derived=DERIVED, thread_count=1)
    assert raised.value.fqn == "optimizer.master.a"
    assert not list(tmp_path.iterdir())


def test_bases_in_any_order_are_read_once(tmp_path: Path) -> None:
    state = trained({"a": (2000, 1024)})
    save(tmp_path, state, derived=DERIVED)
    (footer,) = footers_of(tmp_path)
    record, reads = records_of(tmp_path)["optimizer.master.a"][0], list[int]()
    numbers = list(range(record.first_block, record.first_block + record.block_count))[::-1]
    data = data_file(tmp_path).read_bytes()

    def read(start: int, stop: int) -> bytes:
        reads.append(stop - start)
        return data[start:stop]

    stored = bases.StoredBases(footer, 0, memoryview(b""), [(record, number) for number in numbers], read)
    for number in numbers:
        base = bases.base_of(footer, record, number)
        assert base is not None
        out = np.empty(int(footer.block_nbytes[base.number]), np.uint8)
        stored.decode(base, CpuEngine(), out, verify="full")
        assert sum(len(fetched) for _, fetched in stored._fetched) <= 1 << 20, "no more is in memory at once"
    of_bases = footer.record_encoded_nbytes(footer.records[record.base or 0])
    assert sum(reads) <= of_bases and len(reads) < len(numbers)


def test_a_weight_that_was_flipped_on_the_way_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained({"a": (300, 700)})
    save(tmp_path, state, derived=DERIVED)
    read, flipped = PosixFilesystem.read, list[int]()

    def flip(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        data = bytearray(read(self, name, start, stop))
        if name.endswith(".distcp") and stop - start > 100_000 and not flipped:
            flipped.append(start)
            data[1000] ^= 1
        return bytes(data)

    monkeypatch.setattr(PosixFilesystem, "read", flip)
    assert_loads(tmp_path, {"optimizer.master.a": state["optimizer.master.a"]})
    assert flipped


def test_a_weight_that_the_load_changes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner may do with a weight what it wants once it is there: its CRC says so."""
    state = trained({"a": (300, 700)})
    save(tmp_path, state, derived=DERIVED)
    is_loaded = bases._copy_loaded
    asked: list[bool] = []

    def look(read: Any, base: Any, out: Any) -> bool:
        block = read.wanted[base.number]
        block.targets[0].destination.direct(bases.alone(block.box)).rows[...] = 7
        asked.append(is_loaded(read, base, out))
        return asked[-1]

    monkeypatch.setattr(bases, "_copy_loaded", look)
    found = load(tmp_path, state, thread_count=1)
    assert asked and not any(asked)
    assert_same(found["optimizer.master.a"], state["optimizer.master.a"])


@pytest.mark.parametrize(
    "derived", [{"a.*": "b"}, {"a": "b.*"}, {"a.*.*": "b.*.*"}, {"a": 5}, {5: "a"}, ["a"], "a"], ids=repr
)
def test_options_that_mean_nothing(tmp_path: Path, derived: Any) -> None:
    with pytest.raises(ConfigurationError, match="derived="):
        NvcompWriter(tmp_path, derived=derived)


def test_a_pair_is_of_one_region() -> None:
    def item(fqn: str, first: int, dtype: torch.dtype) -> WriteItem:
        box = ChunkStorageMetadata(torch.Size([first, 0]), torch.Size([500, 400]))
        data = TensorWriteData(box, TensorProperties(dtype=dtype), torch.Size([1000, 400]))
        return WriteItem(MetadataIndex(fqn, box.offsets), WriteItemType.SHARD, tensor_data=data)

    items = [item("model.a", 0, torch.bfloat16), item("model.a", 500, torch.bfloat16)]
    items.append(item("optimizer.master.a", 500, torch.float32))
    assert pairs(items, DERIVED) == {items[2].index: items[1].index}
    assert together(items, pairs(items, DERIVED)) == [(items[0],), (items[1], items[2])]
    assert pairs(items[::2], DERIVED) == {}


def test_keys() -> None:
    derived = {"opt.*.master": "model.*.weight", "exactly": "this"}
    assert weight_fqn("opt.layers.0.master", derived) == "model.layers.0.weight"
    assert weight_fqn("exactly", derived) == "this"
    assert weight_fqn("opt.master", derived) is None, "what a * stands for is between two dots here"
    assert weight_fqn("opt.layers.0.exp_avg", derived) is None
