"""Fixtures of the stores: `place` on each kind of storage; `networked` and `served` for what is done to servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.distributed.launch import ranks
from tests.servers.wire import Wire

from .kinds import ALL, NETWORKED, SERVED, Kind, Rerouted, Served, open_kind
from .places import Place

__all__ = ["Networked", "Running", "ranks"]


@pytest.fixture(scope="session")
def kind_named(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Kind]]:
    """Return the kind of storage of a name, which lives from its first use to the end of the worker."""
    running: dict[str, Kind] = {}

    def named(name: str) -> Kind:
        if name not in running:
            running[name] = open_kind(name, request, tmp_path_factory.mktemp(name))
        return running[name]

    yield named
    for kind in running.values():
        kind.stop()


def _fresh(kind: Kind) -> Iterator[Place]:
    url, options = kind.place()
    yield Place(url, options)
    kind.remove(url)


@pytest.fixture(params=ALL)
def kind(request: pytest.FixtureRequest, kind_named: Callable[[str], Kind]) -> Kind:
    """Return each kind of storage in turn."""
    return kind_named(request.param)


@pytest.fixture
def place(kind: Kind) -> Iterator[Place]:
    """Return where nothing is yet."""
    yield from _fresh(kind)


@dataclass(frozen=True)
class Networked:
    """A place, and the same behind a wire."""

    direct: Place  # without the wire
    wired: Place  # through it
    wire: Wire  # which can be cut


@pytest.fixture(params=NETWORKED)
def networked(request: pytest.FixtureRequest, kind_named: Callable[[str], Kind]) -> Iterator[Networked]:
    """Return a place behind a wire, on each kind of storage that has a server."""
    kind: Any = kind_named(request.param)
    assert isinstance(kind, Rerouted)
    with Wire(kind.port) as wire:
        for direct in _fresh(kind):
            url, options = kind.through((direct.url, direct.options), wire)
            yield Networked(direct, Place(url, options), wire)


@dataclass(frozen=True)
class Running:
    """A place whose server a test may kill."""

    place: Place  # on it
    server: Served  # what can be killed, and is started again after the test


@pytest.fixture(params=SERVED)
def served(request: pytest.FixtureRequest, kind_named: Callable[[str], Kind]) -> Iterator[Running]:
    """Return a place on each kind of storage whose server can be killed."""
    kind: Any = kind_named(request.param)
    assert isinstance(kind, Served)
    for place in _fresh(kind):
        yield Running(place, kind)
