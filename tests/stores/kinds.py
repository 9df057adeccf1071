"""The kinds of storage that the suites run on; each is opened once, and lives as long as the worker."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import fsspec
import pytest

from tests.servers.azurite import AzuriteServer
from tests.servers.base import Kind, Location, Reachable, Served, Server
from tests.servers.ftp import FtpServer
from tests.servers.gcs import GcsServer
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer
from tests.servers.wire import Wire
from tests.storage.plain import PROTOCOLS

_CI: Final = Path(__file__).resolve().parents[2] / ".ci"


class Directory(Kind):
    """A directory of a file system that is mounted here."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def place(self, name: str = "run") -> Location:
        return str(self._path / uuid.uuid4().hex[:12] / name), {}

    def folder(self, url: str) -> Path:
        return Path(url)


class Generic(Kind):
    """What fsspec reaches and no storage of ours knows, by a URL that has a fresh name for `{}`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def place(self, name: str = "run") -> Location:
        return self._url.format(uuid.uuid4().hex, name), {}

    def stop(self) -> None:
        memory = fsspec.filesystem("memory")
        if memory.exists("/"):
            memory.rm("/", recursive=True)


class S3(Reachable):
    """Buckets of an S3 server."""

    def __init__(self, endpoint: str) -> None:
        import s3fs

        key, secret = (os.environ.get(f"DCP_NVCOMP_TEST_S3_{name}") for name in ("KEY", "SECRET"))
        self._options = {"endpoint_url": endpoint, "key": key or "ci", "secret": secret or "cisecret"}
        self.client = s3fs.S3FileSystem(**self._options, use_listings_cache=False)
        self.port = int(endpoint.rpartition(":")[2])

    def place(self, name: str = "run") -> Location:
        bucket = f"dcp-nvcomp-{uuid.uuid4().hex[:12]}"
        self.client.mkdir(bucket)
        return f"s3://{bucket}/{name}", dict(self._options)

    def remove(self, url: str) -> None:
        bucket = url.split("/")[2]
        self.client.clear_multipart_uploads(bucket)
        while found := self.client.call_s3("list_objects_v2", Bucket=bucket).get("Contents"):
            for one in found:
                self.client.call_s3("delete_object", Bucket=bucket, Key=one["Key"])  # also the markers of folders
        with contextlib.suppress(FileNotFoundError):  # a slow answer is timed out and asked for again: it is gone then
            self.client.rmdir(bucket)

    def put(self, url: str, data: bytes) -> None:
        """Write an object beside our client."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        self.client.call_s3("put_object", Bucket=bucket, Key=key, Body=data)

    def names(self, url: str) -> list[str]:
        """Return the names of all objects in a URL's bucket."""
        return [name.partition("/")[2] for name in self.client.find(url.split("/")[2])]


class Moto(S3, Served):
    """moto's server, which lives in this process: instead of it, all ways to it are cut."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._wire = Wire(self.port)
        self._wire.__enter__()
        self.port = self._wire.port
        self._options["endpoint_url"] = f"http://127.0.0.1:{self.port}"

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


class OwnCeph(S3, Served):
    """A Ceph that is not shared with other tests, so its gateway may be killed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "ceph"
        command = [_CI / "ceph_up.sh", self._directory, "0"]
        up = subprocess.run(command, check=True, capture_output=True, text=True, timeout=280)
        super().__init__(up.stdout.splitlines()[-1])

    @staticmethod
    def missing() -> str | None:
        """Say what this machine lacks for it."""
        is_here = "DCP_NVCOMP_TEST_S3" in os.environ and shutil.which("radosgw") is not None
        return None if is_here else "needs Ceph's programs; .ci/run installs them"

    def stop(self) -> None:
        subprocess.run([_CI / "ceph_down.sh", self._directory], check=True, timeout=120)

    def _signal(self, number: signal.Signals) -> None:
        os.kill(int((self._directory / "run" / "client.rgw.pid").read_text()), number)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def start(self) -> None:
        environment = {**os.environ, "CEPH_CONF": str(self._directory / "ceph.conf")}
        subprocess.run(["radosgw", "--name", "client.rgw"], env=environment, check=True, timeout=60)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)


_SERVERS: Final[dict[str, type[Server | OwnCeph]]] = {
    "azure": AzuriteServer,
    "gcs": GcsServer,
    "sftp": SftpServer,
    "smb": SmbServer,
    "ftp": FtpServer,
    "own_ceph": OwnCeph,
}
# Named by the environment: a variable, what it names, and how it is opened.
_NAMED: Final[dict[str, tuple[str, str, Callable[[str], Kind]]]] = {
    "mounted": ("DCP_NVCOMP_TEST_DIR", "directory", lambda found: Directory(Path(found))),
    "ceph": ("DCP_NVCOMP_TEST_S3", "S3 server (.ci/ceph_up.sh starts one)", S3),
}
_URLS: Final = {
    "memory": "memory://{{}}/{{}}",
    "dir": "dir://run-{{}}-{{}}::file://{0}",
    "simplecache": "simplecache::memory://{{}}/{{}}",
    **{protocol: f"{protocol}://{{0}}/{{{{}}}}/{{{{}}}}" for protocol in PROTOCOLS},
}
_OURS: Final = ("disk", "mounted", "moto", "ceph", "azure", "gcs", "sftp", "smb")
_MARKS: Final = {"moto": "s3", "ceph": "s3", "azure": "azure", "gcs": "gcs", "sftp": "sftp", "smb": "smb"}


def parameters(*names: str) -> list[Any]:
    """Return parameters of the fixture `kind`, each marked by the store that it speaks to."""
    marks = {name: [getattr(pytest.mark, _MARKS[name])] if name in _MARKS else [] for name in names}
    return [pytest.param(name, marks=marks[name], id=name) for name in names]


def on(*names: str) -> pytest.MarkDecorator:
    """Run a test on these kinds only."""
    return pytest.mark.parametrize("kind", parameters(*names), indirect=True)


ALL: Final = parameters(*_OURS)
# Also on what fsspec reaches, without retries, a deadline and conditions of ours.
EVERYWHERE: Final = on(*_OURS, "ftp", *_URLS)
NETWORKED: Final = parameters("moto", "ceph", "azure", "gcs", "sftp", "smb")
SERVED: Final = parameters("moto", "azure", "gcs", "sftp", "smb")


def open_kind(name: str, request: pytest.FixtureRequest, directory: Path) -> Kind:
    """Open a kind of storage by its name, or skip the test and say what has to be installed."""
    if name in _SERVERS:
        missing = _SERVERS[name].missing()
        if missing:
            pytest.skip(missing)
        server = _SERVERS[name](directory)
        if isinstance(server, Server):
            server.start()
        return server
    if name in _NAMED:
        variable, what, opened = _NAMED[name]
        if not os.environ.get(variable):
            pytest.skip(f"{variable} names no {what}")
        return opened(os.environ[variable])
    if name == "moto":
        return Moto(request.getfixturevalue("moto_endpoint"))
    return Directory(directory) if name == "disk" else Generic(_URLS[name].format(directory))
