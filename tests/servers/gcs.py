"""Google Cloud Storage's emulator in a process of its own, on 127.0.0.1."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.parse
import urllib.request
import uuid
from typing import Any

from tests.servers.base import Location, Server


class GcsServer(Server):
    """gcp-storage-emulator with what gcs_emulator.py adds to it."""

    @classmethod
    def missing(cls) -> str | None:
        packages = {"gcp_storage_emulator": "gcp-storage-emulator", "gcsfs": "gcsfs"}
        absent = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
        return f"Google Cloud Storage's emulator is not here: pip install {' '.join(absent)}" if absent else None

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def _command(self) -> list[str]:
        emulator = [sys.executable, "-m", "tests.servers.gcs_emulator"]
        return [*emulator, "--port", str(self.port), "--data", str(self._directory)]

    def _ask(self, greeting: bytes = b"") -> None:
        self.request("GET", "/")

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request beside our client, with JSON or plain bytes, and return the JSON of the answer."""
        plain = body is None or isinstance(body, bytes)
        data = body if plain else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.endpoint}{path}", data, method=method)
        request.add_header("Content-Type", "application/octet-stream" if plain else "application/json")
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else None

    def place(self, name: str = "run") -> Location:
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

    def names(self, url: str) -> list[str]:
        """Return the names of all objects in a URL's bucket."""
        return [found["name"] for found in self.objects(url)]

    def remove(self, url: str) -> None:
        bucket = url.split("/")[2]
        for found in self.objects(url):
            self.request("DELETE", f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(found['name'], safe='')}")
        self.request("DELETE", f"/storage/v1/b/{bucket}")
