"""Samba's server on 127.0.0.1, with one share that can be written and one that can't."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Final

from tests.servers.base import Location, Server

_SMBD: Final = "/usr/sbin/smbd"


class SmbServer(Server):
    """smbd with its own configuration and passwords, and files that belong to the user that runs the tests."""

    share, read_only_share = "checkpoints", "checkpoints-to-read"  # two names of one

    def __init__(self, directory: Path, *settings: str) -> None:
        super().__init__(directory)
        self._settings = settings
        self.password = f"secret-{uuid.uuid4().hex[:12]}"
        self._files = directory / "files"
        self._configuration = directory / "smb.conf"

    @classmethod
    def missing(cls) -> str | None:
        if os.path.exists(_SMBD) and shutil.which("smbpasswd"):
            return None
        return "Samba's server is not here: apt-get install samba smbclient"

    def _prepare(self) -> None:
        new = not self._configuration.exists()
        folders = ("private", "lock", "state", "cache", "run", "rpc")
        for name in (*folders, "files"):
            (self._directory / name).mkdir(mode=0o700, exist_ok=True)
        private, lock, state, cache, run, rpc = (self._directory / name for name in folders)
        self._configuration.write_text(f"""\
[global]
  server role = standalone server
  interfaces = 127.0.0.1/8
  bind interfaces only = yes
  smb ports = {self.port}
  disable netbios = yes
  server min protocol = SMB2
  private dir = {private}
  lock directory = {lock}
  state directory = {state}
  cache directory = {cache}
  pid directory = {run}
  ncalrpc dir = {rpc}
  passdb backend = tdbsam:{private}/passdb.tdb
  logging = file
  log file = {self._directory}/log
  load printers = no
  printcap name = /dev/null
  disable spoolss = yes
  rpc start on demand helpers = no
{"".join(f"  {line}{chr(10)}" for line in self._settings)}[{self.share}]
  path = {self._files}
  read only = no
  valid users = {self.user}
[{self.read_only_share}]
  path = {self._files}
  read only = yes
  valid users = {self.user}
""")
        if new:
            self.set_password(self.user, self.password)

    def set_password(self, user: str, password: str) -> None:
        """Let a user of this machine log in with a password."""
        command = ["smbpasswd", "-c", str(self._configuration), "-s", "-a", user]
        subprocess.run(command, check=True, input=f"{password}\n{password}\n".encode(), capture_output=True)

    def _command(self) -> list[str]:
        return [_SMBD, "--foreground", "--no-process-group", "--configfile", str(self._configuration)]

    def place(self, name: str = "run") -> Location:
        folder = uuid.uuid4().hex[:12]
        (self._files / folder).mkdir()
        options = {"username": self.user, "password": self.password}
        return f"smb://127.0.0.1:{self.port}/{self.share}/{folder}/{name}", options

    def folder(self, url: str) -> Path:
        """Return the local directory that is behind a URL of `place`."""
        return self._files / url.split("/", 4)[4]

    def remove(self, url: str) -> None:
        shutil.rmtree(self._files / url.split("/")[4])
