"""Proof that the fault matrix can fail: each protection is taken out in turn, and a test must notice.

    python -m tests.faults.mutations              all of them
    python -m tests.faults.mutations commit       those whose row or file contains a word

Each module of this package has a tuple `MUTATIONS`. The package is copied into an empty directory, one protection is
replaced there, and the tests that guard it are run on the copy: it is caught if at least one of them fails.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Mutation"]


@dataclass(frozen=True)
class Mutation:
    """One protection, and who misses it."""

    row: str  # the row of the fault matrix
    file: str  # the source file, from the top of the repository
    old: str  # the text that protects; it must occur exactly once
    new: str  # what stands there instead
    tests: str  # arguments for pytest
