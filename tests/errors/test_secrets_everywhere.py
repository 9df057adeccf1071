"""A marked password and a marked token go through everything that says something; nothing repeats them."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompReader, NvcompWriter, tools
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.runs import clean_run
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import save
from tests.cli.checkpoints import run
from tests.storage.plain import carry_out, hooked

PASSWORD, TOKEN = "pa55w0rd", "t0k3n-t0k3n"
OPTIONS = {"token": TOKEN}


class Listener(logging.Handler):
    """Keeps what is logged, but for the requests that S3's client logs in full when it is debugged."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []
        self.setFormatter(logging.Formatter("%(name)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if "boto" not in record.name:
            self.said.append(self.format(record))


@contextlib.contextmanager
def nothing_tells(*words: str) -> Iterator[list[str]]:
    """Gather all that is logged or warned of, and what a test adds; in the end no secret may be in it."""
    listener, root = Listener(), logging.getLogger()
    level = root.level
    root.addHandler(listener)
    root.setLevel(logging.DEBUG)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield listener.said
    root.removeHandler(listener)
    root.setLevel(level)
    everything = "\n".join([*listener.said, *(str(one.message) for one in caught)])
    assert everything
    for word in words:
        for form in {word, quote(word, safe=""), quote(word)}:
            at = everything.find(form)
            assert at < 0, everything[max(0, at - 1500) : at + 100]


@pytest.fixture
def said() -> Iterator[list[str]]:
    with nothing_tells(PASSWORD, TOKEN) as said:
        yield said


@pytest.fixture(params=["", "simplecache::"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}plainlogin://user:{PASSWORD}@host{tmp_path}/c?sig={TOKEN}"


@pytest.fixture
def plain_url(tmp_path: Path) -> str:
    return f"plainlogin://user:{PASSWORD}@host{tmp_path}/c"


def state() -> dict[str, Any]:
    return {"w": torch.arange(1000.0), "step": 3}


def what_is_said(work: Callable[[], object]) -> str:
    """Return what a user sees of an error: its traceback with all its causes, and its parts."""
    try:
        work()
    except BaseException as error:  # DCP's CheckpointException is no Exception
        parts = [*traceback.format_exception(error), repr(error), str(error)]
        if isinstance(error, CheckpointError):
            parts += [repr(vars(error)), repr(error.args)]
        return "\n".join(parts)
    raise AssertionError("nothing was raised")


def broken(name: str, call: Any, *arguments: Any) -> Any:
    """A client that quotes everything it knows."""
    raise OSError(errno.EIO, f"plainlogin://user:{PASSWORD}@host refused {PASSWORD!r} and {TOKEN}", f"x?sig={TOKEN}")


def test_a_save_and_a_load(plain_url: str, tmp_path: Path, said: list[str]) -> None:
    writer = save(plain_url, state(), engine="cpu", **OPTIONS)
    reader = NvcompReader(plain_url, **OPTIONS)
    into = state()
    into["w"].zero_()
    dcp.load(into, storage_reader=reader, no_dist=True)
    assert torch.equal(into["w"], state()["w"])
    assert writer.last_save is not None
    said += [str(writer.last_save), repr(writer.last_save), repr(writer), repr(reader), repr(writer.storage_meta())]
    said += [writer.checkpoint_id, reader.checkpoint_id]
    metadata = reader.read_metadata()
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == f"plainlogin://user:***@host{tmp_path}/c"
    for file in (tmp_path / "c").iterdir():
        said.append(file.read_bytes().decode("latin-1"))
    assert len(said) > 10


@pytest.mark.parametrize("fails", [True, False], ids=["failing", "nothing there"])
def test_failing_calls(url: str, said: list[str], fails: bool) -> None:
    reads: list[Callable[[], object]] = [
        lambda: NvcompReader(url, **OPTIONS).read_metadata(),
        lambda: dcp.load(state(), storage_reader=NvcompReader(url, **OPTIONS), no_dist=True),
    ]
    others: list[Callable[[], object]] = [
        lambda: tools.verify(url, storage_options=OPTIONS),
        lambda: tools.recover(url, storage_options=OPTIONS),
        lambda: clean_run(url, storage_options=OPTIONS),
    ]
    if not fails:
        said += [what_is_said(work) for work in (*reads, *others)]
        return
    with hooked(broken):
        said += [what_is_said(work) for work in (lambda: save(url, state(), engine="cpu", **OPTIONS), *reads)]
    assert all("EIO" in text or "Errno 5" in text for text in said if "Error" in text)


@pytest.mark.parametrize("name", ["create", "write", "close", "mv", "rm"])
def test_one_failing_call(plain_url: str, said: list[str], name: str) -> None:
    """Warnings too: of what could not be cleaned up after it."""
    moves: list[str] = []

    def hook(now: str, call: Any, *arguments: Any) -> Any:
        if now == "mv":
            moves.append(now)
        first = moves == ["mv"] and now == "mv"  # if that fails, files are written in place instead
        return broken(now, call) if now in (name, "rm") and not first else carry_out(now, call, *arguments)

    save(plain_url, state(), engine="cpu", **OPTIONS)
    with hooked(hook):
        said.append(
            what_is_said(lambda: save(plain_url, state(), engine="cpu", **OPTIONS))
            if name != "rm"
            else repr(save(plain_url, state(), engine="cpu", **OPTIONS))
        )
    assert any("***" in text for text in said)


def test_ranks_that_disagree(plain_url: str, tmp_path: Path, said: list[str]) -> None:
    """The key and the path are added to the error on its way up."""
    for place, count in (("c", 10), ("d", 11)):
        writer = NvcompWriter(plain_url[:-1] + place, engine="cpu", **OPTIONS)
        dcp.save({"w": torch.arange(float(count))}, storage_writer=writer, use_collectives=False)
    (tmp_path / "d" / "__0.metadata").rename(tmp_path / "c" / "__1.metadata")
    said.append(what_is_said(NvcompReader(plain_url, **OPTIONS).read_metadata))
    assert "rank 1 saved" in said[-1]
    said.append(repr(tools.verify(plain_url, storage_options=OPTIONS)))


@pytest.mark.parametrize(
    "options",
    [
        {"passwort": PASSWORD},
        {"default_block_size": 3, "token": TOKEN},
        {"thread_count": 0, "password": PASSWORD},
        {"storage_deadline_seconds": -1, "password": PASSWORD},
    ],
)
def test_options_that_cannot_work(plain_url: str, said: list[str], options: dict[str, Any]) -> None:
    said.append(what_is_said(lambda: NvcompWriter(plain_url, **options)))


@pytest.mark.parametrize("protocol", ["nosuch", "s3", "simplecache::nosuch", "memory", "file"])
def test_other_protocols(protocol: str, said: list[str], tmp_path: Path) -> None:
    wrong = {"whatever": PASSWORD, "secret": PASSWORD, "endpoint_url": f"no-url:{PASSWORD}"}
    url = f"{protocol}://user:{PASSWORD}@host{tmp_path}/c?sig={TOKEN}"
    said.append(what_is_said(lambda: open_filesystem(url, storage_options=wrong)))


def test_an_endpoint_that_holds_a_password(said: list[str]) -> None:
    options = {"endpoint_url": f"http://user:{PASSWORD}@127.0.0.1:1", "key": "x", "secret": TOKEN}
    reader = NvcompReader("s3://bucket/run", storage_deadline_seconds=0.5, **options)
    said += [what_is_said(reader.read_metadata), repr(reader)]


def test_commands(plain_url: str, tmp_path: Path, said: list[str]) -> None:
    save(plain_url, state(), engine="cpu", **OPTIONS)
    commands = [("inspect",), ("verify",), ("verify", "--full"), ("clean",), ("clean", "--recursive")]
    for command in commands:
        for form in ((), ("--json",)):
            status, output, errors = run(*command, plain_url, "-o", f"token={TOKEN}", *form)
            assert (status, errors) == (0, "")
            assert not form or json.loads(output)
            said.append(output)
    os.unlink(tmp_path / "c" / ".metadata")
    for command in (*commands, ("recover",)):
        said += map(str, run(*command, plain_url, "-o", f"token={TOKEN}"))
    next((tmp_path / "c").glob("*.distcp")).write_bytes(b"short")
    for command in (*commands, ("recover",)):
        said += map(str, run(*command, plain_url, "-o", f"token={TOKEN}"))
    with hooked(broken):
        for command in (*commands, ("recover",)):
            status, output, errors = run(*command, plain_url, "-o", f"token={TOKEN}")
            assert (status, output, errors.count("\n")) == (1, "", 1)
            said.append(errors)
    for bad in (f"-{PASSWORD}=x", PASSWORD, f"pass-word={PASSWORD}"):
        status, output, errors = run("inspect", plain_url, "-o", bad)
        assert status == 2 and "KEY=VALUE" in errors
        if not bad.startswith("-"):
            said += [output, errors]
