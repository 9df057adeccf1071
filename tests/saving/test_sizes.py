"""What a checkpoint takes on disk, and what a load fetches of it: counted, not timed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import dcp_nvcomp.loading.reader
from dcp_nvcomp import NvcompReader
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import save
from tests.format.footers import footers_of

REAL_STATE = Path(__file__).parent.parent / "data" / "gpt_block.safetensors"


class Reads:
    """Counts bytes that a reader asks its file system for, by file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes: dict[str, int] = {}
        self.ranges: list[tuple[str, int, int]] = []

        def counting(*args: Any, **kwargs: Any) -> Filesystem:
            filesystem = open_filesystem(*args, **kwargs)
            read, read_into = filesystem.read, filesystem.read_into

            def counted_read(name: str, start: int, stop: int) -> bytes:
                self._count(name, start, stop)
                return read(name, start, stop)

            def counted_read_into(name: str, start: int, buffer: memoryview) -> None:
                self._count(name, start, start + len(buffer))
                read_into(name, start, buffer)

            monkeypatch.setattr(filesystem, "read", counted_read)
            monkeypatch.setattr(filesystem, "read_into", counted_read_into)
            return filesystem

        monkeypatch.setattr(dcp_nvcomp.loading.reader, "open_filesystem", counting)

    def _count(self, name: str, start: int, stop: int) -> None:
        self.nbytes[name] = self.nbytes.get(name, 0) + stop - start
        self.ranges.append((name, start, stop))


class Rows(dcp.DefaultLoadPlanner):
    """Wants only some rows of each tensor, as a rank of a larger world does."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self._rows = start, stop

    def create_local_plan(self) -> dcp.LoadPlan:
        from dataclasses import replace

        plan = super().create_local_plan()
        start, stop = self._rows
        items = []
        for item in plan.items:
            lengths = torch.Size([stop - start, *item.lengths[1:]])
            offsets = torch.Size([start, *item.storage_offsets[1:]])
            items.append(replace(item, storage_offsets=offsets, dest_offsets=offsets, lengths=lengths))
        return replace(plan, items=items)


@pytest.mark.parametrize("part", [0, 3, 7])
def test_loading_an_eighth_fetches_an_eighth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    weight = torch.randn(4096, 2048).bfloat16()
    save(tmp_path, {"w": weight})
    name = next(tmp_path.glob("*.distcp")).name
    (footer,) = footers_of(tmp_path)
    blocks = footer.tables.encoded_nbytes
    footer_nbytes = os.path.getsize(tmp_path / name) - int(footer.block_offsets[-1])
    reads = Reads(monkeypatch)
    into = torch.zeros_like(weight)
    rows = slice(512 * part, 512 * (part + 1))
    planner = Rows(rows.start, rows.stop)
    dcp.load({"w": into}, storage_reader=NvcompReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(into[rows], weight[rows])
    assert int((into != 0).sum()) <= 512 * 2048
    fetched = reads.nbytes[name] - footer_nbytes
    assert 0 < fetched <= int(blocks.sum()) / 8 + 2 * int(blocks.max())


def test_a_key_alone_fetches_only_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"a": torch.randn(1 << 20), "b": torch.randn(1 << 20), "c": torch.randn(1 << 20)})
    reads = Reads(monkeypatch)
    into = torch.zeros(1 << 20)
    dcp.load({"b": into}, storage_reader=NvcompReader(tmp_path), no_dist=True)
    (total,) = (path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert sum(reads.nbytes.values()) < total / 2.5


def test_neighbouring_blocks_are_fetched_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"w": torch.randn(16 << 20)})
    reads = Reads(monkeypatch)
    dcp.load({"w": torch.zeros(16 << 20)}, storage_reader=NvcompReader(tmp_path), no_dist=True)
    # 64 blocks of 1 MiB in reads of 4 MiB, and the footer
    assert 13 < len(reads.ranges) < 22


def test_ten_thousand_small_tensors(tmp_path: Path) -> None:
    state = {f"layers.{i}.norm.weight": torch.randn(256) for i in range(10_000)}
    save(tmp_path, state, codec="none")
    (data,) = (path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert data - 10_000 * 1024 <= 200 * 10_000
    assert (tmp_path / ".metadata").stat().st_size <= 260 * 10_000


def test_large_records_begin_where_direct_io_can(tmp_path: Path) -> None:
    state = {f"w{i}": torch.randn(300_001 + i) for i in range(5)} | {f"s{i}": torch.randn(100) for i in range(9)}
    save(tmp_path, state)
    (footer,) = footers_of(tmp_path)
    large = [record for record in footer.records if record.uncompressed_nbytes >= 1 << 20]
    assert len(large) == 5
    assert [int(footer.block_offsets[record.first_block]) % 4096 for record in large] == [0] * 5


def test_ratio_on_real_optimizer_state(tmp_path: Path) -> None:
    """A quarter of a real transformer block's weights, gradients and Adam moments; see tests/data/README.md."""
    state = load_file(REAL_STATE)
    writer = save(tmp_path, state, codec="auto")
    assert writer.last_save is not None
    assert writer.last_save.ratio >= 1.285
    into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    dcp.load(into, storage_reader=NvcompReader(tmp_path), no_dist=True)
    for key, tensor in state.items():
        assert torch.equal(into[key].view(torch.uint8), tensor.view(torch.uint8)), key


