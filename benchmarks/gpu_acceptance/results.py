"""Results of probes, and the tables and targets that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring import Spread

__all__ = [
    "AFTER_A_STEP",
    "BEFORE_A_STEP",
    "CHECKS",
    "PLAIN_COPY",
    "TABLES",
    "Probe",
    "Skipped",
    "checks_of",
    "median_of",
    "plain",
    "tables_of",
]

# A name, and what finds out: returns what goes into the JSON. Its key "rows" holds rows of TABLES by the table's name.
Probe = tuple[str, Callable[[], Mapping[str, Any] | None]]


class Skipped(Exception):
    """A probe has no meaning here; the message says why."""


def plain(value: Any) -> Any:
    """Return a value in the form that goes into JSON; for `json.dumps(default=)`."""
    if isinstance(value, Spread):
        return value.to_json()
    if hasattr(value, "item"):  # numpy's and torch's scalars
        return value.item()
    return str(value)


PLAIN_COPY = "plain pinned copy"
BEFORE_A_STEP = "async_save"
AFTER_A_STEP = "async_save, after a step"

_RATE = ".1f"

# Of each table its title, and each column's header and format, as `benchmarks.results.Table` has them.
TABLES: Mapping[str, tuple[str, Mapping[str, tuple[str, str]]]] = {
    "copies": (
        "Copies of the machine itself",
        {"what": ("what", ""), "rate": ("GB/s", _RATE)},
    ),
    "correct": (
        "Blocks that the GPU coded, and how many of them came out wrong",
        {
            "chain": ("codec chain", ""),
            "blocks": ("blocks", "d"),
            "encoded_wrong": ("GPU to CPU, wrong", "d"),
            "decoded_wrong": ("CPU to GPU, wrong", "d"),
            "both_wrong": ("GPU to GPU, wrong", "d"),
            "size": ("size, x CPU engine's", ".4f"),
        },
    ),
    "raw": (
        "The coders alone on exponents of bf16 weights (ANS: on whole floats), GB/s of what they are given",
        {
            "coder": ("coder", ""),
            "slice_kib": ("slice, KiB", "d"),
            "slices": ("slices", "d"),
            "ratio": ("ratio", ".3f"),
            "encode_rate": ("encode", _RATE),
            "decode_rate": ("decode", _RATE),
        },
    ),
    "engine": (
        "The engine from and to GPU memory, GB/s of state; device: without copies to the host",
        {
            "codec": ("codec", ""),
            "checked": ("checked", ""),
            "batch_mib": ("batch, MiB", "d"),
            "ratio": ("ratio", ".3f"),
            "encode_rate": ("encode, engine", _RATE),
            "decode_rate": ("decode, engine", _RATE),
            "device_encode_rate": ("encode, device", _RATE),
            "device_decode_rate": ("decode, device", _RATE),
        },
    ),
    "staging": (
        "A state from the GPU to pinned memory",
        {
            "how": ("how", ""),
            "seconds": ("s", ".4f"),
            "rate": ("GB/s of state", _RATE),
            "speedup": ("x plain copy", ".2f"),
        },
    ),
    "repeats": (
        "Device memory after each save and load, MiB",
        {
            "turn": ("save and load", "d"),
            "reserved_mib": ("reserved by torch", ".0f"),
            "allocated_mib": ("allocated", ".0f"),
            "used_mib": ("used on the GPU", ".0f"),
        },
    ),
    "checkpoints": (
        "A state on the GPU to and from files in memory",
        {
            "writer": ("writer", ""),
            "ratio": ("ratio", ".3f"),
            "save_seconds": ("save, s", ".3f"),
            "load_seconds": ("load, s", ".3f"),
            "save_rate": ("save, GB/s", "~.2f"),
            "load_rate": ("load, GB/s", "~.2f"),
            "save_peak_mib": ("save, GPU MiB", ".0f"),
            "load_peak_mib": ("load, GPU MiB", ".0f"),
        },
    ),
    "asynchronous": (
        "What keeps training waiting: `async_save` of a state on the GPU, beside a copy of it",
        {
            "how": ("how", ""),
            "stall": ("stall, s", ".4f"),
            "staged": ("may change after, s", ".4f"),
            "ratio": ("state over what crosses", ".3f"),
            "gain": ("plain copy, x (stall x ratio)", ".2f"),
        },
    ),
    "hardware": (
        "Deflate frames decoded by the decompression engine and by CUDA, GB/s of what comes out",
        {"backend": ("backend", ""), "slice_kib": ("slice, KiB", "d"), "rate": ("decode", _RATE)},
    ),
}


@dataclass(frozen=True)
class Check:
    """A target that the run is held to.

    Attributes:
        what: the target in words.
        table: the table that it looks at.
        cell: the cell of its rows.
        bound: the least that the best row must have.
        where: True for the rows that count.
    """

    what: str
    table: str
    cell: str
    bound: float
    where: Callable[[Mapping[str, Any]], bool]

    def result(self, rows: list[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return the target with what was measured; None if nothing was."""
        values = [median_of(row[self.cell]) for row in rows if self.where(row)]
        if not values:
            return None
        met = max(values) >= self.bound
        return {"what": self.what, "value": max(values), "at_least": True, "bound": self.bound, "met": met}


def _is_open(row: Mapping[str, Any]) -> bool:
    return row.get("codec") != "ans"


def _is_encoded(row: Mapping[str, Any]) -> bool:
    return row["how"] != PLAIN_COPY


def _is_before(row: Mapping[str, Any]) -> bool:
    return row["how"] == BEFORE_A_STEP


def _is_after(row: Mapping[str, Any]) -> bool:
    return row["how"] == AFTER_A_STEP


CHECKS = (
    Check("open codec, encode on the device, GB/s", "engine", "device_encode_rate", 200.0, _is_open),
    Check("open codec, decode on the device, GB/s", "engine", "device_decode_rate", 200.0, _is_open),
    Check("staging, encoded, speed over a plain pinned copy", "staging", "speedup", 1.15, _is_encoded),
    Check("async_save, plain pinned copy over its stall times the ratio", "asynchronous", "gain", 0.9, _is_before),
    Check("the same, after a step", "asynchronous", "gain", 0.9, _is_after),
)


def median_of(cell: Any) -> float:
    """Return a cell's number, of several measurements their median."""
    return float(cell["median"] if isinstance(cell, Mapping) else cell)


def tables_of(steps: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return all tables that have rows, gathered from the probes of all steps."""
    rows: dict[str, list[Any]] = {}
    for step in steps.values():
        for probe in step["probes"].values():
            for table, more in probe.get("rows", {}).items():
                rows.setdefault(table, []).extend(more)
    return {
        name: {"title": title, "columns": columns, "rows": rows[name]}
        for name, (title, columns) in TABLES.items()
        if name in rows
    }


def checks_of(tables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the targets of which something was measured, and whether they are met."""
    found = (check.result(tables[check.table]["rows"]) for check in CHECKS if check.table in tables)
    return [check for check in found if check is not None]
