"""`s3`: save to and load from an S3 server, compared with DCP's FsspecWriter and Reader and plain boto3.

The server is the one named by --s3 or DCP_NVCOMP_TEST_S3 (keys in DCP_NVCOMP_TEST_S3_KEY and _SECRET, by default `ci`
and `cisecret`); .ci/ceph_up.sh starts one. On the same machine it takes its share of the cores, as the figures show:
boto3's transfer of the same bytes, in parallel parts and with nothing else to do, is what the server can take.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.measuring import Case, NotHere, Settings, alternate, core_count, paired
from benchmarks.peers import Peer, load, ours, save, stock_fsspec
from benchmarks.results import Plot, Report
from benchmarks.states import State, assert_same, build_state, destination, nbytes_of


def storage_options(endpoint: str) -> dict[str, Any]:
    """For s3fs, and so for this project and for DCP's writer."""
    return {
        "endpoint_url": endpoint,
        "key": os.environ.get("DCP_NVCOMP_TEST_S3_KEY", "ci"),
        "secret": os.environ.get("DCP_NVCOMP_TEST_S3_SECRET", "cisecret"),
    }


def _client(endpoint: str) -> Any:
    import boto3

    options = storage_options(endpoint)
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=options["key"],
        aws_secret_access_key=options["secret"],
        region_name="us-east-1",
    )


def new_bucket(endpoint: str) -> str:
    """The URL of a checkpoint in a bucket of its own."""
    bucket = f"dcp-nvcomp-bench-{uuid.uuid4().hex[:12]}"
    _client(endpoint).create_bucket(Bucket=bucket)
    return f"s3://{bucket}/run"


def _objects(client: Any, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        yield from page.get("Contents", [])


def remove_objects(endpoint: str, url: str) -> None:
    """Remove what is below a URL."""
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    client = _client(endpoint)
    for found in list(_objects(client, bucket, f"{prefix}/" if prefix else "")):
        client.delete_object(Bucket=bucket, Key=found["Key"])


def remove_bucket(endpoint: str, url: str) -> None:
    """Remove the bucket that a URL is in, and everything in it."""
    bucket = url.removeprefix("s3://").partition("/")[0]
    remove_objects(endpoint, f"s3://{bucket}/")
    _client(endpoint).delete_bucket(Bucket=bucket)


@contextmanager
def _bucket(endpoint: str) -> Iterator[str]:
    url = new_bucket(endpoint)
    try:
        yield url
    finally:
        remove_bucket(endpoint, url)


def run(settings: Settings) -> Report:
    if settings.s3 is None:
        raise NotHere("no S3 server was named: --s3 http://127.0.0.1:7480 (.ci/ceph_up.sh starts one)")
    report = Report("s3", settings)
    state = build_state(settings.nbytes_or(512 << 20), settings.state)
    with _bucket(settings.s3) as url:
        _compare(report, settings.s3, url, state)
    return report


def _compare(report: Report, endpoint: str, url: str, state: State) -> None:
    settings, threads, options = report.settings, core_count(), storage_options(endpoint)
    repeats, nbytes = settings.repeats_or(5), nbytes_of(state)
    peers = [ours(threads, **options), stock_fsspec(threads, **options), stock_fsspec(threads, zstd=True, **options)]
    settings.say(f"save and load of {nbytes / 1e6:.0f} MB, {repeats} times each")
    save(peers[0], f"{url}/{peers[0].name}", state)  # what boto3 is to transfer
    stored = {peers[0].name: _stored_nbytes(endpoint, f"{url}/{peers[0].name}")}
    plain = _PlainTransfer(endpoint, f"{url}/plain", state)
    encoded = _PlainTransfer(endpoint, f"{url}/encoded", {"": torch.zeros(stored[peers[0].name], dtype=torch.uint8)})
    transfers = {"boto3, uncompressed bytes": plain, "boto3, as many as encoded": encoded}

    saves = {peer.name: _save_case(peer, endpoint, f"{url}/{peer.name}", state) for peer in peers}
    saves |= {name: Case(transfer.upload, before=transfer.remove) for name, transfer in transfers.items()}
    saved = alternate(saves, repeats=repeats)
    into = destination(state)
    for peer in peers:
        stored[peer.name] = _stored_nbytes(endpoint, f"{url}/{peer.name}")
        load(peer, f"{url}/{peer.name}", into)
        assert_same(into, state, peer.name)
    stored |= {name: transfer.nbytes for name, transfer in transfers.items()}
    loads = {peer.name: Case(lambda peer=peer: load(peer, f"{url}/{peer.name}", into)) for peer in peers}
    loads |= {name: Case(transfer.download) for name, transfer in transfers.items()}
    loaded = alternate(loads, repeats=repeats, warmups=0)

    table = report.table(
        "s3",
        f"{nbytes / 1e6:.0f} MB to and from {endpoint}, {threads} threads: median (lowest-highest) of {repeats}",
        writer=("writer", ""),
        stored=("stored, MB", ".1f"),
        save_seconds=("save, s", ".3f"),
        load_seconds=("load, s", ".3f"),
        save_rate=("save, MB/s of state", "~.0f"),
        load_rate=("load, MB/s of state", "~.0f"),
        save_speedup=("save, x DCP", ".2f"),
        load_speedup=("load, x DCP", ".2f"),
    )
    for name in saved:
        table.add(
            writer=name,
            stored=stored[name] / 1e6,
            save_seconds=saved[name],
            load_seconds=loaded[name],
            save_rate=saved[name].rate(nbytes / 1e6),
            load_rate=loaded[name].rate(nbytes / 1e6),
            save_speedup=paired(saved["dcp"], saved[name]),
            load_speedup=paired(loaded["dcp"], loaded[name]),
        )
    for action in ("save", "load"):
        speedup = table.rows[0][f"{action}_speedup"].median
        report.at_least(f"{action} speed over DCP's fsspec writer and reader, S3", speedup, 1.5)
    series = {row["writer"]: [("save", row["save_seconds"]), ("load", row["load_seconds"])] for row in table.rows}
    report.plots.append(Plot(f"{nbytes / 1e6:.0f} MB, S3", "", "seconds", series))


def _save_case(peer: Peer, endpoint: str, url: str, state: State) -> Case:
    return Case(lambda: save(peer, url, state), before=lambda: remove_objects(endpoint, url))


def _stored_nbytes(endpoint: str, url: str) -> int:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    return sum(found["Size"] for found in _objects(_client(endpoint), bucket, f"{prefix}/"))


class _PlainTransfer:
    """boto3's managed transfer of one object: parts in parallel, its default settings, nothing else done."""

    def __init__(self, endpoint: str, url: str, state: State) -> None:
        self._client = _client(endpoint)
        self._bucket, _, self._key = url.removeprefix("s3://").partition("/")
        # from and to memory, like everything else here
        parts = [tensor.contiguous().view(torch.uint8).reshape(-1) for tensor in state.values()]
        self._data = torch.cat(parts).numpy().tobytes()
        self.nbytes = len(self._data)

    def upload(self) -> None:
        self._client.upload_fileobj(io.BytesIO(self._data), self._bucket, self._key)

    def download(self) -> None:
        target = io.BytesIO()
        self._client.download_fileobj(self._bucket, self._key, target)
        assert target.tell() == self.nbytes or target.getbuffer().nbytes == self.nbytes

    def remove(self) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=self._key)
