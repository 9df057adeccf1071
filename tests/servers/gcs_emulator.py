"""gcp-storage-emulator with what it lacks of Google Cloud Storage and we rely on.

    python -m tests.servers.gcs_emulator --port PORT --data DIRECTORY

- preconditions: `ifGenerationMatch` and `ifGenerationNotMatch` of uploads and removals, else 412
- upload sessions: what was received is told by a query, also of a session that is complete; no Range header if nothing
  was; parts but the last are multiples of 256 KiB; `X-Goog-Hash` of the last one is checked; DELETE answers 499
- 416 behind an object's end, JSON with every refusal, lists in pages, objects that are moved
- connections that stay open, and several at once; time for a part that does not grow with what was sent before
- objects of any name, kept whole through SIGKILL
- `Authorization: Bearer only:get,list` has only these rights of storage.objects; `Bearer nobody` is not let in

`PUT /keep/N` is for tests: of the next part that is sent to a session, the server keeps N bytes.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import socketserver
import threading
import uuid
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import google_crc32c
from gcp_storage_emulator import server, storage
from gcp_storage_emulator.exceptions import BadRequest, NotFound
from gcp_storage_emulator.handlers import objects

_CHUNK_NBYTES = 256 << 10
_PAGE = 1000
_COMPLETE = "complete"
_LOCK = threading.RLock()
_KEEP: list[int] = []

Handler = Callable[..., None]


class _Store(storage._FileStore):  # type: ignore[misc]
    """Files that are there whole or not at all, whenever the process is killed."""

    def write_bytes(self, rel: str, content: bytes) -> None:
        path = self._disk_path(rel)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
        temporary.write_bytes(content)
        os.replace(temporary, path)


class _Storage(storage.Storage):  # type: ignore[misc]
    """Each generation of an object in a file of its own, named by a hash of the object's name."""

    def __init__(self, directory: Path) -> None:
        super().__init__(data_dir=str(directory))
        self._store = _Store(use_memory=False, root=directory / "objects")
        self._checksums: dict[str, Any] = {}
        self._read_config_from_file()

    def _object_path(self, bucket_name: str, file_name: str) -> str:
        if bucket_name == storage.RESUMABLE_DIR:
            return f"{bucket_name}/{file_name}"
        found = self.objects.get(bucket_name, {}).get(file_name)
        return _path(bucket_name, file_name, found or {})

    def create_file(
        self, bucket_name: str, file_name: str, content: bytes, file_obj: dict[str, Any], file_id: str | None = None
    ) -> None:
        if bucket_name not in self.buckets:
            raise NotFound
        content = content or b""
        file_obj = {**file_obj, "size": str(len(content))}
        before = self.objects.get(bucket_name, {}).get(file_name)
        self._store.write_bytes(_path(bucket_name, file_name, file_obj), content)
        self.objects.setdefault(bucket_name, {})[file_name] = file_obj
        if file_id:
            self.resumable[file_id] = {**file_obj, _COMPLETE: True}
            self._delete_file(storage.RESUMABLE_DIR, self.safe_id(file_id))
        self._write_config_to_file()
        if before is not None:
            self._store.remove_file(_path(bucket_name, file_name, before))

    def _received(self, file_id: str) -> Path:
        return self._store._disk_path(f"{storage.RESUMABLE_DIR}/{self.safe_id(file_id)}")

    def get_resumable_byte_count(self, file_id: str) -> int:
        path = self._received(file_id)
        return path.stat().st_size if path.exists() else 0

    def add_to_resumable_upload(
        self, file_id: str, content: bytes, total_size: int | None = None, expected_start: int | None = None
    ) -> bytes | None:
        """Append a part; return the whole content when it is complete. The emulator would write all of it anew."""
        path = self._received(file_id)
        if expected_start not in (None, self.get_resumable_byte_count(file_id)):
            raise BadRequest(f"Invalid Content-Range start: {expected_start}")
        path.parent.mkdir(parents=True, exist_ok=True)
        checksum = self.checksum_of_received(file_id)
        with path.open("ab") as file:
            file.write(content or b"")
        checksum.update(content or b"")
        if total_size is None or path.stat().st_size < total_size:
            return None
        return path.read_bytes()[:total_size]

    def checksum_of_received(self, file_id: str) -> Any:
        """Return the running checksum of an upload session; it is read again after a restart."""
        if file_id not in self._checksums:
            path = self._received(file_id)
            self._checksums[file_id] = google_crc32c.Checksum(path.read_bytes() if path.exists() else b"")
        return self._checksums[file_id]

    def delete_file(self, bucket_name: str, file_name: str) -> None:
        found = self.objects.get(bucket_name, {}).pop(file_name, None)
        if found is None:
            raise NotFound
        self._write_config_to_file()
        self._store.remove_file(_path(bucket_name, file_name, found))

    def delete_bucket(self, bucket_name: str) -> None:
        self.resumable = {name: found for name, found in self.resumable.items() if found["bucket"] != bucket_name}
        super().delete_bucket(bucket_name)

    def cancel(self, upload_id: str) -> None:
        """Forget an upload session."""
        self.delete_resumable_file_obj(upload_id)
        self._delete_file(storage.RESUMABLE_DIR, self.safe_id(upload_id))
        self._write_config_to_file()


