"""Fixtures of every kind of storage (tests/stores/kinds.py), and servers that a test may do anything to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.storage.base import Filesystem
from tests.servers.base import Kind, Location, Server
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer
from tests.stores.kinds import parameters

from .files import made


@pytest.fixture(params=parameters("sftp", "smb"))
def kind_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind(kind_name: str, kind_named: Callable[[str], Kind]) -> Any:
    return kind_named(kind_name)


@pytest.fixture
def place(kind: Kind) -> Iterator[Location]:
    """Where nothing is yet."""
    place = kind.place()
    yield place
    kind.remove(place[0])


@pytest.fixture
def filesystem(place: Location) -> Iterator[Filesystem]:
    filesystem = made(place)
    yield filesystem
    filesystem.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Start a server of a kind with settings of its own."""
    started: list[Server] = []

    def start_one(kind: str, *settings: str) -> Server:
        made: type[SftpServer | SmbServer] = {"sftp": SftpServer, "smb": SmbServer}[kind]
        missing = made.missing()
        if missing:
            pytest.skip(missing)
        started.append(made(tmp_path / f"{kind}-{len(started)}", *settings))
        started[-1].start()
        return started[-1]

    yield start_one
    for server in started:
        with contextlib.suppress(ProcessLookupError):
            server.stop()


@pytest.fixture
def own_server(kind_name: str, start: Callable[..., Any]) -> Any:
    return start(kind_name)
