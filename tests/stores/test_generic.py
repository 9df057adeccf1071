"""The generic way, through fsspec alone: FTP, `memory://`, `dir://`, chained URLs, and what HDFS's clients are like.

No retries, no deadline and no condition of ours here: a save that fails leaves the earlier checkpoint, and tells.
tests/faults/test_plain_fsspec.py has every call of such file systems fail, on stand-ins for WebHDFS, Arrow's HDFS, DBFS
and others; HDFS itself needs a cluster.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import (
    CheckpointManager,
    Keep,
    NvcompReader,
    async_save,
    errors,
    list_run,
    recover_checkpoint,
    verify_checkpoint,
)
from dcp_nvcomp.maintenance.recovery import RECOVERED
from tests.effort import sampled
from tests.servers.ftp import FtpServer
from tests.states import assert_same
from tests.storage.plain import PROTOCOLS

from .calls import Counted, FailingOnce, interposed
from .places import Place

pytestmark = pytest.mark.filterwarnings("ignore:.*can't replace a file in one step")


@pytest.fixture(scope="session")
def ftp_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FtpServer]:
    missing = FtpServer.missing()
    if missing:
        pytest.skip(missing)
    server = FtpServer(tmp_path_factory.mktemp("ftp"))
    server.start()
    yield server
    server.stop()


def _in_memory() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


# The URLs that need nothing, each from a directory.
_URLS: dict[str, Callable[[Path], str]] = {
    "memory": lambda folder: _in_memory(),
    "dir": lambda folder: f"dir://run::file://{folder}",
    "simplecache-memory": lambda folder: f"simplecache::{_in_memory()}",
    **{protocol: lambda folder, protocol=protocol: f"{protocol}://{folder}/run" for protocol in PROTOCOLS},
}


@pytest.fixture(params=["ftp", *_URLS])
def generic(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """A place that fsspec reaches and no storage of ours knows."""
    if request.param != "ftp":
        yield Place(_URLS[request.param](tmp_path), {})
        store = fsspec.filesystem("memory")
        if "memory" in request.param and store.exists("/"):
            store.rm("/", recursive=True)
        return
    server: FtpServer = request.getfixturevalue("ftp_server")
    url, options = server.place("run")
    yield Place(url, options)
    server.remove(url)


def test_save_overwrite_load_verify_recover(generic: Place) -> None:
    writer = generic.writer()
    for number in (1, 2):
        assert generic.save(number, writer) is None
        assert generic.loaded() == number
    assert generic.save(3) is None
    assert generic.loaded(verify="full") == 3
    assert len(generic.names()) == 3 and generic.left() == set()
    assert verify_checkpoint(generic.url, full=True).is_sound
    assert isinstance(generic.save(4, generic.writer(overwrite=False)), errors.CheckpointExistsError)
    generic.filesystem().remove([".metadata"])
    with pytest.raises(errors.IncompleteCheckpointError, match="recover"):
        NvcompReader(generic.url).read_metadata()
    assert recover_checkpoint(generic.url).outcome == RECOVERED
    assert generic.loaded() == 3


def test_damage(generic: Place) -> None:
    assert generic.save(1) is None
    filesystem = generic.filesystem()
    (name,) = [name for name in filesystem.list_names() if name.endswith(".distcp")]
    damaged = bytearray(filesystem.read_all(name, limit_nbytes=1 << 24))
    damaged[5000] ^= 1
    filesystem.remove([name])
    stream = filesystem.open_output(name)
    stream.write(bytes(damaged))
    stream.close()
    with pytest.raises(dcp.CheckpointException, match="CRC"):
        generic.loaded()


def test_large_files_by_several_threads(generic: Place) -> None:
    large = Place(generic.url, {}, nbytes=20_000_000)
    for number in (1, 2):
        writer = large.writer(thread_count=2, single_file_per_rank=False)
        assert large.save(number, writer) is None
        assert large.loaded(thread_count=2) == number


def test_async_save(generic: Place) -> None:
    state = generic.state(1)
    saving = async_save(state, generic.url)
    state["w"].zero_()
    saving.upload_completion.result(timeout=120)
    assert generic.loaded() == 1


@pytest.mark.ci
@pytest.mark.parametrize("done", [False, True], ids=["not done", "answer lost"])
def test_a_call_fails(generic: Place, done: bool) -> None:
    writer = generic.writer()
    assert generic.save(1, writer) is None
    counted = Counted()
    with interposed(counted):
        assert generic.save(2, writer) is None
    number = 2
    for at in sampled(range(len(counted.names)), 3):
        number += 2
        failing = FailingOnce(at, done=done)
        with interposed(failing):
            error = generic.save(number - 1, writer)
        where = f"call {at}, {counted.names[at]}: {error}"
        assert generic.loaded() == (number - 1 if error is None else number - 2), where
        assert generic.save(number, writer) is None, where
        assert generic.loaded() == number, where
        if hasattr(failing.lost, "abort"):  # a stream: simplecache's warns when it is collected and still open
            failing.lost.abort()


def test_clean(generic: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generic.save(1) is None
    filesystem, name = generic.filesystem(), f"__0_0_{uuid.uuid4().hex}.distcp"
    stream = filesystem.open_output(name)
    stream.write(bytes(1000))
    stream.close()
    assert [orphan.name for orphan in generic.clean(monkeypatch).orphans] == [name]
    assert generic.left() == set() and generic.loaded() == 1


@pytest.mark.parametrize("generic", ["ftp", "memory", "plain-moving"], indirect=True)
def test_a_run(generic: Place) -> None:
    with CheckpointManager(generic.url, every=1, keep=Keep(last=2), run_id="job") as manager:
        for step in (1, 2, 3):
            manager.save(step, generic.state(step))
        manager.wait()
    assert [step.step for step in list_run(generic.url).steps] == [2, 3]
    state: dict[str, Any] = generic.state(0)
    with CheckpointManager(generic.url, run_id="job") as manager:
        restored = manager.restore(state)
    assert restored is not None and restored.step == 3
    assert_same(state, generic.state(3))


def test_a_chain_that_keeps_whole_files_reads_what_it_first_read(tmp_path: Path) -> None:
    """Of a path that is overwritten it gives the earlier checkpoint, whole: for paths that are written once."""
    plain, cached = Place(str(tmp_path / "run"), {}), Place(f"simplecache::file://{tmp_path}/run", {})
    assert cached.save(1) is None
    assert cached.loaded() == plain.loaded() == 1
    assert cached.save(2) is None
    assert plain.loaded() == 2 and cached.loaded() in (1, 2)


def test_an_ftp_server_that_is_killed(ftp_server: FtpServer) -> None:
    """Its client can't connect again: the save fails, and the next one of another process goes through."""
    url, options = ftp_server.place("run")
    place = Place(url, options)
    assert place.save(1) is None
    writer = place.writer()
    ftp_server.kill()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        error = place.save(2, writer)
    assert isinstance(error, errors.CheckpointError), error
    ftp_server.start()
    assert place.loaded() == 1
    assert place.save(3) is None and place.loaded() == 3
