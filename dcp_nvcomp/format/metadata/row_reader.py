"""Reads the rows of storage_data that rows.py writes, all at once; one by one they are thirty opcodes each.

Rows are recognised and not trusted. The first is read opcode by opcode; the others are rows as far as all their bytes
that are no numbers are those of the first. Numbers are memo slots, of which each is looked at, hints and records. What
is not recognised is left to the pickle machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from dcp_nvcomp.errors import MetadataError
from dcp_nvcomp.format.metadata.allowed_globals import INDEX, Global, shown
from dcp_nvcomp.format.metadata.values import check_hashes

# What a row has before its numbers; a slot of two bytes each stands where there is a question mark.
_BEGIN: Final = b"h?)\x81}(h?j"
_HINT: Final = {b"h?M": "<u2", b"h?J": "<i4"}
_NO_HINT: Final = b"h?N"
_OFFSET: Final = b"h?j"
_FILE: Final = b"ubj"
_RECORD: Final = {b"M": "<u2", b"J": "<i4"}
_END: Final = b"\x86"
_FEWEST: Final = 16  # rows; fewer are as quick one by one


class PickledRows:
    """Rows of storage_data: the numbers of each column, and of memo slots the distinct values that these number."""

    __slots__ = ("numbers", "values")

    def __init__(self) -> None:
        self.values: dict[str, list[Any]] = {}
        self.numbers: dict[str, npt.NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self.numbers["record"])

    @property
    def nbytes(self) -> int:
        """What it takes in memory, with what is made of it."""
        return 3 * sum(numbers.nbytes for numbers in self.numbers.values())


def rows_at(data: bytes, pos: int, end: int, memo: Sequence[Any], most: int) -> tuple[PickledRows, int] | None:
    """Return the rows that begin here, and where they end; None if nothing was recognised, or more rows than `most`."""
    dtype = _row(data, pos, memo)
    if dtype is None:
        return None
    count = _count(data, dtype, pos, (end - pos) // dtype.itemsize)
    after = pos + count * dtype.itemsize
    if not _FEWEST <= count <= most or data[after : after + 1] != b"u":
        return None
    rows = np.frombuffer(data, dtype, count, pos)
    found = PickledRows()
    for name in dtype.names or ():
        if name in ("fqn", "offset", "file"):
            slots, numbers = np.unique(rows[name], return_inverse=True)
            if slots[-1] >= len(memo):
                return None  # the machine says what is wrong
            found.values[name] = [memo[slot] for slot in slots.tolist()]  # now: a slot may be used again
            found.numbers[name] = numbers.reshape(-1)
        elif name in ("index", "record"):
            found.numbers[name] = rows[name].astype(np.int64)
    return found, after


def _count(data: bytes, dtype: np.dtype[Any], pos: int, room: int) -> int:
    """Return how many rows are like the first one; looks no further than about four times as many."""
    constants = [name for name in dtype.names or () if name.startswith("constant")]
    first = np.frombuffer(data, dtype, 1, pos) if room else np.empty(0, dtype)
    count, window = 0, _FEWEST
    while count < room:
        some = np.frombuffer(data, dtype, min(window, room - count), pos + count * dtype.itemsize)
        same = np.ones(len(some), np.bool_)
        for name in constants:
            same &= some[name] == first[name]
        if not same.all():
            return count + int(np.argmin(same))
        count += len(some)
        window *= 4
    return count


def _row(data: bytes, pos: int, memo: Sequence[Any]) -> np.dtype[Any] | None:
    """Return the fields of a row, if there is one."""
    fields: list[tuple[str, str]] = []

    def take(form: bytes, *slots: Any) -> bool:
        """Take bytes of this form, whose slots hold these values."""
        nonlocal pos
        given = data[pos : pos + len(form)]
        wanted = iter(slots)
        for at, byte in enumerate(form):
            if byte == ord("?"):
                if at >= len(given) or given[at] >= len(memo) or not _is(memo[given[at]], next(wanted)):
                    return False
            elif given[at : at + 1] != bytes([byte]):
                return False
        fields.append((f"constant{len(fields)}", f"V{len(form)}"))
        pos += len(form)
        return True

    def number(name: str, code: str) -> None:
        nonlocal pos
        fields.append((name, code))
        pos += np.dtype(code).itemsize

    if not take(_BEGIN, INDEX, "fqn"):
        return None
    number("fqn", "<u4")
    if not take(_NO_HINT, "index"):
        for form, code in _HINT.items():
            if take(form, "index"):
                number("index", code)
                break
        else:
            return None
        if not take(_OFFSET, "offset"):
            return None
        number("offset", "<u4")
    if not take(_FILE):
        return None
    number("file", "<u4")
    for form, code in _RECORD.items():
        if take(form):
            number("record", code)
            break
    else:
        return None
    return np.dtype(fields) if take(_END) else None


def _is(value: Any, wanted: Any) -> bool:
    return value is wanted if type(wanted) is Global else type(value) is str and value == wanted


class Joined(NamedTuple):
    """What `ShardPlaces` takes: the distinct names, offsets and files of rows, and of each row their numbers."""

    fqns: list[str]
    offsets: list[torch.Size | None]
    files: list[Any]
    columns: tuple[npt.NDArray[np.int64], ...]


def joined(parts: Sequence[PickledRows]) -> Joined:
    """Return all rows together.

    Raises:
        MetadataError: a slot held what no row may name, or a number is out of range.
    """
    values = {name: _distinct(parts, name, kind) for name, kind in _KINDS.items()}
    offsets = [*values["offset"], None]  # None is an object's
    check_hashes([hash(offset) for offset in offsets])
    numbers: dict[str, dict[Any, int]] = {"fqn": {}, "offset": {}, "file": {}}
    columns: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in (*numbers, "index", "record")}
    for rows in parts:
        for name, known in numbers.items():
            if name in rows.numbers:
                own = [known.setdefault(_key(name, value), len(known)) for value in rows.values[name]]
                columns[name].append(np.array(own, np.int64)[rows.numbers[name]])
            else:
                columns[name].append(np.full(len(rows), known.setdefault(None, len(known)), np.int64))
        columns["index"].append(rows.numbers.get("index", np.full(len(rows), -1, np.int64)))
        columns["record"].append(rows.numbers["record"])
        if int(rows.numbers["record"].min()) < 0 or int(columns["index"][-1].min()) < ("index" in rows.numbers) - 1:
            raise MetadataError("storage_data has a negative number of a shard or record.")
    by_id = {id(value): value for value in values["file"]}
    files = [by_id[key] for key in numbers["file"]]
    together = (np.concatenate(columns[name]) for name in ("fqn", "offset", "file", "index", "record"))
    return Joined(list(numbers["fqn"]), list(numbers["offset"]), files, tuple(together))


_KINDS: Final[dict[str, type]] = {"fqn": str, "offset": torch.Size, "file": tuple}


def _key(name: str, value: Any) -> Any:
    return id(value) if name == "file" else value


def _distinct(parts: Sequence[PickledRows], name: str, kind: type) -> list[Any]:
    found = {id(value): value for rows in parts for value in rows.values.get(name, ())}
    for value in found.values():
        if type(value) is not kind:
            raise MetadataError(f"A row of storage_data names {shown(value)} where {_WORDS[name]} must be.")
    return list(found.values())


_WORDS: Final = {"fqn": "the name of a tensor or object", "offset": "a shard's offset", "file": "a file"}
