"""What input can be bad in gets its own clear error: metadata, footers, options, codecs without a GPU.

Damaged, cut, swapped and missing files are in tests/faults/test_damage.py, full disks in test_full_disk.py.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp import NvcompReader, NvcompWriter, errors
from dcp_nvcomp.codecs import Bytes, CodecChain, Zstd
from tests.checkpoints import data_file, failure_of, flip, load, load_into, save
from tests.cli.checkpoints import change_footer


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    return {
        "large": torch.randn(600, 1000, generator=generator),
        "small": torch.arange(50, dtype=torch.bfloat16),
        "object": {"lr": 0.1},
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tmp_path / "checkpoint", state())
    return tmp_path / "checkpoint"


# --- reading ---------------------------------------------------------------------------------------------------------


def test_missing_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "nothing"
    with pytest.raises(errors.CheckpointNotFoundError, match="no checkpoint here") as caught:
        NvcompReader(path).read_metadata()
    assert caught.value.path == str(path) and not path.exists()
    assert not isinstance(caught.value, errors.IncompleteCheckpointError)
    error = failure_of(lambda: load(path, state()))
    assert isinstance(error, errors.CheckpointNotFoundError) and error.path == str(path)


def test_incomplete_checkpoint(checkpoint: Path) -> None:
    for name in checkpoint.glob("*.metadata"):
        name.unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match="never finished"):
        NvcompReader(checkpoint).read_metadata()
    assert "never finished" in str(failure_of(lambda: load(checkpoint, state())))


def test_verify_full_checks_the_decoded_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong decoded CRC in the footer, everything else right: only verify='full' notices."""
    from dcp_nvcomp.engines import cpu

    real = cpu.checksum
    content = {"large": torch.randn(600, 1000)}
    shapes = {"large": torch.zeros(600, 1000)}

    def wrong_of_decoded(data: Any, value: int = 0) -> int:
        # blocks to encode are arrays; encoded ones are memoryviews
        return real(data, value) ^ (0 if isinstance(data, memoryview) else 1)

    monkeypatch.setattr(cpu, "checksum", wrong_of_decoded)
    save(tmp_path, content, codec="zstd")  # trained floats are summed by a kernel
    monkeypatch.undo()
    load_into(tmp_path, dict(shapes), verify="stored")
    error = failure_of(lambda: load_into(tmp_path, dict(shapes), verify="full"))
    assert isinstance(error, errors.CorruptDataError) and "decoded bytes" in str(error)


def test_verify_off_skips_the_stored_crc(checkpoint: Path) -> None:
    """Otherwise tests of flipped bytes could pass by the decoder's own errors."""
    flip(data_file(checkpoint), 4096 + 100)  # in a stored plane
    loaded = load(checkpoint, state(), verify="off")
    assert not torch.equal(loaded["large"], state()["large"])


def test_footer_that_disagrees_with_metadata(checkpoint: Path) -> None:
    def rename(footer: dict[str, Any], _: object) -> None:
        footer["records"][0]["fqn"] = "other"

    change_footer(checkpoint, rename)
    error = failure_of(lambda: load(checkpoint, state()))
    assert isinstance(error, errors.FileMismatchError) and "disagrees" in str(error) and error.fqn == "large"


def test_footer_with_another_shape(checkpoint: Path) -> None:
    def change(footer: dict[str, Any], _: object) -> None:
        footer["records"][0].update(shape=[1000, 600], block_shape=footer["records"][0]["block_shape"])
        footer["records"][0]["block_shape"] = [500, 600]

    change_footer(checkpoint, change)
    assert isinstance(failure_of(lambda: load(checkpoint, state())), errors.CheckpointError)


