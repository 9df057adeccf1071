"""Which ranks are on which node, whose files each node gets copies of, and how files move, as they are.

Nodes stand in a ring. The copies of a node's files go to the next ones that are in other failure domains than itself.

Both sides of a transfer know beforehand which files go, and of what sizes. A side that fails goes on with the exchange,
as the other one would wait in vain; what failed is in its result. To the durable tier each file is sent once, by one
rank that has it, unless it is there as it is: from an upload that was cut short, or in a step of which another file was
lost.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.errors import CheckpointError, CorruptDataError
from dcp_nvcomp.runs.agreement import Ranks
from dcp_nvcomp.storage.base import Filesystem, OutputStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    node: str  # name of its node: ranks of one node see the same fast tier
    domain: str  # what fails together, such as a rack; by default the node


@dataclass(frozen=True)
class Transfer:
    source: int  # the rank that sends
    to: int  # the rank that receives


class Nodes:
    def __init__(self, places: Sequence[Place], rank: int) -> None:
        self._places, self._rank = tuple(places), rank
        self.names = tuple(dict.fromkeys(place.node for place in places))

    def node_of(self, rank: int) -> str:
        return self._places[rank].node

    def ranks_of(self, node: str) -> list[int]:
        return [rank for rank, place in enumerate(self._places) if place.node == node]

    @property
    def own(self) -> str:
        return self.node_of(self._rank)

    @property
    def is_leader(self) -> bool:
        return self.ranks_of(self.own)[0] == self._rank

    def peers_of(self, node: str, count: int) -> list[str]:
        """Return the nodes that get copies of a node's files: fewer than `count` if there are not as many domains."""
        at = self.names.index(node)
        domains = {self._domain_of(node)}
        peers: list[str] = []
        for other in (*self.names[at + 1 :], *self.names[:at]):
            if len(peers) < count and self._domain_of(other) not in domains:
                domains.add(self._domain_of(other))
                peers.append(other)
        return peers

    def _domain_of(self, node: str) -> str:
        return self._places[self.ranks_of(node)[0]].domain

    def domains(self) -> list[list[int]]:
        found: dict[str, list[int]] = {}
        for rank, place in enumerate(self._places):
            found.setdefault(self._domain_of(place.node), []).append(rank)
        return list(found.values())

    def copies(self, count: int) -> list[Transfer]:
        found = []
        for node in self.names:
            for peer in self.peers_of(node, count):
                receivers = self.ranks_of(peer)
                for number, source in enumerate(self.ranks_of(node)):
                    found.append(Transfer(source, receivers[number % len(receivers)]))
        return found


def nodes_of_run(ranks: Ranks, node: str | None, domain: str | None, copies: int) -> Nodes:
    """Return the nodes of a run; all ranks call this, each with the names of its node and domain if any."""
    if node is None:  # what torchrun says, else the name of the host
        group_rank = os.environ.get("GROUP_RANK")
        node = socket.gethostname() if group_rank is None else f"node {group_rank}"
    name = str(node)
    places = ranks.gather(Place(name, name if domain is None else str(domain)))
    nodes = Nodes(places, ranks.rank)
    fewest = min(len(nodes.peers_of(one, copies)) for one in nodes.names)
    if fewest < copies and ranks.is_first:
        logger.warning(
            "copies=%d, but only %d can be made: there are too few nodes, or failure domains. They are: %s",
            copies,
            fewest,
            ", ".join(sorted({place.domain for place in places})),
        )
    return nodes


