"""Of many ranks only rank 0 talks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoints import file_names
from tests.conformance.plugins import OURS, quiet_stock
from tests.conformance.values import trained

from .launch import RankPool

pytestmark = quiet_stock


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _save(path: Path) -> tuple[list[str], int, Any]:
    log, handler, told = logging.getLogger("dcp_nvcomp"), _Lines(), []
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        value = distribute_tensor(trained(torch.float32, (400, 300)), mesh, [Shard(0)], src_data_rank=None)
        writer = OURS.writer(path, on_save=told.append, progress=True)
        dcp.save({"w": value}, storage_writer=writer)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return handler.lines, len(told), writer.last_save


def test_rank_zero_tells_of_the_whole_save(ranks: RankPool, tmp_path: Path) -> None:
    results = ranks.run(_save, tmp_path, world_size=3)
    assert [len(lines) for lines, _, _ in results] == [1, 0, 0]
    assert results[0][1] == 1
    stats = results[0][2]
    assert stats.uncompressed_nbytes == 400 * 300 * 4
    assert set(stats.files) == {name for name in file_names(tmp_path) if name.endswith(".distcp")}
    assert stats.by_dtype.keys() in ({"float32"}, {"torch.float32"})
