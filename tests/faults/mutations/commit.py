"""What the commit protocol rests on."""

from __future__ import annotations

from tests.faults.mutations import Mutation

MUTATIONS = (
    Mutation(
        row="commit: published once it is unknown whether it was",
        file="dcp_nvcomp/commit.py",
        old="        if published is not True:\n            raise\n",
        new="        raise\n",
        tests="tests/storage/test_lifecycle.py -k published_but_not_confirmed",
    ),
)