def _path(bucket: str, name: str, found: dict[str, Any]) -> str:
    return f"{bucket}/{sha256(name.encode()).hexdigest()}-{found.get('generation')}"


class _Status(int):
    """A status that http.HTTPStatus does not have."""

    phrase = "Client Closed Request"

    @property
    def value(self) -> int:
        return int(self)


class _RefusedError(Exception):
    """Ends a request with a status and the JSON that Google sends with it."""

    def __init__(self, status: HTTPStatus, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


# --- what is checked before a request is carried out -----------------------------------------------------------------


def _option(request: Any, name: str) -> str | None:
    values = request.query.get(name)
    return values[0] if values else None


def _object_of(request: Any, store: _Storage, name: str) -> dict[str, Any] | None:
    found: dict[str, Any] | None = store.objects.get(request.params["bucket_name"], {}).get(name)
    return found


def _must_be_allowed(request: Any, *rights: str) -> None:
    token = request.get_header("authorization", "").removeprefix("Bearer ")
    if token == "nobody":
        raise _RefusedError(HTTPStatus.UNAUTHORIZED, "authError", "Invalid Credentials")
    if token.startswith("only:"):
        for right in rights:
            if right not in token.removeprefix("only:").split(","):
                message = f"Permission 'storage.objects.{right}' denied on resource (or it may not exist)."
                raise _RefusedError(HTTPStatus.FORBIDDEN, "forbidden", message)


def _must_match(request: Any, found: dict[str, Any] | None) -> None:
    generation = "0" if found is None else str(found["generation"])
    expected, unexpected = _option(request, "ifGenerationMatch"), _option(request, "ifGenerationNotMatch")
    if (expected is not None and expected != generation) or (unexpected is not None and unexpected == generation):
        message = "At least one of the pre-conditions you specified did not hold."
        raise _RefusedError(HTTPStatus.PRECONDITION_FAILED, "conditionNotMet", message)


def _must_be_there(request: Any, store: _Storage) -> dict[str, Any]:
    name = request.params["object_id"]
    found = _object_of(request, store, name)
    if found is None:
        _must_be_allowed(request, "list")  # who may not list is not told what is missing
        raise _RefusedError(HTTPStatus.NOT_FOUND, "notFound", f"No such object: {request.params['bucket_name']}/{name}")
    return found


# --- requests --------------------------------------------------------------------------------------------------------


def _insert(request: Any, response: Any, store: _Storage) -> None:
    if _option(request, "upload_id") is not None:  # gcsfs sends parts by POST
        _part(request, response, store)
        return
    bucket = request.params["bucket_name"]
    if bucket not in store.buckets:
        raise _RefusedError(HTTPStatus.NOT_FOUND, "notFound", "The specified bucket does not exist.")
    if request.data is None:  # an empty upload
        request._data = b""
    meta = request.data.get("meta", request.data) if isinstance(request.data, dict) else {}
    found = _object_of(request, store, _option(request, "name") or meta["name"])
    _must_be_allowed(request, "create", *(["delete"] if found else []))
    _must_match(request, found)
    objects.insert(request, response, store)


def _part(request: Any, response: Any, store: _Storage) -> None:
    upload_id = _option(request, "upload_id") or ""
    session = store.resumable.get(upload_id)
    if session is None:
        raise _RefusedError(HTTPStatus.NOT_FOUND, "notFound", "No such upload session.")
    if session.get(_COMPLETE):
        response.json({name: value for name, value in session.items() if name != _COMPLETE})
        return
    _must_match(request, _object_of(request, store, session["name"]))
    parsed = objects._parse_resumable_content_range(request.get_header("Content-Range", ""))
    received, sent = store.get_resumable_byte_count(upload_id), request.data or b""
    if parsed["kind"] == "chunk":
        if len(sent) != parsed["end"] + 1 - parsed["start"] or parsed["start"] != received:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "invalid", "Invalid Content-Range.")
        if parsed["total"] is None and len(sent) % _CHUNK_NBYTES:
            message = f"Invalid request. The number of bytes uploaded must be a multiple of {_CHUNK_NBYTES}."
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "badRequest", message)
        if _KEEP:
            request._data = sent = sent[: _KEEP.pop()]
    if parsed["total"] is not None and received + len(sent) == parsed["total"]:
        _check_hash(request, store, upload_id, sent)
    objects.upload_partial(request, response, store)
    if response.status == 308:
        del response._headers["Range"]  # of a session without a byte it would be "bytes=0-0"
        if count := store.get_resumable_byte_count(upload_id):
            response["Range"] = f"bytes=0-{count - 1}"


def _check_hash(request: Any, store: _Storage, upload_id: str, last: bytes) -> None:
    claimed = re.search(r"crc32c=([^,]+)", request.get_header("X-Goog-Hash", ""))
    if claimed is None:
        return
    checksum = store.checksum_of_received(upload_id).copy()
    checksum.update(last)
    found = base64.b64encode(checksum.digest()).decode()
    if found != claimed[1]:
        message = objects.CRC32C_CHECKSUM_ERROR.format(claimed[1], found)
        raise _RefusedError(HTTPStatus.BAD_REQUEST, "invalid", message)


