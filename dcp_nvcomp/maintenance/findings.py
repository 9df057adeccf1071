"""Findings of a verification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.maintenance.opening import as_json, document

ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    severity: str
    what: str
    file: str | None = None  # the file's name in the checkpoint; None if no file is at fault
    fqns: tuple[str, ...] = ()
    byte_range: tuple[int, int] | None = None  # half-open range of bytes in the file, if known

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        values: dict[str, Any] = as_json(self)
        return values


def finding_of(error: CheckpointError, file: str | None, fqns: tuple[str, ...] = ()) -> Finding:
    """The finding that an error is."""
    return Finding(ERROR, error.message, file, fqns or ((error.fqn,) if error.fqn else ()), error.byte_range)


@dataclass(frozen=True)
class Verification:
    """Result of `verify`.

    Attributes:
        path: the checkpoint.
        layout: `dcp_nvcomp`, or `stock` for one that stock DCP wrote, which has no checksums of its own.
        save_id: id of the save, where there is one.
        full: whether blocks were decoded too.
        files: how many data files it has.
        nbytes: bytes of data files that were looked at.
        blocks: blocks whose stored bytes were looked at; of a stock checkpoint, items.
        undecoded_blocks: blocks that were to be decoded too, and could not be because only a GPU can (codec `ans`).
            Their stored bytes were checked.
        findings: what is wrong; empty if nothing is.
    """

    path: str
    layout: str
    save_id: str | None
    full: bool
    files: int
    nbytes: int
    blocks: int
    undecoded_blocks: int
    findings: tuple[Finding, ...]

    @property
    def is_sound(self) -> bool:
        """True if nothing but warnings was found."""
        return not any(finding.severity == ERROR for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values. Keys are only ever added to this document; `schema` changes if one must go."""
        return document(self, "checkpoint", sound=self.is_sound)
