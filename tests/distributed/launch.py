"""A small pool of processes for tests that need ranks.

`import torch` costs seconds, a gloo process group milliseconds. So the processes are started once for the whole session
and each call sets up a fresh default process group among as many of them as it asks for:

    def save_shards(path):                    # a plain function at the top of a test module
        ...
        return dist.get_rank()

    def test_save(ranks, tmp_path):           # `ranks` is the fixture below: import it into the module
        assert ranks.run(save_shards, tmp_path, world_size=3) == [0, 1, 2]

Arguments and results travel by pickle, functions by name. `run` returns what each rank returned, in rank order, and
raises `RankFailure` with every rank's traceback where one of them raised. A call that does not end in time ends the
processes, each after it has printed where it was, and the next call starts new ones. Warnings are errors on the ranks
too, except those that stock DCP or torch raises by design (`STOCK_WARNINGS`).
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

RANK_COUNT = 4
MEETING_ATTEMPTS = 3
MEETING_TIMEOUT_S = 60.0
START_TIMEOUT_S = 240.0

# What torch itself warns of in code paths that these tests take on purpose: regular expressions of messages.
STOCK_WARNINGS = (
    r"torch\.distributed is (disabled|unavailable)",  # dcp without a process group
    r"Detected an existing checkpoint in",  # stock writer over an earlier checkpoint
    r"ComplexHalf support is experimental",  # any use of torch.complex32
    r"`_get_pg_default_device` will be deprecated",  # a meta tensor as destination
    r"Multiple backends are registered with this ProcessGroup",  # the same
    r"TypedStorage is deprecated",  # inside torch.save of some subclasses
    r"Please use DTensor instead and we are deprecating ShardedTensor",
    r"FSDP is switching to use DTensor",  # FSDP1's state dict
    r"FSDP\.state_dict_type\(\) and FSDP\.set_state_dict_type\(\) are being deprecated",
)


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not end in time."""