def _cancel(request: Any, response: Any, store: _Storage) -> None:
    store.cancel(_option(request, "upload_id") or "")
    response.status = _Status(499)


def _get(request: Any, response: Any, store: _Storage) -> None:
    _must_be_allowed(request, "get")
    found = _must_be_there(request, store)
    first = re.fullmatch(r"bytes=(\d+)-\d*", request.get_header("Range", ""))
    if _option(request, "alt") == "media":
        if first is not None and int(first[1]) >= int(found["size"]):
            message = "The requested range cannot be satisfied."
            raise _RefusedError(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "requestedRangeNotSatisfiable", message)
        response[objects._HASH_HEADER] = f"crc32c={found['crc32c']},md5={found['md5Hash']}"
    objects.get(request, response, store)


def _list(request: Any, response: Any, store: _Storage) -> None:
    _must_be_allowed(request, "list")
    if request.params["bucket_name"] not in store.buckets:
        raise _RefusedError(HTTPStatus.NOT_FOUND, "notFound", "The specified bucket does not exist.")
    objects.ls(request, response, store)
    listed = json.loads(response._content)
    named = sorted([(item["name"], item) for item in listed["items"]] + [(one, None) for one in listed["prefixes"]])
    after = _option(request, "pageToken")
    named = [one for one in named if after is None or one[0] > base64.b64decode(after).decode()]
    size = min(_PAGE, int(_option(request, "maxResults") or _PAGE))
    page: dict[str, Any] = {"kind": "storage#objects"}
    if items := [item for _, item in named[:size] if item is not None]:
        page["items"] = items
    if prefixes := [name for name, item in named[:size] if item is None]:
        page["prefixes"] = prefixes
    if len(named) > size:
        page["nextPageToken"] = base64.b64encode(named[size - 1][0].encode()).decode()
    response.json(page)


def _delete(request: Any, response: Any, store: _Storage) -> None:
    _must_be_allowed(request, "delete")
    _must_match(request, _must_be_there(request, store))
    objects.delete(request, response, store)
    response.status = HTTPStatus.NO_CONTENT


def _move(request: Any, response: Any, store: _Storage) -> None:
    _must_be_there(request, store)
    bucket, name = request.params["bucket_name"], request.params["object_id"]
    response.json(objects._copy(request.base_url, store, bucket, name, bucket, request.params["target"]))
    store.delete_file(bucket, name)


def _keep(request: Any, response: Any, store: _Storage) -> None:
    _KEEP.append(int(request.params["nbytes"]))


_OURS: dict[Handler, Handler] = {
    objects.insert: _insert,
    objects.upload_partial: _part,
    objects.get: _get,
    objects.download: _get,
    objects.ls: _list,
    objects.delete: _delete,
}


def _answering(handler: Handler) -> Handler:
    def answer(request: Any, response: Any, store: _Storage) -> None:
        try:
            handler(request, response, store)
        except _RefusedError as error:
            response.status = error.status
            told = {"message": str(error), "domain": "global", "reason": error.reason}
            response.json({"error": {"code": int(error.status), "message": str(error), "errors": [told]}})

    return answer


def _routes() -> Any:
    yield r"^/keep/(?P<nbytes>\d+)$", {server.PUT: _keep}
    moved = r"/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>[^/]+)/moveTo/o/(?P<target>[^/]+)"
    yield rf"^/storage/v1{moved}$", {server.POST: _answering(_move)}
    for pattern, methods in server.HANDLERS:
        ours = {method: _answering(_OURS.get(handler, handler)) for method, handler in methods.items()}
        if objects.upload_partial in methods.values():
            ours[server.DELETE] = _answering(_cancel)
        yield pattern, ours


class _Handler(server.RequestHandler):  # type: ignore[misc]
    """Reads a request before it waits for the one that is carried out, and answers after it let the next one in."""

    protocol_version = "HTTP/1.1"

    def _handle(self, method: str) -> None:
        nbytes = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(nbytes)
        if len(body) < nbytes:  # the client is gone
            self.close_connection = True
            return
        connection, self.rfile, self.wfile = (self.rfile, self.wfile), io.BytesIO(body), io.BytesIO()
        with _LOCK:
            server.Router(self).handle(method)
        answer = self.wfile.getvalue()
        self.rfile, self.wfile = connection
        self.wfile.write(answer)

    def do_GET(self) -> None:  # noqa: N802
        self._handle(server.GET)

    def do_POST(self) -> None:  # noqa: N802
        self._handle(server.POST)

    def do_PUT(self) -> None:  # noqa: N802
        self._handle(server.PUT)

    def do_DELETE(self) -> None:  # noqa: N802
        self._handle(server.DELETE)


class _Server(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    arguments = parser.parse_args()
    server.HANDLERS = tuple(_routes())
    store = _Storage(arguments.data.resolve())
    _Server(("127.0.0.1", arguments.port), partial(_Handler, store)).serve_forever()


if __name__ == "__main__":
    main()
