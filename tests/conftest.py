"""Fixtures for every test folder. S3 stores are `(url, storage_options)` of a fresh bucket, gone after the test.

`s3_store` is moto's server in a thread of this process. `real_s3_store` is the server named by DCP_NVCOMP_TEST_S3 (an
endpoint URL; keys in DCP_NVCOMP_TEST_S3_KEY and DCP_NVCOMP_TEST_S3_SECRET, by default `ci` and `cisecret`).
`any_s3_store` runs a test on both. `azure_store` is a container of the server that DCP_NVCOMP_TEST_AZURE names by a
connection string. `gcs_store` is a bucket of an emulator, `sftp_store` and `smb_store` are directories of real servers,
which each worker starts for itself (servers/).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from dcp_nvcomp.engines import notices
from dcp_nvcomp.saving.process_state import forget_all
from tests.distributed.launch import ranks, single_rank  # noqa: F401
from tests.effort import examples
from tests.servers.base import Server
from tests.servers.gcs import GcsServer
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer
from tests.skips import RequireGpu
from tests.stores.kinds import open_kind

S3Store = tuple[str, dict[str, Any]]
KindNamed = Callable[[str], Any]


# When DCP's own writer uses gcsfs, it would ask Google what kind of bucket it is; read when gcsfs is imported.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")

settings.register_profile("dcp_nvcomp", max_examples=examples(100), deadline=None)
settings.load_profile("dcp_nvcomp")


def _has_timeout(plugins: pytest.PytestPluginManager) -> bool:
    """True if pytest-timeout is there; a GPU host may have little more than pytest itself."""
    return plugins.hasplugin("timeout") or plugins.hasplugin("pytest_timeout")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail each test that is skipped for want of a GPU")
    if not _has_timeout(pluginmanager):
        parser.addini("timeout", "the time limit of a test: without pytest-timeout there is none")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--require-gpu"):
        config.pluginmanager.register(RequireGpu())
    if not _has_timeout(config.pluginmanager):
        config.addinivalue_line("markers", "timeout: the time limit of a test; without pytest-timeout there is none")
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group: runs on one worker; without pytest-xdist there are none")


# Tests that share what is slow to make run on one worker of pytest-xdist.
_GROUPS = {
    "ranks": "ranks",
    "single_rank": "ranks",
    "compiled_library": "kernels",
    "kernels": "kernels",
    "literals_library": "literals",
    "sanitized_literals": "sanitized",
}


def pytest_collection_finish() -> None:
    _forget_what_stays()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:  # frameworks that a file's tests import are as large again
        _forget_what_stays()


def _forget_what_stays() -> None:
    """Let the garbage collector forget half a million objects that stay: it is called often, also by the tests.

    A test that calls `gc.unfreeze` brings them all back, for itself and those after it.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = {item.nodeid for item in items}
    for item in items:
        # CI has Ceph, which the same requests go to; what is quick, in `make test`, runs on moto
        is_on_both = "moto" in item.nodeid and item.nodeid.replace("moto", "ceph") in names
        if is_on_both and item.get_closest_marker("ci") is not None:
            item.add_marker(pytest.mark.slow)
        for group in {_GROUPS[name] for name in getattr(item, "fixturenames", ()) if name in _GROUPS}:
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def keyboard_interrupts() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where tests run in the background of a script and inherit it ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


