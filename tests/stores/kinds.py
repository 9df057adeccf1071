"""The kinds of storage that the suite runs on.

A `Kind` makes places on the server of its kind; a `Served` one has a server that can be killed and started again, and
can be reached through a wire. Kinds live as long as the worker.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fsspec
import pytest

from tests.servers.azurite import AzuriteServer
from tests.servers.base import Server
from tests.servers.ftp import FtpServer
from tests.servers.gcs import GcsServer
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer
from tests.servers.wire import Wire
from tests.storage.plain import PROTOCOLS

Location = tuple[str, dict[str, Any]]


class Kind(ABC):
    """One kind of storage."""

    @abstractmethod
    def place(self) -> Location:
        """Return a URL where nothing is yet, and the storage options."""

    def remove(self, url: str) -> None:
        """Remove what `place` made for a URL."""
        return

    def stop(self) -> None:
        """End what was started."""
        return


class Directory(Kind):
    """A directory of a file system that is mounted here."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def place(self) -> Location:
        return str(self._path / uuid.uuid4().hex[:12] / "run"), {}


class Generic(Kind):
    """What fsspec reaches and no storage of ours knows, by a URL that has a fresh name for `{}`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def place(self) -> Location:
        return self._url.format(uuid.uuid4().hex), {}

    def stop(self) -> None:
        memory = fsspec.filesystem("memory")
        if memory.exists("/"):
            memory.rm("/", recursive=True)


class Rerouted(Kind):
    """A server behind a port on 127.0.0.1, so that a wire can be put before it."""

    @property
    @abstractmethod
    def port(self) -> int:
        """Where it listens."""

    def through(self, location: Location, wire: Wire) -> Location:
        """Return the same place, to be reached through a wire."""

        def rerouted(text: Any) -> Any:
            return text.replace(f"127.0.0.1:{self.port}", f"127.0.0.1:{wire.port}") if isinstance(text, str) else text

        url, options = location
        return rerouted(url), {name: rerouted(value) for name, value in options.items()}


class S3(Rerouted):
    """Buckets of an S3 server."""

    def __init__(self, options: dict[str, Any]) -> None:
        import s3fs

        self._options = options
        self._client = s3fs.S3FileSystem(**options, use_listings_cache=False)

    @property
    def port(self) -> int:
        return int(self._options["endpoint_url"].rpartition(":")[2])

    def place(self) -> Location:
        bucket = f"dcp-nvcomp-{uuid.uuid4().hex[:12]}"
        self._client.mkdir(bucket)
        return f"s3://{bucket}/run", dict(self._options)

    def remove(self, url: str) -> None:
        bucket = url.split("/")[2]
        self._client.clear_multipart_uploads(bucket)
        for found in self._client.find(bucket):
            self._client.rm_file(found)
        self._client.rmdir(bucket)


class Served(Rerouted):
    """A server that a test may kill; what it has confirmed stays."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once."""

    @abstractmethod
    def start(self) -> None:
        """Start it again, where it was."""

    @abstractmethod
    def freeze(self) -> None:
        """Let it answer nothing more."""

    @abstractmethod
    def thaw(self) -> None:
        """Let it go on."""


class Moto(Served):
    """moto's server, which lives in this process: instead of it, all ways to it are cut."""

    def __init__(self, endpoint: str) -> None:
        self._server = S3({"endpoint_url": endpoint, "key": "ci", "secret": "cisecret"})
        self._wire = Wire(self._server.port)
        self._wire.__enter__()

    @property
    def port(self) -> int:
        return self._wire.port

    def place(self) -> Location:
        url, options = self._server.place()
        return url, {**options, "endpoint_url": f"http://127.0.0.1:{self._wire.port}"}

    def remove(self, url: str) -> None:
        self._server.remove(url)

    def stop(self) -> None:
        self._wire.__exit__(None, None, None)

    def kill(self) -> None:
        self._wire.break_off()

    def start(self) -> None:
        self._wire.mend()

    def freeze(self) -> None:
        self._wire.hold(True)

    def thaw(self) -> None:
        self._wire.hold(False)


class Own(Served):
    """A server of tests/servers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        server.start()

    @property
    def port(self) -> int:
        return self.server.port

    def place(self) -> Location:
        return self.server.place("run")

    def remove(self, url: str) -> None:
        self.server.remove(url)

    def stop(self) -> None:
        self.server.stop()

    def kill(self) -> None:
        self.server.kill()

    def start(self) -> None:
        self.server.start()

    def freeze(self) -> None:
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()


class Sftp(Own):
    """OpenSSH's server: its host key is known by its port."""

    def through(self, location: Location, wire: Wire) -> Location:
        url, options = super().through(location, wire)
        known = Path(options["known_hosts"])
        other = known.with_name(f"{known.name}-{wire.port}")
        other.write_text(known.read_text().replace(f":{self.port} ", f":{wire.port} "))
        return url, {**options, "known_hosts": str(other)}


