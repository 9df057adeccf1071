"""Proof that the fault matrix can fail: each protection is taken out in turn, and a test must notice.

    python -m tests.faults.mutations              all of them
    python -m tests.faults.mutations commit       those whose row or file contains a word

The lists are the *.diff beside this file, and kernels.py. A line `+++` names a source file, a line `@@` the row of the
fault matrix and pytest's arguments; what follows after `-` is the text that protects, which must occur exactly once in
the file, and after `+` what stands there instead. The package is copied into an empty directory, one protection is
replaced there, and the tests that guard it are run on the copy: it is caught if at least one of them fails.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """One protection, and who misses it."""

    row: str  # the row of the fault matrix
    file: str  # the source file, from the top of the repository
    old: str  # the text that protects; it must occur exactly once
    new: str  # what stands there instead
    tests: str  # arguments for pytest


def read(path: Path) -> Iterator[Mutation]:
    """Yield the mutations of a list."""
    for part in re.split(r"^\+\+\+ ", path.read_text(), flags=re.MULTILINE)[1:]:
        file, *hunks = re.split(r"^@@ ", part, flags=re.MULTILINE)
        for head, *lines in map(str.splitlines, hunks):
            row, _, tests = head.partition(" @@ ")
            old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
            yield Mutation(row, file.strip(), old, new, tests)
