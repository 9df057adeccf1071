"""Azurite, Azure's own emulator of its Blob service, in a process of its own on 127.0.0.1.

It is an npm package: AZURITE_HOME names the folder that `npm install --prefix FOLDER azurite` was told.
"""

from __future__ import annotations

import base64
import os
import shutil
import uuid
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final

from tests.servers.base import Location, Server

_ACCOUNT: Final = "ckpt"
_DURABLE: Final = Path(__file__).with_name("azurite_durable.js")


class AzuriteServer(Server):
    """Azurite, made to keep what it has confirmed when it is killed (azurite_durable.js)."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.key = base64.b64encode(os.urandom(64)).decode()

    @classmethod
    def missing(cls) -> str | None:
        if shutil.which("node") and _program().exists():
            return None
        return (
            "Azurite is not here: apt-get install nodejs npm && npm install --prefix FOLDER azurite && "
            "export AZURITE_HOME=FOLDER"
        )

    @property
    def endpoint(self) -> str:
        """The address of its account."""
        return f"http://127.0.0.1:{self.port}/{_ACCOUNT}"

    def _command(self) -> list[str]:
        # --skipApiVersionCheck: it refuses clients that are newer than itself
        return [
            *("env", f"AZURITE_ACCOUNTS={_ACCOUNT}:{self.key}"),
            *("node", "-r", str(_DURABLE), str(_program())),
            *("--blobHost", "127.0.0.1", "--blobPort", str(self.port), "--location", str(self._directory / "data")),
            *("--skipApiVersionCheck", "--silent", "--disableTelemetry"),
        ]

    def service(self) -> Any:
        """Return a client beside ours."""
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient(self.endpoint, credential=self.key)

    def place(self, name: str = "run") -> Location:
        container = f"dcp-nvcomp-{uuid.uuid4().hex[:12]}"
        with self.service() as service:
            service.create_container(container)
        options = {"account_name": _ACCOUNT, "account_key": self.key, "endpoint": self.endpoint}
        return f"az://{container}/{name}", options

    def signed(self, url: str, rights: str) -> dict[str, Any]:
        """Return storage options that have some rights only, in Azure's letters, to the container of a URL."""
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        token = generate_container_sas(
            _ACCOUNT,
            url.split("/")[2],
            account_key=self.key,
            permission=ContainerSasPermissions.from_string(rights),
            expiry=datetime.now(timezone.utc) + timedelta(hours=1),
        )
        return {"account_name": _ACCOUNT, "endpoint": self.endpoint, "sas_token": token}

    def remove(self, url: str) -> None:
        with self.service() as service:
            service.delete_container(url.split("/")[2])

    def put(self, url: str, data: bytes) -> None:
        """Write a blob beside our client."""
        container, _, key = url.removeprefix("az://").partition("/")
        with self.service() as service:
            service.get_container_client(container).upload_blob(key, data, overwrite=True)

    def names(self, url: str) -> list[str]:
        """Return the names of all blobs in a URL's container."""
        with self.service() as service:
            return [blob.name for blob in service.get_container_client(url.split("/")[2]).list_blobs()]


def _program() -> Path:
    home = Path(os.environ.get("AZURITE_HOME", "/usr/lib"))
    return home / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
