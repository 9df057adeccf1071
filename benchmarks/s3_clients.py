"""A part of `stores`: the files of a checkpoint to and from an S3 server, by each client that could send them.

    dcp_nvcomp                       as it is: s3fs's client, which signs what it sends over http
    dcp_nvcomp, unsigned payloads    the same with payload_signing_enabled=False, as over https
    obstore                          Rust's object_store, with parts of the same length

The server is the one that DCP_NVCOMP_TEST_S3 names; .ci/ceph_up.sh starts one.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measuring import Case, NotHere, alternate, core_count, paired
from benchmarks.peers import ours, save
from benchmarks.results import Report, Table
from benchmarks.states import State
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem

__all__ = ["compare"]

_PART_NBYTES = 16 << 20
_READ_NBYTES = 8 << 20
_THREADS = 8
_UNSIGNED = {"config_kwargs": {"s3": {"payload_signing_enabled": False}}}
_OBSTORE = "obstore"


@contextmanager
def _bucket() -> Iterator[tuple[str, dict[str, Any]]]:
    endpoint = os.environ.get("DCP_NVCOMP_TEST_S3")
    if not endpoint:
        raise NotHere("DCP_NVCOMP_TEST_S3 names no server (.ci/ceph_up.sh starts one)")
    import s3fs

    key, secret = (os.environ.get(f"DCP_NVCOMP_TEST_S3_{name}") for name in ("KEY", "SECRET"))
    options = {"endpoint_url": endpoint, "key": key or "ci", "secret": secret or "cisecret"}
    client = s3fs.S3FileSystem(**options)
    name = f"dcp-nvcomp-bench-{uuid.uuid4().hex[:12]}"
    client.mkdir(name)
    try:
        yield name, options
    finally:
        client.rm(name, recursive=True)


def compare(report: Report, table: Table, state: State) -> None:
    """Measure the clients, and add their rows to the table."""
    repeats = report.settings.repeats_or(5)
    report.settings.say(f"S3: files by each client, {repeats} times each")
    contents = _files(state)
    with _bucket() as (bucket, options):
        clients = {
            "dcp_nvcomp": _ours(f"s3://{bucket}/ours", options),
            "dcp_nvcomp, unsigned payloads": _ours(f"s3://{bucket}/unsigned", {**options, **_UNSIGNED}),
            _OBSTORE: _by_obstore(bucket, options),
        }
        buffers = {name: bytearray(len(data)) for name, data in contents.items()}
        saved = alternate(
            {name: Case(lambda write=write: write(contents)) for name, (write, _) in clients.items()}, repeats=repeats
        )
        loaded = alternate(
            {name: Case(lambda read=read: read(buffers)) for name, (_, read) in clients.items()}, repeats=repeats
        )
        assert buffers == contents
    for name in clients:
        table.add(
            store="S3 (Ceph), the files alone",
            writer=name,
            stored=sum(map(len, contents.values())) / 1e6,
            save_seconds=saved[name],
            load_seconds=loaded[name],
            save_speedup=paired(saved[_OBSTORE], saved[name]),
            load_speedup=paired(loaded[_OBSTORE], loaded[name]),
        )


def _files(state: State) -> dict[str, bytes]:
    """Return the data files of a checkpoint, as many as are sent to S3 at once."""
    with tempfile.TemporaryDirectory(prefix="dcp-nvcomp-bench-") as directory:
        save(ours(core_count(), single_file_per_rank=False), directory, state)
        return {file.name: file.read_bytes() for file in sorted(Path(directory).glob("*.distcp"))}


def _ours(url: str, options: dict[str, Any]) -> tuple[Callable[[dict[str, bytes]], None], Callable[..., None]]:
    return (
        lambda contents: _write_files(open_filesystem(url, storage_options=options), contents),
        lambda buffers: _read_files(open_filesystem(url, storage_options=options), buffers),
    )


def _by_obstore(bucket: str, options: dict[str, Any]) -> tuple[Callable[[dict[str, bytes]], None], Callable[..., None]]:
    import obstore
    from obstore.store import S3Store

    def store() -> Any:
        return S3Store(
            bucket,
            endpoint=options["endpoint_url"],
            access_key_id=options["key"],
            secret_access_key=options["secret"],
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
        )

    def write(contents: dict[str, bytes]) -> None:
        target = store()

        def one(name: str) -> None:
            with obstore.open_writer(target, f"obstore/{name}", buffer_size=_PART_NBYTES, max_concurrency=1) as file:
                data = memoryview(contents[name])
                for start in range(0, len(data), 4 << 20):
                    file.write(data[start : start + (4 << 20)])

        with ThreadPoolExecutor(len(contents)) as pool:
            list(pool.map(one, contents))

    def read(buffers: dict[str, bytearray]) -> None:
        source = store()

        def one(piece: tuple[str, int, int]) -> None:
            name, start, stop = piece
            buffers[name][start:stop] = memoryview(obstore.get_range(source, f"obstore/{name}", start=start, end=stop))

        pieces = [
            (name, start, min(start + _READ_NBYTES, len(buffer)))
            for name, buffer in buffers.items()
            for start in range(0, len(buffer), _READ_NBYTES)
        ]
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(one, pieces))

    return write, read


def _write_files(filesystem: Filesystem, contents: dict[str, bytes]) -> None:
    """Write files, all at once, and close the connections."""

    def write(name: str) -> None:
        stream = filesystem.open_output(name)
        data = memoryview(contents[name])
        for start in range(0, len(data), 4 << 20):
            stream.write(data[start : start + (4 << 20)])
        stream.close()

    with ThreadPoolExecutor(max(1, len(contents))) as pool:
        list(pool.map(write, contents))
    filesystem.close()


def _read_files(filesystem: Filesystem, buffers: dict[str, bytearray]) -> None:
    """Read files in pieces, as many at once as a load does, and close the connections."""
    nbytes = filesystem.read_nbytes
    pieces = [
        (name, start, memoryview(buffer)[start : start + nbytes])
        for name, buffer in buffers.items()
        for start in range(0, len(buffer), nbytes)
    ]
    with ThreadPoolExecutor(filesystem.parallel_reads) as pool:
        list(pool.map(lambda piece: filesystem.read_into(*piece), pieces))
    filesystem.close()
