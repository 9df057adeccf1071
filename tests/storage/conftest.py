"""Fixtures of SFTP and SMB: a server that is shared, one that a test may do anything to, and places on them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers.base import Server
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer

from .suite import Place


@pytest.fixture(params=[pytest.param("sftp", marks=pytest.mark.sftp), pytest.param("smb", marks=pytest.mark.smb)])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{kind}_server")


@pytest.fixture
def store(kind: str, request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue(f"{kind}_store")
    return place


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
def own_server(kind: str, start: Callable[..., Any]) -> Any:
    """A server that a test may do anything to."""
    return start(kind)
