"""Each mutation fits the sources; what it shows without its protection is for `make test-all`."""

from __future__ import annotations

from tests.faults.mutations.__main__ import fits, mutations


def test_each_mutation_fits_the_sources() -> None:
    assert not [mutation.row for mutation in mutations() if not fits(mutation)]
