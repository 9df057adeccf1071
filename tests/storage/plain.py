"""Filesystems for fsspec over a local directory, with nothing of a local disk's privileges.

    plain://            can't move files: fsspec's own `mv` copies
    plain-refusing://   `mv` refuses an existing target by FileExistsError, as DBFS does
    plain-silent://     `mv` refuses an existing target without a word, as WebHDFS does
    plain-vague://      `mv` refuses an existing target by an error without errno, as a web service may
    plain-moving://     `mv` replaces an existing target, as Arrow's HDFS does
    plain-posix://      `posix_rename`, which `mv` calls, as with SFTP
    plain-replace://    `replace`
    plain-object://     no moves, but a PUT replaces an object in one step, as S3's

Nothing is buffered, and each call goes through `PlainFilesystem.hook`, under which it may fail.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
from fsspec.spec import AbstractFileSystem
from fsspec.utils import infer_storage_options

Hook = Callable[..., Any]


def carry_out(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """The hook that does nothing by itself."""
    return call(*arguments)


class ReadFile(io.FileIO):
    """A file that is being read. Nobody takes memory for what is not there."""

    def read(self, nbytes: int | None = -1, /) -> bytes:
        most = os.fstat(self.fileno()).st_size
        return super().read(most if nbytes is None or nbytes < 0 else min(nbytes, most)) or b""

    def forget(self) -> None:
        self.close()


class PlainFile:
    """A file that is being written."""

    def __init__(self, fs: PlainFilesystem, path: str) -> None:
        self._fs = fs
        self.closed = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    def write(self, data: Any) -> int:
        return int(self._fs.hook("write", self._write, memoryview(data).cast("B")))

    def _write(self, data: memoryview) -> int:
        return os.write(self._descriptor, data)

    def forget(self) -> None:
        """It was made, but whoever asked for it does not know."""
        os.close(self._descriptor)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._fs.hook("close", os.close, self._descriptor)

    def __enter__(self) -> PlainFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PlainFilesystem(AbstractFileSystem):  # type: ignore[misc]
    protocol: Any = "plain"
    root_marker = "/"
    hook: Hook = staticmethod(carry_out)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "rb":
            return self.hook("open to read", ReadFile, path)
        assert mode == "wb", mode
        return self.hook("create", PlainFile, self, path)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        found = self.hook("info", os.stat, self._strip_protocol(path))
        return self._described(path, found)

    def _described(self, path: str, found: os.stat_result) -> dict[str, Any]:
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": found.st_size, "type": kind, "mtime": found.st_mtime}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        names = self.hook("ls", os.listdir, path)
        return [self._described(f"{path}/{name}", os.stat(f"{path}/{name}")) for name in names]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.hook("makedirs", lambda: os.makedirs(self._strip_protocol(path), exist_ok=exist_ok))

    def _rm(self, path: str) -> None:
        self.hook("rm", os.unlink, self._strip_protocol(path))


class RefusingFilesystem(PlainFilesystem):
    protocol = "plain-refusing"

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self.hook("mv", self._move, path1, path2)

    def _move(self, path1: str, path2: str) -> None:
        if os.path.lexists(path2):
            raise FileExistsError(errno.EEXIST, "there is one already", path2)
        os.rename(path1, path2)


class SilentFilesystem(RefusingFilesystem):
    protocol = "plain-silent"

    def _move(self, path1: str, path2: str) -> None:
        if not os.path.lexists(path2):
            os.rename(path1, path2)


class VagueError(Exception):
    """The error of a client that knows no OSError."""


class VagueFilesystem(RefusingFilesystem):
    protocol = "plain-vague"

    def _move(self, path1: str, path2: str) -> None:
        if os.path.lexists(path2):
            raise VagueError("status 400")
        os.rename(path1, path2)


class MovingFilesystem(RefusingFilesystem):
    protocol = "plain-moving"

    def _move(self, path1: str, path2: str) -> None:
        os.rename(path1, path2)


class PosixRenameFilesystem(PlainFilesystem):
    protocol = "plain-posix"

    def posix_rename(self, path1: str, path2: str) -> None:
        self.hook("posix_rename", os.rename, path1, path2)

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        self.posix_rename(path1, path2)


class ReplaceFilesystem(RefusingFilesystem):
    protocol = "plain-replace"

    def replace(self, path1: str, path2: str) -> None:
        self.hook("replace", os.replace, path1, path2)


class ObjectFilesystem(PlainFilesystem):
    protocol = "plain-object"

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":  # there are no directories that would have to be made
            os.makedirs(os.path.dirname(path), exist_ok=True)
        return super()._open(path, mode, **options)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.hook("pipe_file", self._put, self._strip_protocol(path), value)

    def _put(self, path: str, value: bytes) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.put", "wb") as file:
            file.write(value)
        os.replace(f"{path}.put", path)


KINDS = (
    PlainFilesystem,
    RefusingFilesystem,
    SilentFilesystem,
    VagueFilesystem,
    MovingFilesystem,
    PosixRenameFilesystem,
    ReplaceFilesystem,
)
PROTOCOLS = tuple(kind.protocol for kind in KINDS)
# Those on which a file takes the place of another in one step.
ATOMIC = ("plain-moving", "plain-posix", "plain-replace")

for kind in (*KINDS, ObjectFilesystem):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


@contextlib.contextmanager
def hooked(hook: Hook) -> Iterator[None]:
    """Let all calls go through a hook."""
    PlainFilesystem.hook = staticmethod(hook)
    try:
        yield
    finally:
        PlainFilesystem.hook = staticmethod(carry_out)


class LoginFilesystem(MovingFilesystem):
    """As SMB's and SFTP's: the URL holds a login."""

    protocol = "plainlogin"  # no hyphen: fsspec 2024.3 takes such URLs for local paths

    def __init__(self, host: str = "", username: str = "", password: str = "", token: str = "", **options: Any) -> None:
        super().__init__(**options)
        self.password, self.token = password, token

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        return super()._strip_protocol(infer_storage_options(path)["path"].partition("?")[0])

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, Any]:
        found = infer_storage_options(path)
        return {name: found[name] for name in ("host", "username", "password") if name in found}


fsspec.register_implementation("plainlogin", LoginFilesystem, clobber=True)
