"""The state of one rank's data loader, as entries of a checkpoint: its own, and one for each of its workers.

Workers may hold large buffers (of tokens, of shuffled samples), and are stored each on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dcp_nvcomp.runs.state.resharding import SNAPSHOT, WORKERS, LoaderPart

LOADER: Final = "loader"


def taken_apart(part: LoaderPart) -> dict[str, tuple[Any, ...]]:
    """Return the entries of a loader's state, each in a tuple of one."""
    state = dict(part.state)
    snapshot = state.get(SNAPSHOT)
    workers: Mapping[str, Any] = {}
    if isinstance(snapshot, Mapping) and isinstance(snapshot.get(WORKERS), Mapping):
        workers = snapshot[WORKERS]
        state[SNAPSHOT] = {name: value for name, value in snapshot.items() if name != WORKERS}
    return {LOADER: ((state, part.batch_size),), **{name: (one,) for name, one in workers.items()}}


def joined(entries: Mapping[str, tuple[Any, ...]]) -> LoaderPart:
    """Return the state of which these are the entries."""
    ((state, batch_size),) = entries[LOADER]
    workers = {name: one for name, (one,) in entries.items() if name != LOADER}
    if isinstance(state.get(SNAPSHOT), Mapping):
        state = {**state, SNAPSHOT: {**state[SNAPSHOT], WORKERS: workers}}
    return LoaderPart(state, batch_size)
