"""Which ranks of a load make the same reads: replicas of HSDP and DDP, and all ranks where a tensor is not sharded.

Reads are planned for what is wanted whole, for shards, and for objects. The ranks compare the first two by digests, in
one small collective, to which each rank comes that has a plan: also one that fails before it has any reads, or the
others would wait for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.distributed as dist

from dcp_nvcomp.calls.peers import can_exchange, close_connections
from dcp_nvcomp.calls.ranks import together
from dcp_nvcomp.errors import CheckpointError, RankFailedError
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.data_file import DataFileRef
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.record import KIND_BYTES
from dcp_nvcomp.loading.read_plan import Read, Target, plan_reads

ExchangePolicy = Literal["auto", "always", "never"]

_DIGEST_NBYTES: Final = 16
_KINDS: Final = 2  # of reads that may be shared: of whole tensors, and of shards
_NOTHING: Final = bytes(_DIGEST_NBYTES)  # no read to share
_MOST_MEMBERS: Final = 64  # each sends to each other


@dataclass(frozen=True)
class SharedReads:
    """Some reads in the order in which they are made, and the ranks of the group that make the same."""

    reads: Sequence[Read]
    members: tuple[int, ...]  # this rank too
    kind: int  # distinguishes them from other reads that the members share


class Replicas:
    """The ranks of one load, as far as they may share reads."""

    def __init__(self, group: dist.ProcessGroup, policy: ExchangePolicy) -> None:
        self.group, self.policy = group, policy
        self._rank = dist.get_rank(group)
        self._has_come = False
        self.failure: BaseException | None = None  # after which this rank has closed its connections

    @contextmanager
    def expected(self, *, is_last: bool) -> Iterator[None]:
        """Come to the comparison even if what comes before it fails; if nothing comes after this, in any case."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the failure counts
                self._leave()
            raise
        if is_last:
            self._leave()

    def _leave(self) -> None:
        """Share no reads."""
        if not self._has_come:
            self.members([_NOTHING] * _KINDS)

    def raise_failure(self) -> None:
        """Raise what broke an exchange on this rank, if anything did."""
        if isinstance(self.failure, CheckpointError) or not isinstance(self.failure, Exception | None):
            raise self.failure.with_traceback(None)
        if self.failure is not None:
            words = f"{type(self.failure).__name__}: {self.failure}"
            raise RankFailedError.of({self._rank: words}, is_alone=False) from self.failure

    def close_connections(self) -> None:
        """Close the connections of all ranks, after those of some broke: each may wait for another one."""
        close_connections(self.group)

    def members(self, digests: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Return for each digest the ranks that have it, in bunches of a size that can exchange with each other."""
        self._has_come = True
        mine = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(self.group))]
        with together(self.group):
            dist.all_gather(everyones, mine, group=self.group)
        rows = [one.numpy().tobytes() for one in everyones]
        return [self._bunch(rows, kind) for kind in range(_KINDS)]

    def _bunch(self, rows: Sequence[bytes], kind: int) -> tuple[int, ...]:
        part = slice(kind * _DIGEST_NBYTES, (kind + 1) * _DIGEST_NBYTES)
        own = rows[self._rank][part]
        if own == _NOTHING:
            return (self._rank,)
        same = [rank for rank, row in enumerate(rows) if row[part] == own]
        count = -(-len(same) // _MOST_MEMBERS)
        return tuple(same[same.index(self._rank) % count :: count])


def replicas_of(group: dist.ProcessGroup | None, policies: Sequence[ExchangePolicy]) -> Replicas | None:
    """Return the ranks of a load where they may share reads; `policies` are what each of them was called with."""
    if group is None or set(policies) not in ({"auto"}, {"always"}) or not can_exchange(group):
        return None
    return Replicas(group, policies[0])


@dataclass(frozen=True)
class WantedOfFile:
    """What a load wants of one file."""

    file: DataFileRef
    footer: Footer
    targets: Sequence[Target]


def plan_shared(
    files: Sequence[WantedOfFile],
    read_nbytes: int,
    shared_nbytes: int,
    thread_count: int,
    replicas: Replicas | None,
) -> list[SharedReads]:
    """Plan all reads, together with the ranks that make the same ones; reads that no other rank makes come last.

    Args:
        files: what the load wants.
        read_nbytes: the most that a read may take where none is shared.
        shared_nbytes: the most that it may take where some are.
        thread_count: number of load threads.
        replicas: the ranks that may share reads.
    """
    alone = _planned(files, read_nbytes)
    if replicas is None:
        return [SharedReads(alone, (), 0)]
    # all of it before the others learn of any: from then on they wait for this rank
    ordered = sorted(files, key=lambda one: one.file.name)  # the same on all ranks, whatever the order of their states
    whole, parts, objects, both = (
        _planned(_of_kinds(ordered, kinds), shared_nbytes)
        for kinds in (("whole",), ("part",), ("object",), ("whole", "part"))
    )
    members = replicas.members([_digest(reads, thread_count) for reads in (whole, parts)])
    if all(len(ranks) == 1 for ranks in members):
        return [SharedReads(alone, members[0], 0)]
    last = SharedReads(objects, (), 0)
    if members[0] == members[1]:
        return [SharedReads(both, members[0], 0), last]
    return [SharedReads(whole, members[0], 0), SharedReads(parts, members[1], 1), last]


def _planned(files: Sequence[WantedOfFile], read_nbytes: int) -> list[Read]:
    with collector_paused():
        return [read for one in files for read in plan_reads(one.file, one.footer, one.targets, read_nbytes)]


def _of_kinds(files: Sequence[WantedOfFile], kinds: Sequence[str]) -> list[WantedOfFile]:
    of_kinds = (
        WantedOfFile(one.file, one.footer, [target for target in one.targets if _kind_of(target) in kinds])
        for one in files
    )
    return [one for one in of_kinds if one.targets]


def _kind_of(target: Target) -> str:
    if target.record.kind == KIND_BYTES:
        return "object"
    return "whole" if target.region.sizes == target.record.global_shape else "part"


def _digest(reads: Sequence[Read], thread_count: int) -> bytes:
    if not reads:
        return _NOTHING
    text = repr((thread_count, [(read.name, read.start, read.stop) for read in reads]))
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_NBYTES).digest()