class _LooksAtPaths(DefaultLoadPlanner):
    """A planner that uses another part of the metadata first."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        assert "large" in metadata.planner_data


@pytest.mark.parametrize("planner", [None, _LooksAtPaths()])
def test_what_could_not_be_opened_is_named_by_our_error(tmp_path: Path, planner: dcp.LoadPlanner | None) -> None:
    reader = NvcompReader(tmp_path)
    for place, kind in (("s4://bucket/run", errors.ConfigurationError), (tmp_path, errors.CheckpointNotFoundError)):
        error = failure_of(lambda: dcp.load(state(), checkpoint_id=place, storage_reader=reader, planner=planner))
        assert isinstance(error, kind), error


def edit_metadata(path: Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def test_unreadable_metadata_never_falls_back_to_rank_local(checkpoint: Path) -> None:
    shutil.copy(checkpoint / ".metadata", checkpoint / "__0.metadata")
    (checkpoint / ".metadata").write_bytes(b"garbage")
    with pytest.raises(errors.MetadataError):
        NvcompReader(checkpoint).read_metadata(rank=0)
    failure_of(lambda: load(checkpoint, state()))


def test_metadata_that_misses_a_shard(checkpoint: Path) -> None:
    def change(metadata: Metadata) -> None:
        metadata.storage_data = {i: v for i, v in metadata.storage_data.items() if i.fqn != "large"}

    edit_metadata(checkpoint, change)
    error = failure_of(lambda: load(checkpoint, state()))
    assert "large" in str(error) and isinstance(error, errors.MetadataError | AssertionError)


@pytest.fixture
def no_safe_globals() -> Iterator[None]:
    """Forget what frameworks that other tests import, such as Megatron-core, have declared safe."""
    known = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.add_safe_globals(known)


@pytest.mark.usefixtures("no_safe_globals")
def test_unsafe_object(tmp_path: Path) -> None:
    save(tmp_path, {"o": {"when": Path("/x")}, "w": torch.ones(3)})
    into: dict[str, Any] = {"o": {"when": None}, "w": torch.zeros(3)}
    error = failure_of(lambda: load_into(tmp_path, into, safe_objects=True))
    assert isinstance(error, errors.UnsafeObjectError) and "PosixPath" in str(error)
    load_into(tmp_path, into, safe_objects=True, trusted_globals=("pathlib.PosixPath",))
    assert into["o"]["when"] == Path("/x")


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (NvcompWriter, {"codec": "zstandard"}, "Did you mean 'zstd'"),
        (NvcompWriter, {"codec": 7}, "neither a name"),
        (NvcompWriter, {"on_save": "print"}, "on_save"),
        (NvcompReader, {"verify": "always"}, "verify"),
        (NvcompReader, {"verfy": "full"}, "verify"),
        (NvcompReader, {"trusted_globals": ("no.such.thing",)}, "no.such.thing"),
        *(
            (made, {option: value}, option)
            for made in (NvcompWriter, NvcompReader)
            for option, value in (
                *(("host_memory_budget", value) for value in (0, -5)),
                *(("device_memory_budget", value) for value in (0, -1, 1.5)),
                *(("thread_count", value) for value in (0, -1)),
                *(("engine", value) for value in ("gpu", "CUDA")),
            )
        ),
    ],
)
def test_wrong_option(tmp_path: Path, made: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=message):
        made(tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


def test_ans_without_a_gpu(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("gpu: there is one")
    error = failure_of(lambda: save(tmp_path, state(), codec="ans"))
    assert isinstance(error, errors.CodecUnavailableError)
    assert "codec='auto'" in str(error)
    assert list(tmp_path.glob("*")) == []


def test_ans_record_without_a_gpu(tmp_path: Path) -> None:
    """A record that a GPU would have written: zstd slices under ANS's name, as nothing here can make real ones."""
    if torch.cuda.is_available():
        pytest.skip("gpu: there is one")
    save(tmp_path, {"w": torch.zeros(1 << 20)}, codec=CodecChain(Bytes(), Zstd(slice_nbytes=1 << 20)))

    def change(footer: dict[str, Any], _: object) -> None:
        configuration = {"slice_nbytes": 1 << 20, "data_type": "<f4", "nvcomp_version": "6.0.0"}
        footer["codecs"][0][1] = {"name": "ans", "configuration": configuration}

    change_footer(tmp_path, change)
    error = failure_of(lambda: load_into(tmp_path, {"w": torch.ones(1 << 20)}))
    assert isinstance(error, errors.CodecUnavailableError) and error.fqn == "w"
    assert "NVIDIA GPU" in str(error) and "save it again with codec='auto'" in str(error)


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_survive_pickling(name: str) -> None:
    cls = getattr(errors, name)
    error = cls("what happened", path="/p", fqn="k", byte_range=(1, 2))
    if isinstance(error, OSError):
        error.errno = 28
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls and str(again) == str(error)
    assert (again.path, again.fqn, again.byte_range) == ("/p", "k", (1, 2))
    assert getattr(again, "errno", None) == getattr(error, "errno", None)
