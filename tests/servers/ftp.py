"""An FTP server, pyftpdlib, in a process of its own on 127.0.0.1."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import uuid
from pathlib import Path
from typing import Final

from tests.servers.base import Location, Server

_USER: Final = "user"
_PASSWORD: Final = "f7p-S3cr3t"


class FtpServer(Server):
    """pyftpdlib with one user who may do anything."""

    @classmethod
    def missing(cls) -> str | None:
        return None if importlib.util.find_spec("pyftpdlib") else "There is no FTP server: pip install pyftpdlib"

    @property
    def _files(self) -> Path:
        return self._directory / "files"

    def _prepare(self) -> None:
        self._files.mkdir(exist_ok=True)

    def _command(self) -> list[str]:
        where = ["-i", "127.0.0.1", "-p", str(self.port), "-d", str(self._files)]
        return [sys.executable, "-m", "pyftpdlib", *where, "-u", _USER, "-P", _PASSWORD, "--write"]

    def _ask(self, greeting: bytes = b"220") -> None:
        super()._ask(greeting)

    def place(self, name: str = "run") -> Location:
        folder = uuid.uuid4().hex[:12]
        (self._files / folder).mkdir()
        return f"ftp://{_USER}:{_PASSWORD}@127.0.0.1:{self.port}/{folder}/{name}", {}

    def remove(self, url: str) -> None:
        shutil.rmtree(self._files / url.split("/")[3])
