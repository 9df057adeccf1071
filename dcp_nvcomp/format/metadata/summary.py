"""The end of a `.metadata`: the summary of its save, and the CRC of the pickle.

    "DCPNVsum" + CRC32C of the rest as 8 hexadecimal digits + a JSON object

The summary is the last attribute of the pickled Metadata, and is found in the file's last few KB by its mark; a list of
a thousand checkpoints reads nothing else. Unpicklers stop before the CRC.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from crc32c import crc32c

from dcp_nvcomp.errors import MetadataError
from dcp_nvcomp.options import is_plain_name

SUMMARY_ATTRIBUTE: Final = "dcp_nvcomp_summary"
# As much of the end of a file is read to find a summary; one that would not fit is not written.
SUMMARY_NBYTES: Final = 4096
# Among `more`: what each replica of a state has saved for itself has this in common.
REPLICA: Final = "replica"
# Among `more`: how long the run had been under way, and by which of its leases the step was saved.
RUN_SECONDS: Final = "run_seconds"
LEASE: Final = "lease"
# Among `more`: the directories beside the checkpoint whose files it shares; True if they are too many to say.
SHARES: Final = "shares"
SHARED_NBYTES: Final = "shared_nbytes"  # and how much that is in memory
_MOST_SHARES_NBYTES: Final = 512
_MOST_SECONDS: Final = 1e12
_MARK: Final = "DCPNVsum"
_CRC_DIGITS: Final = 8
_MOST: Final = (1 << 63) - 1  # of whole numbers and times, which else no float might be
_MOST_TEXT_NBYTES: Final = SUMMARY_NBYTES - 128

_TRAILER: Final = struct.Struct("<I8s")
_MAGIC: Final = b"DCPNVcrc"


@dataclass(frozen=True)
class Summary:
    """What a save wrote."""

    save_id: str
    saved_seconds: float  # when it was about to be published, in seconds since 1970 by the coordinator's clock
    ranks: int  # how many ranks wrote it
    keys: int
    uncompressed_nbytes: int  # size of the state in memory
    stored_nbytes: int  # size of the data files
    version: str = ""  # of the package that wrote it
    step: int | None = None  # the step of training, if a run saved it
    metrics: dict[str, float] = field(default_factory=dict)  # of that step, such as `{"loss": 2.5}`
    more: dict[str, Any] = field(default_factory=dict)  # what later versions add

    @property
    def run_seconds(self) -> float | None:
        """How long the run had been under way, without breaks; None if it was not a run's manager that saved it."""
        found = self.more.get(RUN_SECONDS)
        if not isinstance(found, int | float) or isinstance(found, bool):
            return None
        return float(found) if 0 <= found < _MOST_SECONDS else None

    @property
    def lease(self) -> int:
        """The number of the lease under which a run's manager saved it; 0 if it had none."""
        found = self.more.get(LEASE)
        return found if type(found) is int and found > 0 else 0

    @property
    def shares(self) -> tuple[str, ...] | None:
        """The directories beside the checkpoint whose files it shares; None if only its metadata says."""
        found = self.more.get(SHARES, [])
        if not isinstance(found, list) or not all(isinstance(one, str) and is_plain_name(one) for one in found):
            return None
        return tuple(found)

    @property
    def shared_nbytes(self) -> int:
        """Size in memory of what is in files that it shares."""
        found = self.more.get(SHARED_NBYTES)
        return found if type(found) is int and 0 < found <= self.uncompressed_nbytes else 0

    @property
    def ratio(self) -> float:
        """The size in memory of what was written over `stored_nbytes`; 1.0 if nothing was."""
        nbytes = self.uncompressed_nbytes - self.shared_nbytes
        return nbytes / self.stored_nbytes if nbytes and self.stored_nbytes else 1.0

    def sharing_with(self, directories: Sequence[str], nbytes: int) -> Summary:
        """Return the summary of a checkpoint that shares files of these directories, `nbytes` in memory."""
        more = {name: value for name, value in self.more.items() if name not in (SHARES, SHARED_NBYTES)}
        if directories:
            more[SHARED_NBYTES] = nbytes
            more[SHARES] = list(directories)
            if len(json.dumps(more[SHARES])) > _MOST_SHARES_NBYTES:
                more[SHARES] = True
        return replace(self, more=more)

    def _is_sane(self) -> bool:
        sizes = (self.ranks, self.keys, self.uncompressed_nbytes, self.stored_nbytes)
        texts = (self.save_id, self.version)
        metrics = self.metrics.values() if type(self.metrics) is dict else ()
        return (
            all(type(size) is int and 0 <= size <= _MOST for size in sizes)
            and all(type(text) is str for text in texts)
            and type(self.saved_seconds) in (int, float)
            and -_MOST <= self.saved_seconds <= _MOST  # not of NaN
            and (self.step is None or (type(self.step) is int and 0 <= self.step <= _MOST))
            and type(self.metrics) is dict
            and all(type(value) is float or (type(value) is int and abs(value) <= _MOST) for value in metrics)
        )

    def to_text(self) -> str | None:
        """Return the text to store; None if it is too long."""
        values = asdict(self)
        if self.step is None:
            del values["step"], values["metrics"]
        text = json.dumps({**values.pop("more"), **values}, separators=(",", ":"))
        if len(text) > _MOST_TEXT_NBYTES:
            return None
        return f"{_MARK}{crc32c(text.encode()):08x}{text}"


def summary_at_end(data: bytes) -> Summary | None:
    """Return the summary in the last bytes of a `.metadata`."""
    at = data.rfind(_MARK.encode())
    if at < 0:
        return None
    start = at + len(_MARK)
    rest = data[start + _CRC_DIGITS :].decode("ascii", "replace")  # json.dumps writes nothing else
    try:
        values, length = json.JSONDecoder().raw_decode(rest)
        if int(data[start : start + _CRC_DIGITS], 16) != crc32c(rest[:length].encode()):
            return None
        known = {name: values.pop(name) for name in tuple(values) if name in Summary.__dataclass_fields__}
        known.pop("more", None)
        found = Summary(**known, more=values)
        return found if found._is_sane() else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def with_trailer(data: bytes) -> bytes:
    """Return a pickle followed by its CRC."""
    return b"".join([data, trailer_of(data)])


def trailer_of(data: bytes | memoryview) -> bytes:
    """Return the CRC of a pickle as it follows it."""
    return _TRAILER.pack(crc32c(data), _MAGIC)


def has_trailer(data: bytes) -> bool:
    """Return whether a CRC follows the pickle. Stock DCP writes none."""
    return data.endswith(_MAGIC)


def end_of_pickle(data: bytes) -> int:
    """Return where the pickle ends, and its CRC begins, which must match if there is one."""
    if not has_trailer(data):
        return len(data)
    crc, _ = _TRAILER.unpack(data[-_TRAILER.size :].rjust(_TRAILER.size))
    end = max(len(data) - _TRAILER.size, 0)
    if crc32c(memoryview(data)[:end]) != crc:
        raise MetadataError("`.metadata` fails its CRC: it is corrupt. `dcp-nvcomp recover` may restore it.")
    return end
