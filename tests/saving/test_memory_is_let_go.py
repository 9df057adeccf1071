"""What a save or load held is freed when it returns, not when the garbage collector runs: it may be a whole state."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter
from dcp_nvcomp.loading.job import LoadJob
from dcp_nvcomp.saving.job import SaveJob

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_jobs_are_freed_without_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[weakref.ref[Any]] = []
    for kind in (SaveJob, LoadJob):

        def remembered(job: Any, *arguments: Any, _real: Any = kind.run) -> Any:
            jobs.append(weakref.ref(job))
            return _real(job, *arguments)

        monkeypatch.setattr(kind, "run", remembered)
    state = {"w": torch.randn(1 << 20), "small": torch.randn(3), "object": {"a", "b"}}
    dcp.save(state, storage_writer=NvcompWriter(tmp_path), no_dist=True)
    dcp.load(state, storage_reader=NvcompReader(tmp_path), no_dist=True)
    assert len(jobs) == 2 and [job() for job in jobs] == [None, None]
