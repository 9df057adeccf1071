"""`stores`: save to and load from stores other than S3, compared with what others do on the same server.

`azure`: the server that DCP_NVCOMP_TEST_AZURE names by a connection string; .ci/azurite_up.sh starts one. DCP's writer
goes through adlfs there.
`s3`: the server that DCP_NVCOMP_TEST_S3 names, by several clients: benchmarks/s3_clients.py.
`gcs`: the emulator of Google Cloud Storage that the tests start; DCP's writer goes through gcsfs.

On the same machine a server takes its share of the cores.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import s3_clients
from benchmarks.measuring import Case, NotHere, Settings, alternate, core_count, paired
from benchmarks.peers import Peer, load, ours, save, stock_fsspec
from benchmarks.results import Plot, Report, Table
from benchmarks.states import State, assert_same, build_state, destination, nbytes_of
from dcp_nvcomp.storage.open import open_filesystem
from tests.servers.gcs import GcsServer

Store = tuple[str, dict[str, Any]]


@contextmanager
def _azure() -> Iterator[Store]:
    """A container of its own: its URL, and how to get there."""
    text = os.environ.get("DCP_NVCOMP_TEST_AZURE")
    if not text:
        raise NotHere("DCP_NVCOMP_TEST_AZURE is no connection string (.ci/azurite_up.sh starts a server)")
    from azure.storage.blob import BlobServiceClient

    container = f"dcp-nvcomp-bench-{uuid.uuid4().hex[:12]}"
    with BlobServiceClient.from_connection_string(text) as service:
        service.create_container(container)
        try:
            yield f"az://{container}/run", {"connection_string": text}
        finally:
            service.delete_container(container)


@contextmanager
def _gcs() -> Iterator[Store]:
    """A bucket of an emulator of its own."""
    if missing := GcsServer.missing():
        raise NotHere(missing)
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # gcsfs warns at each call otherwise
    with tempfile.TemporaryDirectory(prefix="dcp-nvcomp-bench-") as directory:
        server = GcsServer(Path(directory))
        server.start()
        try:
            yield server.place("run")
        finally:
            server.stop()


_STORES = {
    "azure": ("Azure Blob Storage (Azurite)", _azure),
    "gcs": ("Google Cloud Storage (gcp-storage-emulator)", _gcs),
}


def run(settings: Settings) -> Report:
    report = Report("stores", settings)
    state = build_state(settings.nbytes_or(256 << 20), settings.state)
    table = report.table(
        "stores",
        f"{nbytes_of(state) / 1e6:.0f} MB to and from servers on this machine, {core_count()} threads: median "
        f"(lowest-highest) of {settings.repeats_or(5)}; the last writer of each store is the peer",
        store=("store", ""),
        writer=("writer", ""),
        stored=("stored, MB", ".1f"),
        save_seconds=("save, s", ".3f"),
        load_seconds=("load, s", ".3f"),
        save_speedup=("save, x peer", ".2f"),
        load_speedup=("load, x peer", ".2f"),
    )
    for name, (words, opened) in _STORES.items():
        if settings.wants(name):
            with opened() as store:
                _compare(report, table, words, store, state)
    if settings.wants("s3"):
        s3_clients.compare(report, table, state)
    return report


def _compare(report: Report, table: Table, words: str, store: Store, state: State) -> None:
    settings, threads, (url, options) = report.settings, core_count(), store
    repeats = settings.repeats_or(5)
    peers = [ours(threads, **options), stock_fsspec(threads, **options)]
    settings.say(f"{words}: save and load, {repeats} times each")
    saves = {peer.name: _save_case(peer, f"{url}/{peer.name}", options, state) for peer in peers}
    saved = alternate(saves, repeats=repeats)
    into = destination(state)
    for peer in peers:
        load(peer, f"{url}/{peer.name}", into)
        assert_same(into, state, peer.name)
    loads = {peer.name: Case(lambda peer=peer: load(peer, f"{url}/{peer.name}", into)) for peer in peers}
    loaded = alternate(loads, repeats=repeats, warmups=0)
    rows = {
        peer.name: table.add(
            store=words,
            writer=peer.name,
            stored=_stored_nbytes(f"{url}/{peer.name}", options) / 1e6,
            save_seconds=saved[peer.name],
            load_seconds=loaded[peer.name],
            save_speedup=paired(saved["dcp"], saved[peer.name]),
            load_speedup=paired(loaded["dcp"], loaded[peer.name]),
        )
        for peer in peers
    }
    mine = rows[peers[0].name]
    report.at_least(f"{words}: save speed over DCP's fsspec writer", mine["save_speedup"].median, 1.3)
    report.at_least(f"{words}: load speed over DCP's fsspec reader", mine["load_speedup"].median, 2.0)
    series = {row["writer"]: [("save", row["save_seconds"]), ("load", row["load_seconds"])] for row in rows.values()}
    report.plots.append(Plot(words, "", "seconds", series))


def _save_case(peer: Peer, url: str, options: dict[str, Any], state: State) -> Case:
    def remove() -> None:
        directory = open_filesystem(url, storage_options=options)
        directory.remove(directory.list_names())

    return Case(lambda: save(peer, url, state), before=remove)


def _stored_nbytes(url: str, options: dict[str, Any]) -> int:
    files = open_filesystem(url, storage_options=options).list_files()
    return sum(file.nbytes for file in files if file.name.endswith(".distcp"))
