"""The effort of a test run: a sample by default; all of it in `make test-all`, by DCP_NVCOMP_TEST_PROFILE=all."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

__all__ = ["SAMPLE", "THOROUGH", "examples", "sampled"]

T = TypeVar("T")

_PROFILE = os.environ.get("DCP_NVCOMP_TEST_PROFILE") or "default"
assert _PROFILE in ("default", "all"), f"DCP_NVCOMP_TEST_PROFILE is 'default' or 'all', not {_PROFILE!r}"

THOROUGH = _PROFILE == "all"
SAMPLE = 15


def examples(count: int) -> int:
    """Return how many examples hypothesis draws for a test that gets `count` of them in `make test-all`."""
    return count if THOROUGH else min(count, SAMPLE)


def sampled(values: Sequence[T], step: int) -> Sequence[T]:
    """Return all values in `make test-all`, and by default every `step`-th and the last one."""
    return values if THOROUGH else [*values[:-1:step], *values[-1:]]
