"""A block that an engine finds corrupt is read once more, after the engine was given back."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp.engines.cuda.engine import CudaEngine
from dcp_nvcomp.engines.cuda.pool import ENGINES_PER_DEVICE, shared_pool
from dcp_nvcomp.engines.tensors import plain_allocate
from dcp_nvcomp.errors import CorruptDataError
from dcp_nvcomp.loading import decoder as decoding
from dcp_nvcomp.loading.read_plan import Region
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import load_into, save
from tests.states import assert_same

from .kernels_on_cpu import ReferenceKernels
from .stand_in_pool import install_stand_ins

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {"a": torch.randn(3000, 200), "w": torch.randn(3000, 200)}  # narrow: blocks are runs of memory


@pytest.mark.parametrize("strided", [False, True], ids=["in place", "through scratch memory"])
def test_others_may_use_the_engine_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strided: bool) -> None:
    save(tmp_path, STATE, codec="planes-zstd", engine="cpu")
    monkeypatch.setattr(decoding, "pinned_allocate", plain_allocate)
    install_stand_ins(monkeypatch, ReferenceKernels())
    decode, read, place = CudaEngine.decode_checked, PosixFilesystem.read, Region.place
    found: list[object] = []
    free: list[int] = []
    placed: Counter[object] = Counter()

    def finds_the_last_corrupt(self: CudaEngine, jobs: Any, *, verify: str) -> None:
        decode(self, jobs, verify=verify)
        last = jobs[-1].byte_range
        if len(found) < 2 and last not in found and (not strided or sum(placed.values())):
            found.append(last)
            raise CorruptDataError("It looks corrupt.", byte_range=last)

    def watched(self: PosixFilesystem, name: str, start: int, stop: int) -> bytes:
        if (start, stop) in found:
            free.append(shared_pool()._engines(torch.device("cpu")).free.qsize())
        return read(self, name, start, stop)

    def counted(self: Region, block: Any, data: torch.Tensor) -> None:
        placed[id(self), block] += 1
        place(self, block, data)

    monkeypatch.setattr(CudaEngine, "decode_checked", finds_the_last_corrupt)
    monkeypatch.setattr(PosixFilesystem, "read", watched)
    monkeypatch.setattr(Region, "place", counted)
    into = {key: torch.zeros(200, 3000).t() if strided else torch.zeros(3000, 200) for key in STATE}
    load_into(tmp_path, into, thread_count=1, device_memory_budget=16 << 20)
    assert_same(into, STATE)
    assert len(found) == (2 if strided else 1) and free == [ENGINES_PER_DEVICE] * len(found)
    assert set(placed.values()) <= {1}, "each block once"
