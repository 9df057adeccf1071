"""The least rights of docs/storage.md are enough, and what is lacking is told as our error, with the place.

Where the server knows rights: signatures of Azure, test tokens of Google's emulator, a key that sshd lets read only, a
share that can only be read, modes of directories. moto knows none.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from google.oauth2.credentials import Credentials

from dcp_nvcomp import tools
from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.runs import list_run
from tests.servers.azurite import AzuriteServer
from tests.servers.gcs import GcsServer
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer

from .children import CONTEXT, LIMIT_SECONDS
from .kinds import parameters
from .places import Place

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True)
class Rights:
    """One place, by who may do what there."""

    place: Place  # with all rights
    reader: Place  # may only read and list
    writer: Place  # has what docs/storage.md names for saving, and no more
    lacking: dict[str, Place]  # lack one of these each, by its name


def _azure(server: AzuriteServer, place: Place) -> Rights:
    def signed(letters: str) -> Place:
        return replace(place, options=server.signed(place.url, letters))

    letters = "rcwdl"
    lacking = {letter: signed(letters.replace(letter, "")) for letter in letters}
    return Rights(place, signed("rl"), signed(letters), lacking)


def _gcs(_: GcsServer, place: Place) -> Rights:
    def only(*rights: str) -> Place:
        credentials = Credentials(f"only:{','.join(rights)}")  # type: ignore[no-untyped-call]
        return replace(place, options={**place.options, "token": credentials})

    rights = ("get", "list", "create", "delete")
    lacking = {right: only(*(other for other in rights if other != right)) for right in rights}
    return Rights(place, only("get", "list"), only(*rights), lacking)


def _sftp(server: SftpServer, place: Place) -> Rights:
    key = server.key.with_name("reader")
    if not key.exists():
        server.make_key(key.name)
        with key.with_name("authorized_keys").open("a") as file:
            file.write(f'command="internal-sftp -R" {key.with_suffix(".pub").read_text()}')
    reader = replace(place, options={**place.options, "client_keys": [str(key)]})
    return Rights(place, reader, place, {})


def _smb(server: SmbServer, place: Place) -> Rights:
    reader = replace(place, url=place.url.replace(f"/{server.share}/", f"/{server.read_only_share}/"))
    return Rights(place, reader, place, {})


_RIGHTS: dict[str, Callable[..., Rights]] = {"azure": _azure, "gcs": _gcs, "sftp": _sftp, "smb": _smb}


@pytest.fixture(params=parameters(*_RIGHTS))
def rights(request: pytest.FixtureRequest, kind_named: Callable[[str], Any]) -> Iterator[Rights]:
    kind = kind_named(request.param)
    place = Place(*kind.place())
    yield _RIGHTS[request.param](kind, place)
    kind.remove(place.url)


def _assert_denied(error: BaseException | None, place: Place) -> None:
    assert isinstance(error, StorageError), error
    assert error.errno in _DENIED, (error.errno, error)
    assert error.path is not None and place.plain_url in error.path, error
    assert not error.outcome_unknown


def test_who_may_read_loads_but_saves_nothing(rights: Rights) -> None:
    assert rights.place.save(1) is None
    names = rights.place.names()
    assert rights.reader.loaded() == 1
    assert tools.verify(rights.reader.url, full=True, storage_options=rights.reader.options).is_sound
    assert list_run(rights.reader.url.rpartition("/")[0], storage_options=rights.reader.options).steps
    _assert_denied(rights.reader.save(2), rights.reader)
    _assert_denied(rights.reader.save(2, rights.reader.writer(single_file_per_rank=False)), rights.reader)
    assert rights.place.names() == names and rights.place.loaded() == 1


@pytest.mark.ci
def test_who_may_save_saves_over_cleans_and_loads(rights: Rights, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = rights.writer.writer()
    for number in (1, 2, 3):
        assert rights.writer.save(number, writer) is None
        assert rights.writer.loaded() == number
    assert rights.writer.save(4, rights.writer.writer(overwrite=False)) is not None
    assert tools.clean(rights.writer.url, storage_options=rights.writer.options).orphans == ()
    assert rights.place.left() == set() and len(rights.place.names()) == 3


def test_who_lacks_one_right_is_told_or_saves(rights: Rights) -> None:
    """Some rights are needed only for what can be left out, as looking whether all is there, and tidying up."""
    number = 1
    assert rights.place.save(number) is None
    denied = set()
    for lacking, place in rights.lacking.items():
        error = place.save(number + 1)
        if error is not None:
            denied.add(lacking)
            _assert_denied(error, place)
        else:
            number += 1
        assert rights.place.loaded() == number, lacking
    assert denied or not rights.lacking


@contextmanager
def _somewhere() -> Iterator[Path]:
    """A directory that every user of this machine can come to."""
    with tempfile.TemporaryDirectory(prefix="dcp-nvcomp-", dir="/var/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def _save_as_nobody(place: Place, told: Any) -> None:
    warnings.simplefilter("ignore")
    if os.geteuid() == 0:  # root may do anything
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    error = place.save(2)
    told.send((place.loaded(), error))


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="there are no users here")
@pytest.mark.parametrize("mode", [0o555, 0o777], ids=["may read", "may write"])
def test_modes_of_a_directory(mode: int) -> None:
    with _somewhere() as folder:
        place = Place(str(folder / "run"), {})
        assert place.save(1) is None
        for file in (folder / "run").iterdir():
            os.chmod(file, stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        os.chmod(folder / "run", mode)
        ours, theirs = CONTEXT.Pipe(duplex=False)
        child = CONTEXT.Process(target=_save_as_nobody, args=(place, theirs))
        child.start()
        theirs.close()
        loaded, error = ours.recv()
        child.join(LIMIT_SECONDS)
        os.chmod(folder / "run", 0o755)
        if mode == 0o777:
            assert (loaded, error) == (2, None)
        else:
            _assert_denied(error, place)
            assert loaded == 1
