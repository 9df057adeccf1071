"""Fixtures of the stores: `place` on each kind of storage, and `networked` for connections that are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.distributed.launch import ranks
from tests.servers.wire import Wire

from .kinds import ALL, NETWORKED, Kind, Reachable
from .places import Place

__all__ = ["Networked", "ranks"]


def fresh(kind: Kind) -> Iterator[Place]:
    url, options = kind.place()
    yield Place(url, options)
    kind.remove(url)


@pytest.fixture(params=ALL)
def kind(request: pytest.FixtureRequest, kind_named: Callable[[str], Kind]) -> Kind:
    return kind_named(request.param)


@pytest.fixture
def place(kind: Kind) -> Iterator[Place]:
    """Where nothing is yet, on each kind of storage in turn."""
    yield from fresh(kind)


@dataclass(frozen=True)
class Networked:
    """A place, and the same behind a wire."""

    direct: Place  # without the wire
    wired: Place  # through it
    wire: Wire  # which can be cut


@pytest.fixture(params=NETWORKED)
def networked(request: pytest.FixtureRequest, kind_named: Callable[[str], Any]) -> Iterator[Networked]:
    kind: Reachable = kind_named(request.param)
    with Wire(kind.port) as wire:
        for direct in fresh(kind):
            url, options = kind.through((direct.url, direct.options), wire.port)
            yield Networked(direct, Place(url, options), wire)
