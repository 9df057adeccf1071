"""OpenSSH's server with SFTP, on 127.0.0.1: the real one, for the user that runs the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Final

from tests.servers.base import Location, Server

_SSHD: Final = "/usr/sbin/sshd"  # it wants to be started by its full path


class SftpServer(Server):
    """sshd with a host key and one user's key of its own."""

    def __init__(self, directory: Path, flags: str = "") -> None:
        super().__init__(directory)
        self._flags = flags
        self._keys = directory / "keys"
        self._files = directory / "files"
        self._configuration = self._keys / "sshd_config"
        self.key, self.known_hosts = self._keys / "client", self._keys / "known_hosts"

    @classmethod
    def missing(cls) -> str | None:
        if os.path.exists(_SSHD) and shutil.which("ssh-keygen"):
            return None
        return "OpenSSH's server is not here: apt-get install openssh-server openssh-client"

    def through(self, location: Location, port: int) -> Location:
        url, options = super().through(location, port)
        known = self.known_hosts.with_name(f"known_hosts-{port}")  # its host key is known by its port
        known.write_text(self.known_hosts.read_text().replace(f":{self.port} ", f":{port} "))
        return url, {**options, "known_hosts": str(known)}

    def make_key(self, name: str, passphrase: str = "") -> Path:
        """Make a key pair in its directory, which it does not let in by that, and return the private one."""
        key = self._keys / name
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-f", str(key)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        return key

    def let_in(self, key: Path) -> None:
        """Let another key in too."""
        with (self._keys / "authorized_keys").open("a") as file:
            file.write(key.with_suffix(".pub").read_text())

    def _prepare(self) -> None:
        self._files.mkdir(exist_ok=True)
        self._keys.mkdir(mode=0o700, exist_ok=True)
        if not self.key.exists():
            host = self.make_key("host")
            self.make_key("client")
            self.let_in(self.key)
            words = host.with_suffix(".pub").read_text().split()
            self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {words[0]} {words[1]}\n")
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where it locks up its child without rights
        settings = {
            "ListenAddress": "127.0.0.1",
            "Port": str(self.port),
            "HostKey": str(self._keys / "host"),
            "AuthorizedKeysFile": str(self._keys / "authorized_keys"),
            "PermitRootLogin": "yes",
            "PasswordAuthentication": "yes",
            "KbdInteractiveAuthentication": "no",
            "UsePAM": "no",
            "StrictModes": "no",
            "MaxStartups": "200",
            "MaxSessions": "64",
            "PidFile": "none",
            "Subsystem": f"sftp internal-sftp {self._flags}",
        }
        lines = "".join(f"{name} {value}\n" for name, value in settings.items())
        patience = "PerSourcePenalties no\n"  # newer ones shut out who failed to log in, as some tests do
        self._configuration.write_text(lines + patience)
        if subprocess.run([_SSHD, "-t", "-f", str(self._configuration)], capture_output=True).returncode:
            self._configuration.write_text(lines)

    def _command(self) -> list[str]:
        return [_SSHD, "-D", "-e", "-f", str(self._configuration)]

    def _ask(self, greeting: bytes = b"SSH-") -> None:
        super()._ask(greeting)

    def place(self, name: str = "run") -> Location:
        folder = self._files / uuid.uuid4().hex[:12]
        folder.mkdir()
        options = {"client_keys": [str(self.key)], "known_hosts": str(self.known_hosts)}
        return f"sftp://{self.user}@127.0.0.1:{self.port}{folder}/{name}", options

    def folder(self, url: str) -> Path:
        """Return the local directory that is behind a URL of `place`."""
        return self._files / url.partition(f"{self._files}/")[2]

    def remove(self, url: str) -> None:
        shutil.rmtree(self._files / url.partition(f"{self._files}/")[2].split("/")[0])
