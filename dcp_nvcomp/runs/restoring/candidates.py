"""Which steps could be restored, and where each of their files is.

    what each node holds + what the durable tier lists -> candidates, the newest first

Goes by what is there, not by where it was written: after a restart ranks are on other nodes, and nodes have other
names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp_nvcomp.runs.abandoned import Abandoned
from dcp_nvcomp.runs.keep import SavedStep
from dcp_nvcomp.runs.tiers.fast import HeldStep

__all__ = ["Candidate", "candidates"]


@dataclass(frozen=True)
class Candidate:
    """A save that may be complete.

    Attributes:
        step: the step.
        save_id: id of the save; empty for a checkpoint that does not tell.
        saved_seconds: when it was saved, in seconds since 1970.
        metrics: of the step.
        wanted: its data files and their sizes; empty if nodes hold none of it.
        holders: the nodes that hold each of these files whole.
        with_metadata: the nodes that hold its `.metadata`.
        is_durable: True if it is in the durable tier too.
        is_abandoned: True if the run has left it behind.
        is_due: True if it was to be uploaded.
    """

    step: int
    save_id: str
    saved_seconds: float
    metrics: Mapping[str, float]
    wanted: Mapping[str, int]
    holders: Mapping[str, tuple[str, ...]]
    with_metadata: tuple[str, ...]
    is_durable: bool
    is_abandoned: bool = False
    is_due: bool = False

    @property
    def is_on_nodes(self) -> bool:
        """True if nodes hold its metadata and any of its files."""
        return bool(self.with_metadata)

    @property
    def is_complete_on_nodes(self) -> bool:
        """True if each of its files is on some node."""
        return self.is_on_nodes and all(self.holders.values())

    def without(self, damaged: Iterable[tuple[str, str]]) -> Candidate:
        """Return it without copies that turned out damaged, given as pairs of node and file."""
        bad = set(damaged)
        holders = {
            name: tuple(node for node in nodes if (node, name) not in bad) for name, nodes in self.holders.items()
        }
        return Candidate(**{**vars(self), "holders": holders})


def candidates(
    durable: Iterable[SavedStep],
    on_nodes: Sequence[tuple[str, Sequence[HeldStep]]],
    abandoned: Abandoned | None = None,
) -> list[Candidate]:
    """Return the saves that could be restored, the newest step first, of one step the latest save.

    Args:
        durable: the steps of the durable tier.
        on_nodes: what each node holds, by its name.
        abandoned: the saves that the run has left behind.
    """
    named: dict[tuple[int, str], list[tuple[str, HeldStep]]] = {}
    for node, steps in on_nodes:
        for one in steps:
            if one.save_id:
                named.setdefault((one.step, one.save_id), []).append((node, one))
    found = []
    saved = {(one.step, one.save_id): one for one in durable}
    for key, by_node in named.items():
        candidate = _on_nodes(key, by_node, on_nodes, is_durable=key in saved)
        if candidate.is_durable or candidate.is_complete_on_nodes:
            found.append(candidate)
            saved.pop(key, None)
    found += [_durable_only(one) for one in saved.values()]
    if abandoned is not None:
        found = [_marked(one) if abandoned.has(one.step, one.save_id) else one for one in found]
    return sorted(found, key=lambda one: (one.step, one.saved_seconds, one.save_id), reverse=True)


def _on_nodes(
    key: tuple[int, str],
    by_node: Sequence[tuple[str, HeldStep]],
    on_nodes: Sequence[tuple[str, Sequence[HeldStep]]],
    *,
    is_durable: bool,
) -> Candidate:
    first = by_node[0][1]
    held = {node: one.held for node, steps in on_nodes for one in steps if one.step == key[0]}
    holders = {
        name: tuple(node for node, files in held.items() if files.get(name) == nbytes)
        for name, nbytes in first.wanted.items()
    }
    return Candidate(
        key[0],
        key[1],
        first.saved_seconds,
        first.metrics,
        first.wanted,
        holders,
        tuple(node for node, _ in by_node),
        is_durable,
        is_due=first.is_due,
    )


def _durable_only(saved: SavedStep) -> Candidate:
    return Candidate(saved.step, saved.save_id, saved.saved_seconds, saved.metrics, {}, {}, (), True)


def _marked(candidate: Candidate) -> Candidate:
    return Candidate(**{**vars(candidate), "is_abandoned": True})