class RankPool:
    """`size` processes that wait for functions to run as ranks of a gloo process group."""

    def __init__(self, size: int, directory: str | os.PathLike[str], *, grace_s: float = 30.0) -> None:
        self.size = size
        self.grace_s = grace_s
        self._directory = Path(directory)
        self._workers: list[_Worker] = []
        self._call_count = 0

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        world_size: int | None = None,
        timeout_s: float = 200.0,
        **options: Any,
    ) -> list[Any]:
        """Run `function(*arguments, **options)` on ranks 0 to `world_size`, and return their results in rank order."""
        world_size = self.size if world_size is None else world_size
        assert 1 <= world_size <= self.size, world_size
        payload = pickle.dumps((function, arguments, options))
        meeting_point = self._meet(world_size, timeout_s)
        for worker in self._workers[:world_size]:
            worker.connection.send(payload)
        try:
            return self._gather(world_size, timeout_s)
        finally:
            meeting_point.unlink(missing_ok=True)  # not before: sub-groups meet there too

    def _meet(self, world_size: int, timeout_s: float) -> Path:
        """Set up the process group. Gloo sometimes fails to connect local ranks: then again with new processes.

        Nothing of the test has run on any rank by then.
        """
        failure: RankFailure | None = None
        for _ in range(MEETING_ATTEMPTS):
            if not self._workers:
                self._workers = [_Worker() for _ in range(self.size)]
                for worker in self._workers:
                    worker.wait()
            self._call_count += 1
            meeting_point = self._directory / f"call-{os.getpid()}-{self._call_count}"
            for rank, worker in enumerate(self._workers[:world_size]):
                worker.connection.send((rank, world_size, str(meeting_point), timeout_s))
            try:
                self._gather(world_size, MEETING_TIMEOUT_S)
            except RankFailure as error:
                failure = error
                self.close()
                meeting_point.unlink(missing_ok=True)
            else:
                return meeting_point
        assert failure is not None
        raise failure

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def _gather(self, world_size: int, timeout_s: float) -> list[Any]:
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:world_size])}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting:
            limit_s = self.grace_s if failures else timeout_s + 5.0
            ready = multiprocessing.connection.wait(list(waiting), timeout=limit_s)
            if not ready:
                failures.update(dict.fromkeys(waiting.values(), "did not end in time"))
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, value = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    succeeded, value = False, "died"
                    self._workers[rank].died = True
                (results if succeeded else failures)[rank] = value
        if waiting or any(worker.died for worker in self._workers):
            self.close()
        if failures:
            raise RankFailure("\n".join(f"--- rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [results[rank] for rank in range(world_size)]


class _Worker:
    """One process of a pool and the pipe to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, child_end = context.Pipe()
        # Not a daemon: those may not have children, and the process checkpointer is one.
        self.process = context.Process(target=_serve, args=(child_end,), daemon=False)
        self.process.start()
        child_end.close()
        self.died = False

    def wait(self) -> None:
        """Return when the process has imported torch, which takes long on a busy machine."""
        if not self.connection.poll(START_TIMEOUT_S) or self.connection.recv() != "ready":
            raise RankFailure("a rank's process did not start")

    def stop(self) -> None:
        self.connection.close()
        self.process.join(timeout=1.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(connection: multiprocessing.connection.Connection) -> None:
    # The loopback interface is the only one that every machine has.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    import torch
    import torch.distributed.checkpoint

    torch.set_num_threads(1)
    gc.freeze()  # otherwise the collection after each call goes through all that torch and DCP import
    # A destroyed process group in a cycle hangs or crashes the forked child that collects it.
    os.register_at_fork(after_in_child=gc.freeze)
    connection.send("ready")
    while True:
        try:
            rank, world_size, meeting_point, timeout_s = connection.recv()
            met = _answer(connection, timeout_s, lambda: _join(rank, world_size, meeting_point, timeout_s))
            if met:
                payload = connection.recv()
                _answer(connection, timeout_s, lambda: _call(payload))
        except EOFError:  # the pool was closed, or the test run is gone
            return


def _answer(connection: multiprocessing.connection.Connection, timeout_s: float, work: Callable[[], Any]) -> bool:
    """Do some work and send what it returns, or the traceback; whether it succeeded."""
    # The traceback that this prints says where a rank hung.
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        succeeded, message = True, pickle.dumps((True, work()))
    except BaseException:
        succeeded, message = False, pickle.dumps((False, traceback.format_exc()))
    finally:
        faulthandler.cancel_dump_traceback_later()
    connection.send_bytes(message)
    return succeeded


def _join(rank: int, world_size: int, meeting_point: str, timeout_s: float) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting_point}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def _call(payload: bytes) -> Any:
    import torch.distributed as dist

    try:
        function, arguments, options = pickle.loads(payload)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for message in STOCK_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            return function(*arguments, **options)
    finally:
        dist.destroy_process_group()
        gc.collect()  # groups in cycles keep their sockets and threads


def end_of_child(work: Callable[[], object]) -> int | None:
    """Fork, as a data loader with workers does, and return how that ended.

    7; 1 if `work` raised; minus the number of the signal that ended the child; None if it hung.
    """
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(7)
        except BaseException:
            traceback.print_exc()
        finally:  # a child whose work fails must not go on as a rank
            os._exit(1)
    for _ in range(1000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """Collect what the package logs on a rank."""
    lines: list[str] = []
    logger, handler = logging.getLogger("dcp_nvcomp"), logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(before)


_POOL = pytest.StashKey[RankPool]()


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> RankPool:
    """The session's pool of four ranks, started by the first test that runs something on it."""
    stash = request.config.stash
    if _POOL not in stash:
        directory = tempfile.TemporaryDirectory(prefix="ranks-")
        stash[_POOL] = RankPool(RANK_COUNT, directory.name)
        request.config.add_cleanup(directory.cleanup)
        request.config.add_cleanup(stash[_POOL].close)
    return stash[_POOL]


@pytest.fixture(scope="module")
def single_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A pool of one process of its own, for tests that leave something behind in the process."""
    pool = RankPool(1, tmp_path_factory.mktemp("single-rank"))
    yield pool
    pool.close()
