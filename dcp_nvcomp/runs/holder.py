"""Who holds the lease of a run: what a lease's file says.

    {"id": ..., "run_id": ..., "host": ..., "pid": ..., "lease_seconds": 60.0, "renewed": 17, "released": true}

`renewed` grows with each renewal, so that a storage that stamps files by the minute shows it too. Anything may be in
such a file, put there by accident: what is not understood is no lease, and what is out of range is not believed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import uuid
from dataclasses import dataclass
from typing import Any, Final

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.redaction import printable

# A dead holder of a longer lease would keep its successor waiting for longer than anyone watches.
LONGEST_SECONDS: Final = 3600.0
_USUAL_SECONDS: Final = 60.0
_MOST_SHOWN: Final = 200


@dataclass(frozen=True)
class Holder:
    """What a lease says.

    Attributes:
        id: of this lease.
        run_id: of the job; empty if it has none.
        host: where the job's first rank is.
        pid: its process there.
        lease_seconds: how long the lease lasts without being renewed.
        renewed: how often it was.
        is_released: True if it was given back.
    """

    id: str
    run_id: str = ""
    host: str = "?"
    pid: str = "?"
    lease_seconds: float = _USUAL_SECONDS
    renewed: int = 0
    is_released: bool = False

    @staticmethod
    def here(run_id: str | None, lease_seconds: float) -> Holder:
        """Return this process as the holder of a new lease."""
        return Holder(uuid.uuid4().hex, run_id or "", socket.gethostname(), str(os.getpid()), lease_seconds)

    @staticmethod
    def of(data: bytes) -> Holder | None:
        """Return what a file says; None if it is no lease."""
        try:
            values = parse_json(data)
        except ValueError:
            return None
        if not isinstance(values, dict) or not isinstance(values.get("id"), str):
            return None
        run_id, host, pid, renewed = (values.get(name) for name in ("run_id", "host", "pid", "renewed"))
        return Holder(
            values["id"],
            run_id if isinstance(run_id, str) else "",
            str(host)[:_MOST_SHOWN],
            str(pid)[:_MOST_SHOWN],
            _seconds(values.get("lease_seconds")),
            renewed if type(renewed) is int else 0,
            values.get("released") is True,
        )

    def to_data(self) -> bytes:
        """Return the bytes of the file."""
        values: dict[str, Any] = {
            "run_id": self.run_id or None,
            "host": self.host,
            "pid": int(self.pid) if self.pid.isdecimal() else self.pid,
            "lease_seconds": self.lease_seconds,
            "id": self.id,
            "renewed": self.renewed,
        }
        if self.is_released:
            values["released"] = True
        return json.dumps(values).encode()

    def as_renewed(self) -> Holder:
        """Return it renewed once more."""
        return dataclasses.replace(self, renewed=self.renewed + 1)

    def lets_go_for(self, run_id: str | None) -> bool:
        """Return whether a job may take over at once: the lease was given back, or is the same job's."""
        return self.is_released or (bool(run_id) and self.run_id == run_id)

    def __str__(self) -> str:
        job = f"job {self.run_id[:_MOST_SHOWN]!r}, " if self.run_id else ""
        return printable(f"{job}process {self.pid} on {self.host}")


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or value <= 0:
        return _USUAL_SECONDS
    return float(min(value, LONGEST_SECONDS))