def test_replicated_zeros_cost_nothing(tmp_path: Path) -> None:
    """Fresh Adam moments and padded embedding gradients: planes with long runs want matches, not literals alone."""
    gradient = torch.zeros(4096, 512)
    gradient[::97] = torch.randn(43, 512)
    writer = save(tmp_path, {"zeros": torch.zeros(1 << 20), "gradient": gradient})
    assert writer.last_save is not None and writer.last_save.ratio > 30


def test_master_weights_that_are_rounded_pack_their_low_halves(tmp_path: Path) -> None:
    weights = torch.randn(1 << 20).bfloat16().float()
    writer = save(tmp_path, {"w": weights})
    assert writer.last_save is not None and writer.last_save.ratio > 2.5


def test_random_bytes_are_stored(tmp_path: Path) -> None:
    noise = torch.randint(-(2**63), 2**63 - 1, (1 << 17,))
    writer = save(tmp_path, {"noise": noise})
    assert writer.last_save is not None
    assert list(writer.last_save.by_codec) == ["none"]
    assert writer.last_save.stored_nbytes < noise.nbytes + 8192


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_auto_is_no_larger_than_the_plain_choice(dtype: torch.dtype) -> None:
    """The sample must not be taken in by a gain of 2 % in a plane that is better packed or stored."""
    from dcp_nvcomp.codecs.choose import parse_codec, sample_nbytes
    from dcp_nvcomp.engines.cpu import CpuEngine
    from dcp_nvcomp.engines.tensors import element_type
    from dcp_nvcomp.saving.encode.choices import spread_sample

    engine, element = CpuEngine(), element_type(dtype)
    assert element is not None
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        tensor = (torch.randn(512, 600, generator=generator) * 0.02).to(dtype)
        tensor = tensor.abs() if seed % 3 == 0 else tensor
        data = tensor.view(torch.uint8).numpy().reshape(-1)
        sizes = {}
        for name in ("auto", "planes-zstd", "zstd"):
            chain = parse_codec(name).choose(element, spread_sample(tensor, sample_nbytes(data.size)), data.size)
            out = memoryview(bytearray(chain.max_encoded_nbytes(data.size)))
            sizes[name] = len(engine.encode(data, chain, out).data)
        # an alternative has to gain 2 % to be preferred
        assert sizes["auto"] <= 1.02 * min(sizes.values()), (seed, sizes)
