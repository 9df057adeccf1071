"""What each kind of storage promises, how it keeps it, and by which test: the table in docs/reliability.md.

A cell is a link to its test's file; the link's title is the test. tests/stores/test_promises.py makes sure that each is
there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# The columns, and what their tests have in brackets.
COLUMNS: Final = {
    "local disk": "disk",
    "NFS, Lustre, ... (mounted)": "mounted",
    "S3": "ceph",
    "Azure Blob": "azure",
    "Google Cloud": "gcs",
    "SFTP": "sftp",
    "SMB": "smb",
    "others, by fsspec": "ftp",
}
_STORES: Final = "tests/stores/"
_NOTHING: Final = "-"
_LOCAL: Final = {"disk": _NOTHING, "mounted": _NOTHING}
_FORGOT: Final = "tests/storage/test_file_servers.py::test_a_server_that_forgot_what_it_had_confirmed[{}-removed]"


@dataclass(frozen=True)
class Cell:
    """How one kind of storage keeps one promise."""

    words: str  # how; "-" if it has no such thing, and no test
    test: str | None = None  # instead of the promise's, as pytest names it


@dataclass(frozen=True)
class Promise:
    """One row."""

    words: str  # what is promised
    test: str  # what pytest calls the test of all kinds, with `{}` for the kind
    cells: dict[str, Cell | str] = field(default_factory=dict)  # by `COLUMNS`' values
    usual: str = ""  # the words of cells that are not named

    def cell(self, kind: str) -> Cell:
        """Return what one kind of storage says to it."""
        found = self.cells.get(kind, self.usual)
        cell = found if isinstance(found, Cell) else Cell(found)
        if cell.test or cell.words == _NOTHING:
            return cell
        test = self.test.format(kind)
        return Cell(cell.words, test if test.startswith("tests/") else f"{_STORES}{test}")


PROMISES: Final = (
    Promise(
        "The bits that were saved, or an error",
        "test_scenarios.py::test_verify[{}]",
        usual="CRC of each block",
    ),
    Promise(
        "A call that fails harms no checkpoint, and nor does one that was done but is reported as failed",
        "test_each_call.py::test_a_call_fails[{}-answer lost]",
        {
            "disk": "rename, fsync",
            "mounted": "rename, fsync",
            "ceph": "one PUT, If-Match",
            "azure": "one PUT, If-Match",
            "gcs": "one PUT, ifGenerationMatch",
            "sftp": "fsync, posix-rename",
            "smb": "flush, rename that replaces",
            "ftp": "the client's move, else aside or in place, with a warning",
        },
    ),
    Promise(
        "A client that is killed at any call leaves the old checkpoint or the new one",
        "test_client_killed.py::test_killed_at_each_call[{}]",
        usual="yes",
        cells={
            "ftp": Cell(
                "yes, or `recover` brings it back",
                "tests/faults/test_plain_fsspec.py::test_killed_while_it_publishes[plain]",
            )
        },
    ),
    Promise(
        "Power loss",
        "",
        {
            "disk": Cell("old or new", "tests/faults/test_power_loss.py::test_power_loss[overwriting]"),
            "sftp": Cell("fsync; what was forgotten is reported", _FORGOT.format("sftp")),
            "smb": Cell("flush; what was forgotten is reported", _FORGOT.format("smb")),
        },
        usual=_NOTHING,
    ),
    Promise(
        "A lost connection fails neither a save nor a load",
        "test_each_call.py::test_a_connection_is_cut[{}-answer lost]",
        usual="repeated",
        cells={**_LOCAL, "sftp": "new login", "smb": "new login", "ftp": _NOTHING},
    ),
    Promise(
        "A server that is killed within a save and started again: the save goes on, or says that it failed",
        "test_server_killed.py::test_it_is_started_again[{}]",
        usual="yes",
        cells={
            **_LOCAL,
            "ceph": Cell(
                "yes", "tests/faults/test_object_store_faults.py::test_a_server_killed_and_restarted_during_a_save"
            ),
            "ftp": Cell("it fails", f"{_STORES}test_scenarios.py::test_an_ftp_server_that_is_killed"),
        },
    ),
    Promise(
        "A dead or silent server is reported within `storage_deadline_seconds`",
        "test_server_killed.py::test_it_stays_away[{}-frozen]",
        usual="yes",
        cells={
            **_LOCAL,
            "ceph": Cell("yes", f"{_STORES}test_server_killed.py::test_it_stays_away[moto-frozen]"),
            "ftp": _NOTHING,
        },
    ),
    Promise(
        "Of two saves that overwrite at once one survives, whole",
        "test_two_writers.py::test_the_survivor_is_one_of_the_two[{}-2]",
        usual="yes",
        cells={"ftp": _NOTHING},
    ),
    Promise(
        "Of several saves with `overwrite=False` exactly one wins",
        "test_two_writers.py::test_one_of_many_wins_without_overwriting[{}]",
        {
            "disk": "link",
            "mounted": "link",
            "ceph": "If-None-Match",
            "azure": "If-None-Match",
            "gcs": "ifGenerationMatch=0",
            "sftp": "rename that refuses",
            "smb": "link",
            "ftp": Cell("looked up before", f"{_STORES}test_scenarios.py::test_without_overwriting[ftp]"),
        },
    ),
    Promise(
        "`clean` removes what was left, by the storage's clock",
        "tests/storage/test_every_filesystem.py::test_sizes_and_ages_are_those_of_the_storage[{}]",
        usual="yes",
        cells={
            "ftp": Cell("this machine's clock, if files have times", f"{_STORES}test_scenarios.py::test_clean[ftp]")
        },
    ),
    Promise(
        "The rights that the docs name suffice, and without them an error says so",
        "test_rights.py::test_who_may_save_saves_over_cleans_and_loads[{}]",
        usual="yes",
        cells={
            "disk": Cell("yes", f"{_STORES}test_rights.py::test_modes_of_a_directory[may write]"),
            "mounted": _NOTHING,
            "ceph": Cell(
                "yes", "tests/faults/test_object_store_faults.py::test_credentials_that_may_neither_list_nor_look[ceph]"
            ),
            "ftp": _NOTHING,
        },
    ),
    Promise(
        "No secret is shown",
        "test_secrets.py::test_what_is_refused_tells_no_secret[{}-password]",
        usual="yes",
        cells={
            **_LOCAL,
            "ceph": Cell("yes", f"{_STORES}test_secrets.py::test_what_works_tells_no_secret[moto-secret]"),
            "azure": Cell("yes", f"{_STORES}test_secrets.py::test_what_is_refused_tells_no_secret[azure-account_key]"),
            "gcs": Cell("yes", f"{_STORES}test_secrets.py::test_what_is_refused_tells_no_secret[gcs-token]"),
            "ftp": Cell("yes", "tests/errors/test_secrets_everywhere.py::test_failing_calls[simplecache::-failing]"),
        },
    ),
)


def tests() -> list[str]:
    """Return all tests that the table names."""
    cells = (promise.cell(kind) for promise in PROMISES for kind in COLUMNS.values())
    return [cell.test for cell in cells if cell.test]


def table() -> str:
    """Return the table as Markdown."""
    lines = [f"| promise | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for promise in PROMISES:
        cells = [_linked(promise.cell(kind)) for kind in COLUMNS.values()]
        lines.append(f"| {promise.words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _linked(cell: Cell) -> str:
    if cell.test is None:
        return cell.words
    file, _, name = cell.test.partition("::")
    return f'[{cell.words}](../{file} "{name}")'
