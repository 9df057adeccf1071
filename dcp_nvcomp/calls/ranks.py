"""The ranks of a call, and what they raise."""

from __future__ import annotations

import os
import re
import warnings
from typing import Final

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_nvcomp.errors import CheckpointError, ConfigurationError, RankFailedError

# DCP says in each process that it "assumes the intent" to be alone, also where that was asked for.
_ALONE: Final = "torch.distributed is disabled, unavailable or uninitialized"


def group_of(process_group: dist.ProcessGroup | None, *, no_dist: bool) -> dist.ProcessGroup | None:
    """Return the ranks that save or load together; None without torch.distributed.

    Warns where a launcher has started several processes that know nothing of each other yet.
    """
    if not no_dist and dist.is_available() and dist.is_initialized():
        # what new_group returns on other ranks is a number
        if isinstance(process_group, int) or (process_group is not None and dist.get_rank(process_group) < 0):
            raise ConfigurationError(
                f"Rank {dist.get_rank()} is not in the process group that it was given: only ranks of the group make "
                "this call."
            )
        return process_group or dist.group.WORLD
    expect_no_group()
    processes = os.environ.get("WORLD_SIZE", "1")
    if not no_dist and processes not in ("", "1"):
        warnings.warn(
            f"WORLD_SIZE={processes}, but torch.distributed is not initialized: each process saves and loads alone, "
            "and of several that save to one path the last one wins. Call torch.distributed.init_process_group "
            "first, or pass no_dist=True if that is meant.",
            RuntimeWarning,
            stacklevel=3,
        )
    return None


def expect_no_group() -> None:
    """Silence DCP's warning that this process is alone.

    Nothing is done if it is silent already: a change of the filters makes Python forget which warnings it has shown.
    """
    for action, text, category, *_ in warnings.filters:
        if issubclass(UserWarning, category) and (text is None or re.match(text, _ALONE)):
            if action == "ignore":
                return
            break
    warnings.filterwarnings("ignore", message=_ALONE)


def error_of_ranks(error: CheckpointException, group: dist.ProcessGroup | None) -> BaseException:
    """Return what to raise instead of DCP's exception, which is no `Exception`, and the same on all ranks."""
    failures = {number: failure for number, (failure, _) in error.failures.items()}
    rank = 0 if group is None else dist.get_rank(group)
    ours = failures.get(rank, next(iter(failures.values()), None))
    if isinstance(ours, CheckpointError) or (ours is not None and not isinstance(ours, Exception)):
        return ours.with_traceback(None)  # of twenty frames that are DCP's
    words = {number: f"{type(one).__name__}: {one}" for number, one in failures.items()}
    is_alone = len(words) == 1 and (group is None or dist.get_world_size(group) == 1)
    failed = RankFailedError.of(words, is_alone=is_alone)
    stack = error.failures[min(failures)][1] if failures else None
    if stack:
        failed.message += f" (raised in {stack[-1].filename}, line {stack[-1].lineno})"
    failed.__cause__ = ours  # with its traceback, if it is this rank's
    return failed
