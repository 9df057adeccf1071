"""Google Cloud Storage's emulator in a process of its own, on 127.0.0.1."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from pathlib import Path
from typing import Any, Final

__all__ = ["GcsServer"]

_START_SECONDS: Final = 60.0


class GcsServer:
    """gcp-storage-emulator with what gcs_emulator.py adds to it; it keeps its port and its data when it is killed.

    Args:
        directory: where its data and its log are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self._port = int(found.getsockname()[1])

    @classmethod
    def missing(cls) -> str | None:
        """Return what has to be installed; None if nothing has."""
        packages = {"gcp_storage_emulator": "gcp-storage-emulator", "gcsfs": "gcsfs"}
        absent = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
        return f"Google Cloud Storage's emulator is not here: pip install {' '.join(absent)}" if absent else None

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start it, and return when it answers."""
        assert self._process is None
        self._directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.servers.gcs_emulator", "--port", str(self._port), "--data"]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self._directory)],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                self.request("GET", "/")
                return
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                raise RuntimeError((self._directory / "log").read_text()[-2000:])
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, by SIGKILL; its data stay."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request beside our client, with JSON or plain bytes, and return the JSON of the answer."""
        plain = body is None or isinstance(body, bytes)
        data = body if plain else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.endpoint}{path}", data, method=method)
        request.add_header("Content-Type", "application/octet-stream" if plain else "application/json")
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else None

    def place(self, name: str) -> tuple[str, dict[str, Any]]:
        """Make a bucket, and return a URL in it and the storage options."""
        bucket = f"dcp-nvcomp-{uuid.uuid4().hex[:12]}"
        self.request("POST", "/storage/v1/b?project=test", {"name": bucket})
        return f"gs://{bucket}/{name}", {"endpoint_url": self.endpoint, "token": "anon"}

    def put(self, url: str, data: bytes) -> None:
        """Write an object beside our client."""
        bucket, _, key = url.removeprefix("gs://").partition("/")
        self.request("POST", f"/upload/storage/v1/b/{bucket}/o?uploadType=media&name={urllib.parse.quote(key)}", data)

    def objects(self, url: str) -> list[dict[str, Any]]:
        """Return the objects of a URL's bucket, as the server tells about them."""
        found, token = [], ""
        while True:
            page = self.request("GET", f"/storage/v1/b/{url.split('/')[2]}/o{token}")
            found += page.get("items", [])
            if "nextPageToken" not in page:
                return found
            token = f"?pageToken={urllib.parse.quote(page['nextPageToken'])}"

    def remove(self, url: str) -> None:
        """Remove a URL's bucket and all that is in it."""
        bucket = url.split("/")[2]
        for found in self.objects(url):
            self.request("DELETE", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(found['name'], safe='')}")
        self.request("DELETE", f"/storage/v1/b/{bucket}")
