"""Which ranks are on which node, and whose files each node gets copies of.

Nodes stand in a ring. The copies of a node's files go to the next ones that are in other failure domains than itself.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_nvcomp.runs.agreement import Ranks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a rank runs."""

    node: str  # name of its node: ranks of one node see the same fast tier
    domain: str  # what fails together, such as a rack; by default the node


@dataclass(frozen=True)
class Transfer:
    """Files that go from one rank to another."""

    source: int  # the rank that sends
    to: int  # the rank that receives


class Nodes:
    """The nodes of a run."""

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
        """True on the rank that acts for its node."""
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
