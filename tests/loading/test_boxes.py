"""Saves and loads of large matrices, whose boxes are coded together: wherever they come from and go to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_nvcomp import CorruptDataError, NvcompReader
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.format.block_grid import BlockGrid, box_grid
from dcp_nvcomp.format.data_file import DataFileRef, read_footer
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.saving.encode import records
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import assert_loads, data_file, flip, load_into, save

SHAPE = (600, 1200)  # boxes of 200 x 300, four in a row


def trained(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.02).to(dtype)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each strip of several blocks that was to be decoded was."""
    done: list[bool] = []
    decode = CpuEngine.decode_beside

    def watched(self: CpuEngine, *given: object, **more: object) -> bool:
        done.append(decode(self, *given, **more))  # type: ignore[arg-type]
        return done[-1]

    monkeypatch.setattr(CpuEngine, "decode_beside", watched)
    return done


def footer_of(path: Path) -> Footer:
    (stored,) = {stored.file for stored in NvcompReader(path).read_metadata().storage_data.values()}
    return read_footer(open_filesystem(path), DataFileRef(*stored))


MATRICES: dict[str, Callable[[], torch.Tensor]] = {
    "fp32": lambda: trained(*SHAPE),
    "bf16": lambda: trained(700, 1600, dtype=torch.bfloat16),
    "fp64": lambda: trained(300, 1100, dtype=torch.float64),
    "complex64": lambda: torch.complex(trained(400, 700), trained(400, 700)),
    "complex128": lambda: torch.complex(trained(300, 500), trained(300, 500)).to(torch.complex128),
    "integers": lambda: torch.arange(600 * 1200).remainder(977).view(600, 1200).to(torch.int32),
    "bytes": lambda: torch.arange(1200 * 1300).remainder(251).view(1200, 1300).to(torch.uint8),
    "experts": lambda: trained(3, 600, 700),
    "transposed": lambda: trained(1200, 600).t(),
    "columns of a wider matrix": lambda: trained(600, 2000)[:, 300:1500],
    "rows of every second": lambda: trained(1200, 1200)[::2],
    "positive": lambda: trained(*SHAPE).abs(),
    "a short last box": lambda: trained(600, 1201),
    "stacked boxes": lambda: trained(2048, 512),
}


@pytest.mark.ci
@pytest.mark.parametrize("codec", ["auto", "planes-zstd", "none"])
@pytest.mark.parametrize("kind", MATRICES)
def test_matrices_come_back(tmp_path: Path, kind: str, codec: str) -> None:
    state = {"w": MATRICES[kind]()}
    save(tmp_path, state, codec=codec)
    assert any(record.block_count > 1 for record in footer_of(tmp_path).records)
    assert_loads(tmp_path, state, verify="full")
    rotated = load_into(tmp_path, {"w": torch.zeros_like(state["w"]).mT.contiguous().mT})
    assert torch.equal(rotated["w"], state["w"])
    target = torch.zeros((*state["w"].shape[:-1], state["w"].shape[-1] + 7), dtype=state["w"].dtype)
    loaded = load_into(tmp_path, {"w": target[..., 3:-4]})
    assert torch.equal(loaded["w"], state["w"])
    assert not target[..., :3].any()
    assert not target[..., -4:].any()


def test_boxes_are_decoded_together(tmp_path: Path, together: list[bool]) -> None:
    state = {"w": trained(*SHAPE)}
    save(tmp_path, state)
    assert_loads(tmp_path, state, verify="full")
    assert len(together) == footer_of(tmp_path).records[0].block_count // 4
    assert all(together)


@pytest.mark.parametrize("block_shape", [(2, 64, 64), (1, 64, 64), (2, 256, 16), (2, 100, 64), (1, 256, 64)])
@pytest.mark.parametrize("verify", ["stored", "full"])
def test_boxes_of_any_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_shape: tuple[int, ...], verify: str
) -> None:
    """Another writer may choose any: what follows in the file may be interleaved in memory."""
    monkeypatch.setattr(records, "box_grid", lambda shape, nbytes: BlockGrid(shape, block_shape))
    state = {"w": trained(2, 256, 64)}
    save(tmp_path, state)
    assert footer_of(tmp_path).records[0].grid == BlockGrid((2, 256, 64), block_shape)
    assert_loads(tmp_path, state, verify=verify)


