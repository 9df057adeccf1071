"""A part of `stores`: SFTP and SMB, compared with `scp` and `smbclient` of the same files.

    state --save--> server          dcp_nvcomp
    its files: client -> server     dcp_nvcomp, the files alone; scp or smbclient
               server -> client

The servers are those of the tests, with their files in memory, so that no disk is measured.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import Case, NotHere, alternate, core_count, paired
from benchmarks.peers import load, ours, save
from benchmarks.results import Report, Table
from benchmarks.states import State, assert_same, destination
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.servers.base import Server
from tests.servers.sftp import SftpServer
from tests.servers.smb import SmbServer

__all__ = ["FILE_SERVERS", "compare", "read_files", "write_files"]

_MOST_SECONDS_OF_TOOL = 1.2  # what may be spent, times what the tool spends


@dataclass(frozen=True)
class Tool:
    """A program that copies files to and from a server.

    Attributes:
        name: the program.
        up: copies the files of a local directory into a directory of the server.
        down: copies them back.
    """

    name: str
    up: Callable[[Path, str], None]
    down: Callable[[str, Path], None]


def _scp(server: SftpServer) -> Tool:
    options = ["-q", "-B", "-P", str(server.port), "-i", str(server.key)]
    options += ["-o", f"UserKnownHostsFile={server.known_hosts}", "-o", "IdentityAgent=none"]

    def remote(url: str) -> str:
        return f"{server.user}@127.0.0.1:{server.folder(url)}"

    def up(source: Path, url: str) -> None:
        _call(["scp", *options, *map(str, sorted(source.iterdir())), remote(url)])

    def down(url: str, target: Path) -> None:
        _call(["scp", *options, f"{remote(url)}/*", str(target)])

    return Tool("scp", up, down)


def _smbclient(server: SmbServer) -> Tool:
    def call(url: str, local: Path, command: str) -> None:
        inside = url.split("/", 4)[4].replace("/", "\\")
        # signed, as what we send is
        login = ["-p", str(server.port), "-U", f"{server.user}%{server.password}", "--client-protection=sign"]
        script = f'cd "{inside}"; lcd "{local}"; prompt OFF; {command} *'
        _call(["smbclient", f"//127.0.0.1/{server.share}", *login, "-c", script])

    return Tool(
        "smbclient",
        lambda source, url: call(url, source, "mput"),
        lambda url, target: call(url, target, "mget"),
    )


def _call(command: list[str]) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


FILE_SERVERS: dict[str, tuple[str, Any, Any]] = {
    "sftp": ("SFTP (OpenSSH)", SftpServer, _scp),
    "smb": ("SMB (Samba)", SmbServer, _smbclient),
}


def compare(report: Report, table: Table, name: str, state: State) -> None:
    """Measure one kind of server, and add its rows to the table."""
    words, made, tool_of = FILE_SERVERS[name]
    if missing := made.missing():
        raise NotHere(missing)
    with report.settings.scratch() as scratch, _started(made(scratch / "server")) as server:
        _compare(report, table, words, server, tool_of(server), state, scratch)


@contextmanager
def _started(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _compare(report: Report, table: Table, words: str, server: Any, tool: Tool, state: State, scratch: Path) -> None:
    settings, threads = report.settings, core_count()
    repeats = settings.repeats_or(5)
    settings.say(f"{words}: save and load, {repeats} times each")
    url, options = server.place("saved")
    copied_url, _ = server.place("copied")
    peer = ours(threads, **options)
    save(peer, url, state)
    into = destination(state)
    load(peer, url, into)
    assert_same(into, state, peer.name)
    local, back = scratch / "local", scratch / "back"
    for folder in (local, back, server.folder(copied_url)):
        folder.mkdir(parents=True)
    for file in server.folder(url).glob("*.distcp"):
        (local / file.name).write_bytes(file.read_bytes())
    contents = {file.name: file.read_bytes() for file in sorted(local.iterdir())}
    nbytes = sum(map(len, contents.values()))

    def copies() -> Filesystem:
        return open_filesystem(copied_url, storage_options=options)  # logs in anew, as the tool does

    def empty(folder: Path) -> None:
        for file in folder.iterdir():
            file.unlink()

    def clear() -> None:
        filesystem = open_filesystem(url, storage_options=options)
        filesystem.remove(filesystem.list_names())

    def remove_copies() -> None:
        empty(server.folder(copied_url))

    files_alone = f"{peer.name}, the files alone"
    saves = {
        peer.name: Case(lambda: save(peer, url, state), before=clear),
        files_alone: Case(lambda: write_files(copies(), contents), before=remove_copies),
        tool.name: Case(lambda: tool.up(local, copied_url), before=remove_copies),
    }
    saved = alternate(saves, repeats=repeats)
    buffers = {name: bytearray(len(data)) for name, data in contents.items()}
    remove_copies()
    write_files(copies(), contents)
    loads = {
        peer.name: Case(lambda: load(peer, url, into)),
        files_alone: Case(lambda: read_files(copies(), buffers)),
        tool.name: Case(lambda: tool.down(copied_url, back), before=lambda: empty(back)),
    }
    loaded = alternate(loads, repeats=repeats)
    assert buffers == contents
    assert all((back / name).read_bytes() == data for name, data in contents.items())
    for writer in saves:
        table.add(
            store=words,
            writer=writer,
            stored=nbytes / 1e6,
            save_seconds=saved[writer],
            load_seconds=loaded[writer],
            save_speedup=paired(saved[tool.name], saved[writer]),
            load_speedup=paired(loaded[tool.name], loaded[writer]),
        )
    for what, seconds in (("to the server", saved), ("back", loaded)):
        spent = paired(seconds[files_alone], seconds[tool.name]).median
        report.at_most(f"{words}: seconds for the files {what}, over {tool.name}'s", spent, _MOST_SECONDS_OF_TOOL)


def write_files(filesystem: Filesystem, contents: dict[str, bytes]) -> None:
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


def read_files(filesystem: Filesystem, buffers: dict[str, bytearray]) -> None:
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