@dataclass(frozen=True)
class _Opening:
    """How a kind of storage is opened."""

    missing: Callable[[], str | None]  # tells why it can't be, or returns None
    opened: Callable[[pytest.FixtureRequest, Path], Kind]  # opens it, given a fixture's request and a directory


def _absent(variable: str, what: str) -> Callable[[], str | None]:
    return lambda: None if os.environ.get(variable) else f"{variable} names no {what}"


def _ceph(request: pytest.FixtureRequest, directory: Path) -> Kind:
    key, secret = (os.environ.get(f"DCP_NVCOMP_TEST_S3_{name}") for name in ("KEY", "SECRET"))
    endpoint = os.environ["DCP_NVCOMP_TEST_S3"]
    return S3({"endpoint_url": endpoint, "key": key or "ci", "secret": secret or "cisecret"})


_KINDS: Final = {
    "disk": _Opening(lambda: None, lambda request, directory: Directory(directory)),
    "mounted": _Opening(
        _absent("DCP_NVCOMP_TEST_DIR", "directory on a file system to be tested"),
        lambda request, directory: Directory(Path(os.environ["DCP_NVCOMP_TEST_DIR"])),
    ),
    "moto": _Opening(lambda: None, lambda request, directory: Moto(request.getfixturevalue("moto_endpoint"))),
    "ceph": _Opening(_absent("DCP_NVCOMP_TEST_S3", "S3 server (.ci/ceph_up.sh starts one)"), _ceph),
    "azure": _Opening(AzuriteServer.missing, lambda request, directory: Own(AzuriteServer(directory))),
    "gcs": _Opening(GcsServer.missing, lambda request, directory: Own(GcsServer(directory))),
    "sftp": _Opening(SftpServer.missing, lambda request, directory: Sftp(SftpServer(directory))),
    "smb": _Opening(SmbServer.missing, lambda request, directory: Own(SmbServer(directory))),
}
_URLS: Final = {
    "memory": "memory://{{}}/run",
    "dir": "dir://run-{{}}::file://{0}",
    "simplecache": "simplecache::memory://{{}}/run",
    **{protocol: f"{protocol}://{{0}}/{{{{}}}}/run" for protocol in PROTOCOLS},
}


def _generic(url: str) -> _Opening:
    return _Opening(lambda: None, lambda request, directory: Generic(url.format(directory)))


# Without retries, a deadline and conditions of ours; tests/faults/test_plain_fsspec.py has all their calls fail.
_GENERIC: Final = {
    "ftp": _Opening(FtpServer.missing, lambda request, directory: Own(FtpServer(directory))),
    **{name: _generic(url) for name, url in _URLS.items()},
}
_MARKS: Final = {"moto": "s3", "ceph": "s3", "azure": "azure", "gcs": "gcs", "sftp": "sftp", "smb": "smb"}

_ON_DISK: Final = ("disk", "mounted")


def _parameters(names: tuple[str, ...]) -> list[Any]:
    """Return parameters of a fixture, each marked by the store that it speaks to."""
    marks = {name: [getattr(pytest.mark, _MARKS[name])] if name in _MARKS else [] for name in names}
    return [pytest.param(name, marks=marks[name], id=name) for name in names]


ALL: Final = _parameters(tuple(_KINDS))
# fixture `place` on the generic ones too
EVERYWHERE: Final = pytest.mark.parametrize("kind", [*ALL, *_parameters(tuple(_GENERIC))], indirect=True)
WITH_RUNS: Final = pytest.mark.parametrize(
    "kind", [*ALL, *_parameters(("ftp", "memory", "plain-moving"))], indirect=True
)
MARKED: Final = dict(zip(_KINDS, ALL, strict=True))
NETWORKED: Final = _parameters(tuple(name for name in _KINDS if name not in _ON_DISK))
SERVED: Final = _parameters(tuple(name for name in _KINDS if name not in (*_ON_DISK, "ceph")))


def open_kind(name: str, request: pytest.FixtureRequest, directory: Path) -> Kind:
    """Open a kind of storage by its name, or skip the test and say what has to be installed."""
    opening = (_KINDS | _GENERIC)[name]
    missing = opening.missing()
    if missing:
        pytest.skip(missing)
    return opening.opened(request, directory)
