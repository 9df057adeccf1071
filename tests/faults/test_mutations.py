"""The mutations fit the sources: `python -m tests.faults.mutations` runs them, which takes too long for every day."""

from __future__ import annotations

import pytest

from .mutations import Mutation
from .mutations.__main__ import ROOT, mutations


@pytest.mark.parametrize("mutation", tuple(mutations()), ids=lambda mutation: mutation.row)
def test_each_protection_is_in_its_place(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    if mutation.file.endswith(".py"):  # what can't be imported would prove nothing
        compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    for file in (word for word in mutation.tests.split() if word.endswith(".py")):
        assert (ROOT / file).is_file()
