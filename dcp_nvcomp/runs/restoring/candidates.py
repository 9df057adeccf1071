"""Which steps could be restored, and where each of their files is, by what is there: nodes may have other names now.

What replicas have saved each for itself is one candidate with several versions: each node reads its own, and one that
has none, or one that is not whole any more, that of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.runs.own_files import Abandoned
from dcp_nvcomp.runs.retention import SavedStep
from dcp_nvcomp.runs.tiers.fast import HeldStep

DURABLE = ""  # stands for the durable tier where copies are pairs of node and file


@dataclass(frozen=True)
class Candidate:
    saved: SavedStep  # the version that nodes without one of their own read
    wanted: Mapping[str, int]  # its data files and their sizes; empty if nodes hold none of it
    holders: Mapping[str, tuple[str, ...]]  # the nodes that hold each of these files whole
    with_metadata: tuple[str, ...]  # the nodes that hold the `.metadata` of this version
    is_durable: bool  # it is in the durable tier too
    is_abandoned: bool = False  # the run has left it behind
    is_due: bool = False  # it was to be uploaded
    others: tuple[Candidate, ...] = ()  # other versions that are complete on nodes
    is_equal: bool = False  # its nodes know that the versions are equal, so that each may read its own
    is_damaged: bool = False  # what the durable tier has of it is not complete

    @property
    def step(self) -> int:
        return self.saved.step

    @property
    def save_id(self) -> str:
        return self.saved.save_id

    @property
    def versions(self) -> tuple[Candidate, ...]:
        return (self, *self.others)

    @property
    def has_durable(self) -> bool:
        return any(one.is_durable for one in self.versions)

    @property
    def is_safe(self) -> bool:
        """True if a version is complete in the durable tier."""
        return any(one.is_durable and not one.is_damaged for one in self.versions)

    def version_for(self, node: str) -> Candidate:
        """Return the version that a node's ranks read: its own, if that is complete, and known to equal the others."""
        own = (one for one in self.versions if self._may_be_read(one) and node in one.with_metadata)
        return next(own, self)

    def _may_be_read(self, version: Candidate) -> bool:
        return version is self or (version.is_complete_on_nodes and version.is_equal and self.is_equal)

    @property
    def save_ids(self) -> frozenset[str]:
        return frozenset(one.save_id for one in self.versions)

    def files(self) -> dict[str, int]:
        return {name: nbytes for one in self.versions for name, nbytes in one.wanted.items()}

    def nodes_with(self, name: str) -> tuple[str, ...]:
        return next((one.holders[name] for one in self.versions if name in one.holders), ())

    @property
    def is_on_nodes(self) -> bool:
        return bool(self.with_metadata)

    @property
    def is_complete_on_nodes(self) -> bool:
        return self.is_on_nodes and all(self.holders.values())

    def without(self, damaged: Iterable[tuple[str, str]]) -> Candidate:
        """Return it without copies that turned out damaged, given as pairs of node and file."""
        bad = set(damaged)
        return _joined([one._without(bad) for one in self.versions])

    def _without(self, bad: set[tuple[str, str]]) -> Candidate:
        holders = {
            name: tuple(node for node in nodes if (node, name) not in bad) for name, nodes in self.holders.items()
        }
        with_metadata = tuple(node for node in self.with_metadata if (node, METADATA_NAME) not in bad)
        is_damaged = self.is_damaged or any((DURABLE, name) in bad for name in self.wanted)
        return replace(self, holders=holders, with_metadata=with_metadata, is_damaged=is_damaged, others=())

    @property
    def copies(self) -> set[tuple[str, str]]:
        """Its copies, `.metadata` included, as pairs of node and file; of the durable tier what nodes have too."""
        return {
            (node, name)
            for one in self.versions
            for name, nodes in ((METADATA_NAME, one.with_metadata), *one.holders.items())
            for node in (*nodes, *([DURABLE] if nodes and one.is_durable and not one.is_damaged else []))
        }

    def durable_has(self, name: str) -> bool:
        """Return whether a data file is in the durable tier, in a version that is not known to be damaged there."""
        return any(one.is_durable and not one.is_damaged for one in self.versions if name in one.wanted)


def candidates(
    durable: Iterable[SavedStep],
    on_nodes: Sequence[tuple[str, Sequence[HeldStep]]],
    abandoned: Abandoned | None = None,
    damaged: Iterable[SavedStep] = (),
) -> list[Candidate]:
    """Return the saves that could be restored, the newest step first, of one step the latest save.

    Which save of a step is the latest goes by the run's leases and its own time: the clocks of machines differ.
    """
    named: dict[tuple[int, str], list[tuple[str, HeldStep]]] = {}
    for node, steps in on_nodes:
        for one in steps:
            if one.saved is not None and one.saved.save_id:
                named.setdefault((one.step, one.saved.save_id), []).append((node, one))
    found = []
    listed = {(one.step, one.save_id): one for one in durable}
    for key, by_node in named.items():
        candidate = _on_nodes(by_node, on_nodes, is_durable=key in listed)
        if candidate.is_durable or candidate.is_complete_on_nodes:
            found.append(candidate)
            listed.pop(key, None)
    found += [Candidate(one, {}, {}, (), is_durable=True) for one in listed.values()]
    not_whole = {(one.step, one.save_id) for one in damaged}
    found = [
        replace(
            one,
            is_abandoned=abandoned is not None and abandoned.has(one.step, one.save_id, one.saved.replica_id),
            is_damaged=(one.step, one.save_id) in not_whole,
        )
        for one in found
    ]
    return sorted(_with_versions(found), key=_age, reverse=True)


def _age(one: Candidate) -> tuple[int, int, float, float, str]:
    saved = one.saved
    return saved.step, saved.lease, saved.run_seconds or 0.0, saved.saved_seconds, saved.save_id


def _on_nodes(
    by_node: Sequence[tuple[str, HeldStep]], on_nodes: Sequence[tuple[str, Sequence[HeldStep]]], *, is_durable: bool
) -> Candidate:
    first = by_node[0][1]
    assert first.saved is not None
    held = {node: one.held for node, steps in on_nodes for one in steps if one.step == first.step}
    holders = {
        name: tuple(node for node, files in held.items() if files.get(name) == nbytes)
        for name, nbytes in first.wanted.items()
    }
    return Candidate(
        first.saved,
        first.wanted,
        holders,
        tuple(node for node, _ in by_node),
        is_durable,
        is_due=first.is_due,
        is_equal=all(one.is_equal for _, one in by_node),
    )


def _with_versions(found: Iterable[Candidate]) -> list[Candidate]:
    """Return candidates of which those that replicas saved of one step are one."""
    alone, replicas = list[Candidate](), dict[tuple[int, str], list[Candidate]]()
    for one in found:
        if one.saved.replica_id:
            replicas.setdefault((one.step, one.saved.replica_id), []).append(one)
        else:
            alone.append(one)
    return alone + [_joined(sorted(versions, key=lambda one: one.save_id)) for versions in replicas.values()]


def _joined(versions: Sequence[Candidate]) -> Candidate:
    """Return versions of one step as one candidate: first one that is complete on nodes, else in the durable tier."""
    first, *others = sorted(versions, key=lambda one: (not one.is_complete_on_nodes, not one.is_durable))
    return replace(first, others=tuple(one for one in others if one.is_complete_on_nodes or one.is_durable))