class _Lost(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture(autouse=True)
def like_a_new_process() -> Iterator[None]:
    """Let no test find what the saves of another one kept for the process."""
    yield
    forget_all()


@pytest.fixture(autouse=True)
def lost_warnings() -> Iterator[list[str]]:
    """Fail a test that is warned of a GPU unexpectedly: as warnings are errors in tests, these are only logged."""
    lost, logger = _Lost(), logging.getLogger(notices.__name__)
    logger.addHandler(lost)
    yield lost.messages
    logger.removeHandler(lost)
    assert not lost.messages, lost.messages


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        _make_puts_atomic(patch)
        server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
        server.stop()


def _make_puts_atomic(patch: pytest.MonkeyPatch) -> None:
    """Let one object at a time be put: moto looks for the object and puts it in two steps, for several clients at once.

    On a busy machine two publishers that must not overwrite each other both won there. No real server does that.
    """
    from moto.s3.responses import S3Response

    put, lock = S3Response.put_object, threading.Lock()

    def one_at_a_time(response: Any) -> Any:
        with lock:
            return put(response)

    patch.setattr(S3Response, "put_object", one_at_a_time)


@pytest.fixture
def s3_store(moto_endpoint: str) -> Iterator[S3Store]:
    yield from _fresh_bucket({"endpoint_url": moto_endpoint, "key": "ci", "secret": "cisecret"})


@pytest.fixture
def real_s3_store() -> Iterator[S3Store]:
    endpoint = os.environ.get("DCP_NVCOMP_TEST_S3")
    if not endpoint:
        pytest.skip("DCP_NVCOMP_TEST_S3 names no S3 server (.ci/ceph_up.sh starts one)")
    key = os.environ.get("DCP_NVCOMP_TEST_S3_KEY", "ci")
    secret = os.environ.get("DCP_NVCOMP_TEST_S3_SECRET", "cisecret")
    yield from _fresh_bucket({"endpoint_url": endpoint, "key": key, "secret": secret})


@pytest.fixture(params=["moto", "real"])
def any_s3_store(request: pytest.FixtureRequest) -> S3Store:
    store: S3Store = request.getfixturevalue("s3_store" if request.param == "moto" else "real_s3_store")
    return store


@pytest.fixture
def azure_store() -> Iterator[S3Store]:
    text = os.environ.get("DCP_NVCOMP_TEST_AZURE")
    if not text:
        pytest.skip("DCP_NVCOMP_TEST_AZURE is no connection string (.ci/azurite_up.sh starts a server)")
    from azure.storage.blob import BlobServiceClient

    container = f"dcp-nvcomp-{uuid.uuid4().hex[:12]}"
    with BlobServiceClient.from_connection_string(text) as service:
        service.create_container(container)
        yield f"az://{container}/run", {"connection_string": text}
        service.delete_container(container)


@pytest.fixture(scope="session")
def kind_named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KindNamed]:
    """Return the kind of storage of a name, which lives from its first use to the end of the worker."""
    running: dict[str, Any] = {}

    def named(name: str) -> Any:
        if name not in running:
            running[name] = open_kind(name, request, tmp_path_factory.mktemp(name))
        return running[name]

    yield named
    for kind in running.values():
        kind.stop()


def _fresh_place(server: Server) -> Iterator[S3Store]:
    url, options = server.place("run")
    yield url, options
    server.remove(url)


@pytest.fixture(scope="session")
def gcs_server(kind_named: KindNamed) -> GcsServer:
    server: GcsServer = kind_named("gcs")
    return server


@pytest.fixture
def gcs_store(gcs_server: GcsServer) -> Iterator[S3Store]:
    yield from _fresh_place(gcs_server)


@pytest.fixture(scope="session")
def sftp_server(kind_named: KindNamed) -> SftpServer:
    server: SftpServer = kind_named("sftp")
    return server


@pytest.fixture
def sftp_store(sftp_server: SftpServer) -> Iterator[S3Store]:
    yield from _fresh_place(sftp_server)


@pytest.fixture(scope="session")
def smb_server(kind_named: KindNamed) -> SmbServer:
    server: SmbServer = kind_named("smb")
    return server


@pytest.fixture
def smb_store(smb_server: SmbServer) -> Iterator[S3Store]:
    yield from _fresh_place(smb_server)


def _fresh_bucket(options: dict[str, Any]) -> Iterator[S3Store]:
    import s3fs

    fs = s3fs.S3FileSystem(**options, use_listings_cache=False)
    bucket = f"dcp-nvcomp-{uuid.uuid4().hex[:12]}"
    fs.mkdir(bucket)
    yield f"s3://{bucket}/run", dict(options)
    fs.clear_multipart_uploads(bucket)
    for found in fs.find(bucket):
        fs.rm_file(found)
    fs.rmdir(bucket)
