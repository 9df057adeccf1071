"""Whether training leaves a core, on which a process could encode behind it.

Where it does, a copy costs training least. Where it does not, what is encoded behind takes as much from training as
what is encoded while it waits, or takes for ever: measured with 2 ranks on 2 cores, docs/performance.md.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def has_spare_core() -> bool:
    """True if each rank of this host has a core beside those on which it trains."""
    threads = 1 if torch.cuda.is_available() else torch.get_num_threads()
    return spare_core_count(len(os.sched_getaffinity(0)), _local_rank_count(), threads=threads) > 0


def spare_core_count(cores: int, ranks: int, *, threads: int) -> int:
    """Return how many cores each rank of a host has to spare."""
    return cores // ranks - threads


def _local_rank_count() -> int:
    """Return how many ranks this host has: as torchrun says, else all of them, as nobody knows where they are."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local):
        return int(local)
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