def rounds(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Return transfers in rounds, in each of which a rank sends to at most one other and receives from at most one."""
    made: list[list[Transfer]] = []
    for transfer in transfers:
        for one in made:
            if all(transfer.source != other.source and transfer.to != other.to for other in one):
                one.append(transfer)
                break
        else:
            made.append([transfer])
    return made


_PIECE_NBYTES = 8 << 20
_CRC_NBYTES = 4

Piece = tuple[str, int, int]


@dataclass
class Moved:
    received: dict[str, int] = field(default_factory=dict)  # those that arrived whole, and their sizes
    unread: dict[str, CheckpointError] = field(default_factory=dict)  # why others could not be read here, by name
    # why others could not be written here, or did not arrive as they were
    unwritten: dict[str, CheckpointError] = field(default_factory=dict)

    def check(self) -> None:
        for error in (*self.unread.values(), *self.unwritten.values()):
            raise error


def move_files(
    ranks: Ranks, transfers: Mapping[Transfer, Mapping[str, int]], source: Filesystem, target: Filesystem
) -> Moved:
    ends = _Ends(source, target)
    try:
        for one in rounds(list(transfers)):
            outgoing = next((transfer for transfer in one if transfer.source == ranks.rank), None)
            incoming = next((transfer for transfer in one if transfer.to == ranks.rank), None)
            if outgoing is not None or incoming is not None:
                sent = [] if outgoing is None else _pieces(transfers[outgoing])
                received = [] if incoming is None else _pieces(transfers[incoming])
                _run_round(ranks, ends, outgoing, sent, incoming, received)
    finally:
        moved = ends.finish()
    return moved


def _pieces(files: Mapping[str, int]) -> list[Piece]:
    return [
        (name, start, min(start + _PIECE_NBYTES, nbytes))
        for name, nbytes in sorted(files.items())
        for start in range(0, nbytes, _PIECE_NBYTES)
    ]


def _run_round(
    ranks: Ranks,
    ends: _Ends,
    outgoing: Transfer | None,
    sent: Sequence[Piece],
    incoming: Transfer | None,
    received: Sequence[Piece],
) -> None:
    for number in range(max(len(sent), len(received))):
        leaving = ends.read(sent[number]) if number < len(sent) else None
        arriving = None
        if number < len(received):
            _, start, stop = received[number]
            arriving = torch.empty(stop - start + _CRC_NBYTES, dtype=torch.uint8)
        ranks.exchange(
            leaving, 0 if outgoing is None else outgoing.to, arriving, 0 if incoming is None else incoming.source
        )
        if arriving is not None:
            is_last = number + 1 == len(received) or received[number + 1][0] != received[number][0]
            ends.write(received[number], arriving, is_last=is_last)


class _Ends:
    def __init__(self, source: Filesystem, target: Filesystem) -> None:
        self._source, self._target = source, target
        self._output: OutputStream | None = None
        self._moved = Moved()

    def read(self, piece: Piece) -> torch.Tensor:
        name, start, stop = piece
        message = torch.empty(stop - start + _CRC_NBYTES, dtype=torch.uint8)
        data = message.numpy()
        try:
            self._source.read_into(name, start, data[:-_CRC_NBYTES].data)
            crc = checksum(data[:-_CRC_NBYTES])
        except CheckpointError as error:
            self._moved.unread.setdefault(name, error)
            crc = checksum(data[:-_CRC_NBYTES]) ^ 1  # the receiver must not take it for the file
        data[-_CRC_NBYTES:] = np.frombuffer(crc.to_bytes(_CRC_NBYTES, "little"), np.uint8)
        return message

    def write(self, piece: Piece, message: torch.Tensor, *, is_last: bool) -> None:
        name, start, stop = piece
        try:
            if self._write(name, start, message.numpy(), is_last=is_last):
                self._moved.received[name] = stop
        except CheckpointError as error:
            self._moved.unwritten.setdefault(name, error)
            self._drop()

    def _write(self, name: str, start: int, data: np.ndarray, *, is_last: bool) -> bool:
        if start == 0:
            self._drop()
            self._target.remove([name])
            self._output = self._target.open_output(name)
        if self._output is None:  # an earlier piece of this file failed
            return False
        payload, crc = data[:-_CRC_NBYTES], int.from_bytes(data[-_CRC_NBYTES:].tobytes(), "little")
        if checksum(payload) != crc:
            raise CorruptDataError(
                "What arrived from another rank is not what was read there.",
                path=self._target.location(name),
                byte_range=(start, start + len(payload)),
            )
        self._output.write(payload.data)
        if is_last:
            self._output.close()
            self._output = None
        return is_last

    def _drop(self) -> None:
        output, self._output = self._output, None
        if output is not None:
            output.abort()

    def finish(self) -> Moved:
        self._drop()
        return self._moved
