"""Each call of a small save's storage layer fails once, and questions on the wire are lost, twenty of them in CI.

After each the earlier checkpoint loads or the new one does, whole, and the writer's next save works.
"""

from __future__ import annotations

import gc

import pytest

from dcp_nvcomp.errors import StorageError
from tests.effort import THOROUGH, sampled

from .calls import Counted, FailingOnce, interposed
from .conftest import Networked
from .kinds import EVERYWHERE
from .places import Place

pytestmark = pytest.mark.filterwarnings("ignore:.*can't replace a file in one step")


@pytest.mark.ci
@pytest.mark.parametrize("done", [False, True], ids=["not done", "answer lost"])
@EVERYWHERE
def test_a_call_fails(place: Place, done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = place.writer()
    assert place.save(1, writer) is None
    counted = Counted()
    with interposed(counted):
        assert place.save(2, writer) is None
    assert {"open_output", "write", "close", "publish", "list_files", "remove"} <= set(counted.names)
    number = 2
    for at in sampled(range(len(counted.names)), 3):
        name = counted.names[at]
        number += 2
        hook = FailingOnce(at, done=done)
        with interposed(hook):
            error = place.save(number - 1, writer)
        if hasattr(hook.lost, "abort"):  # a stream: simplecache's warns when it is collected and still open
            hook.lost.abort()
        where = f"call {at}, {name}: {error}"
        assert hook.names[at] == name, where
        if error is None:  # of what only tidies up, or can be looked up
            assert place.loaded() == number - 1, where
        else:
            assert isinstance(error, StorageError) and "The connection was lost" in str(error), where
            assert place.loaded() == number - 2, where
        assert place.save(number, writer) is None, where
        assert place.loaded() == number, where
    del error
    gc.collect()  # closes the file whose stream was lost with its answer: SMB keeps the name of an open one
    place.clean(monkeypatch)
    assert place.left() == set() and place.loaded() == number


@pytest.mark.ci
@pytest.mark.parametrize("done", [False, True], ids=["question lost", "answer lost"])
def test_a_connection_is_cut(networked: Networked, done: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was under way is done again, and done once: neither a save nor a load fails for one lost connection."""
    wire, place, direct = networked.wire, networked.wired, networked.direct
    assert place.save(1) is None
    before = wire.questions
    assert place.save(2) is None
    assert place.loaded() == 2
    questions, cuts = wire.questions - before, 0
    number = 2
    for at in range(1, questions + 1, max(1, questions // (20 if THOROUGH else 8))):
        number += 1
        wire.cut(at, answered=done)
        error = place.save(number)
        assert error is None, f"question {at} of {questions}: {error}"
        assert place.loaded() == number, f"question {at} of {questions}"
        wire.cut(0)
        assert direct.loaded() == number, f"question {at} of {questions}"
        cuts += wire.cuts > cuts
    assert wire.cuts >= 3
    place.clean(monkeypatch)
    assert direct.left() == set()