def middle_block(footer: Footer) -> tuple[int, int]:
    """Where the third block begins and ends: within the first strip."""
    start, stop = footer.block_offsets[2:4]
    return int(start), int(stop)


def test_a_corrupt_block_of_a_strip_is_named(tmp_path: Path, together: list[bool]) -> None:
    save(tmp_path, {"layers.w": trained(*SHAPE)})
    start, stop = middle_block(footer_of(tmp_path))
    flip(data_file(tmp_path), (start + stop) // 2)
    with pytest.raises(CheckpointException) as caught:
        load_into(tmp_path, {"layers.w": torch.zeros(SHAPE)})
    (error,) = (one[0] for one in caught.value.failures.values())
    assert isinstance(error, CorruptDataError)
    assert (error.fqn, error.byte_range) == ("layers.w", (start, stop))
    assert together == [False] * len(together)


def test_a_bit_that_flips_on_the_way_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: list[bool]
) -> None:
    state = {"w": trained(*SHAPE)}
    save(tmp_path, state)
    start, stop = middle_block(footer_of(tmp_path))
    read_into, flipped = PosixFilesystem.read_into, []

    def flipping(self: PosixFilesystem, name: str, first: int, out: memoryview) -> None:
        read_into(self, name, first, out)
        if not flipped and first <= start < first + len(out):
            out[(start + stop) // 2 - first] ^= 1
            flipped.append(name)

    monkeypatch.setattr(PosixFilesystem, "read_into", flipping)
    assert_loads(tmp_path, state)
    assert flipped
    assert sorted(together) == [False] + [True] * (len(together) - 1)


class Regions(DefaultLoadPlanner):
    """Loads regions of the tensor `w`: (top, left, height, width)."""

    def __init__(self, whole: torch.Tensor, regions: list[tuple[int, int, int, int]]) -> None:
        super().__init__()
        self.regions = regions
        self.parts = [whole.new_zeros(height, width) for _, _, height, width in regions]

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex("w", torch.Size([top, left]), number),
                dest_offsets=torch.Size([0, 0]),
                storage_index=MetadataIndex("w", torch.Size([0, 0])),
                storage_offsets=torch.Size([top, left]),
                lengths=torch.Size([height, width]),
            )
            for number, (top, left, height, width) in enumerate(self.regions)
        ])  # fmt: skip

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        number = read_item.dest_index.index
        assert number is not None
        return self.parts[number]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


def test_a_part_is_loaded_from_the_blocks_that_it_needs(tmp_path: Path) -> None:
    """Regions that begin and end inside of boxes, and two that share some."""
    whole = trained(*SHAPE)
    save(tmp_path, {"w": whole})
    alone = [(0, 0, 600, 300), (10, 295, 400, 10), (149, 299, 302, 602), (599, 1199, 1, 1), (0, 0, 600, 1200)]
    for regions in ([region] for region in alone):
        check_regions(tmp_path, whole, regions)
    check_regions(tmp_path, whole, [(0, 0, 300, 1200), (100, 100, 500, 1000)])
    check_regions(tmp_path, whole, alone)


@pytest.mark.parametrize("shape", [SHAPE, (100, 300)])
def test_a_block_that_one_wants_whole_and_another_in_part(tmp_path: Path, shape: tuple[int, int]) -> None:
    """It is not decoded into the first of them alone. The second shape is a single block."""
    whole = trained(*shape)
    save(tmp_path, {"w": whole}, single_file_per_rank=False)
    check_regions(tmp_path, whole, [(0, 0, *shape), (20, 30, 50, 60)])
    check_regions(tmp_path, whole, [(20, 30, 50, 60), (0, 0, *shape)])


def check_regions(path: Path, whole: torch.Tensor, regions: list[tuple[int, int, int, int]]) -> None:
    planner = Regions(whole, regions)
    dcp.load({}, storage_reader=NvcompReader(path, verify="full"), planner=planner, no_dist=True)
    for (top, left, height, width), part in zip(regions, planner.parts, strict=True):
        assert torch.equal(part, whole[top : top + height, left : left + width])


def test_the_grid_is_that_of_the_shape() -> None:
    assert box_grid(SHAPE, 4).block_shape == (200, 300)
