"""Every error a user of this package can meet.

    CheckpointError                      base class: something is wrong with a checkpoint or a request
    ├── ConfigurationError               an option has a value that can't work           (also ValueError)
    ├── CodecUnavailableError            the requested codec or engine can't run here    (also RuntimeError)
    ├── CheckpointNotFoundError          there is nothing at the path                    (also FileNotFoundError)
    │   └── IncompleteCheckpointError    data files, but no `.metadata`: a save that never finished
    ├── CheckpointExistsError            there is a checkpoint already and it may not be replaced (also FileExistsError)
    ├── CheckpointReplacedError          another save replaced the checkpoint during a load: load again
    ├── ConcurrentSaveError              another save won the same path
    ├── EarlierSaveError                 an earlier asynchronous save failed unnoticed: this one was not made
    ├── RunInUseError                    another manager writes to this run
    ├── RanksDifferError                 not all ranks make the same call: one is missing, or has other arguments
    ├── RankFailedError                  another rank failed, or this one with a foreign error (also RuntimeError)
    ├── StorageError                     the storage refused or failed: permissions, disk full, network (also OSError)
    ├── MetadataError                    `.metadata` can't be read or contradicts itself
    │   └── UnsafeMetadataError          `.metadata` asks for a global, a call or more memory than is allowed
    ├── UnsafePathError                  a path inside the checkpoint leads out of it
    ├── UnsafeObjectError                a stored Python object needs more than weights_only loading allows
    ├── FormatError                      a data file is not what docs/format.md says
    │   ├── WrongMagicError
    │   ├── UnsupportedVersionError      format version or required feature newer than this reader
    │   ├── UnknownCodecError
    │   ├── TruncatedFileError           shorter than `.metadata` or the footer says
    │   └── FileMismatchError            not the file that `.metadata` names: another save's, swapped, grown
    ├── CorruptDataError                 bytes that fail their CRC, or decode to something else
    ├── MissingKeyError                  the checkpoint has no such key                  (also KeyError)
    ├── ShapeMismatchError               the requested shape differs from the saved shape
    └── DtypeMismatchError               the requested dtype differs from the saved one, and dtype="cast" was not given

DCP gathers errors across ranks with pickle, so each of them survives it with all of its attributes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any

from dcp_nvcomp.redaction import printable, without_secrets

__all__ = [
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "CheckpointReplacedError",
    "CodecUnavailableError",
    "ConcurrentSaveError",
    "ConfigurationError",
    "CorruptDataError",
    "DtypeMismatchError",
    "EarlierSaveError",
    "FileMismatchError",
    "FormatError",
    "IncompleteCheckpointError",
    "MetadataError",
    "MissingKeyError",
    "RankFailedError",
    "RanksDifferError",
    "RunInUseError",
    "ShapeMismatchError",
    "StorageError",
    "TruncatedFileError",
    "UnknownCodecError",
    "UnsafeMetadataError",
    "UnsafeObjectError",
    "UnsafePathError",
    "UnsupportedVersionError",
    "WrongMagicError",
]


def _rebuild(cls: type[CheckpointError], message: str, attributes: dict[str, Any]) -> CheckpointError:
    error = cls(message)
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


def _shown(message: str) -> str:
    return printable(without_secrets(message), but="\n\t")


class CheckpointError(Exception):
    """Base of all errors of this package.

    Args:
        message: what happened and what to do about it, one or two sentences.
        path: the file or checkpoint it happened in.
        fqn: the state-dict key it happened to.
        byte_range: half-open range of bytes `(start, stop)` in the file at `path`.

    Attributes:
        outcome_unknown: True if the failed operation may still take, or have taken, effect: the storage never confirmed
            that it did not.

    Examples:
        >>> str(CheckpointError("CRC mismatch", path="run/__0_0_ab.distcp", fqn="w", byte_range=(16, 32)))
        "CRC mismatch (file 'run/__0_0_ab.distcp', key 'w', bytes 16 to 32)"
    """

    outcome_unknown = False

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        fqn: str | None = None,
        byte_range: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(_shown(message))
        self.message = message
        self.path = path
        self.fqn = fqn
        self.byte_range = byte_range

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep secrets of URLs, and what a terminal would obey, out of what is shown, whoever assigns it."""
        if name == "message":
            value = _shown(value)
        elif name == "path" and value is not None:
            value = without_secrets(value)
        super().__setattr__(name, value)

    def __str__(self) -> str:
        where = []
        if self.path is not None:
            where.append(f"file {self.path!r}")
        if self.fqn is not None:
            where.append(f"key {self.fqn!r}")
        if self.byte_range is not None:
            where.append(f"bytes {self.byte_range[0]} to {self.byte_range[1]}")
        return f"{self.message} ({', '.join(where)})" if where else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        attributes = dict(self.__dict__)
        if isinstance(self, OSError):
            attributes["errno"] = self.errno  # lives in a C slot, not in __dict__
        return _rebuild, (type(self), self.message, attributes)


class ConfigurationError(CheckpointError, ValueError):
    """An option has a value that can't work; nothing was read or written."""


class CodecUnavailableError(CheckpointError, RuntimeError):
    """The requested codec or engine needs hardware or a package that is not available."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class IncompleteCheckpointError(CheckpointNotFoundError):
    """There are data files but no `.metadata`: the save that wrote them never finished."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is a checkpoint at the path, and this save may not replace it."""


class CheckpointReplacedError(CheckpointError):
    """Another save replaced the checkpoint while it was being loaded; load again."""


class ConcurrentSaveError(CheckpointError):
    """Another save published a checkpoint at the same path first."""


class EarlierSaveError(CheckpointError):
    """An earlier asynchronous save failed, and its future was not looked at.

    The save that raises it was not made. It is raised on all ranks.
    """


class RunInUseError(CheckpointError):
    """Another `CheckpointManager` writes to this run, or has taken it over."""


class RanksDifferError(CheckpointError, RuntimeError):
    """Not all ranks of a process group make the same call; nothing was read or written.

    Raised within the group's own time limit, on each rank that made one, with the global ranks that did not, or what
    differs.

    Attributes:
        in_vain: True if this rank waited in vain: then gloo has closed the connections of the process group.
    """

    in_vain = False


class RankFailedError(CheckpointError, RuntimeError):
    """A rank failed with an error of another package, or before the save or load began, or is gone altogether.

    Raised on all ranks; of a rank that is gone within the time limit of the process group.

    Attributes:
        failures: what failed, by rank in the process group.
        in_vain: True if this rank waited in vain: then gloo has closed the connections of the process group.
    """

    failures: Mapping[int, str] = {}
    in_vain = False

    @classmethod
    def of(cls, failures: Mapping[int, str], *, is_alone: bool = False) -> RankFailedError:
        """Tell which ranks failed, and the first of the reasons.

        Args:
            failures: why, by rank; at least one.
            is_alone: True if there are no other ranks: then no rank is named.
        """
        ranks = sorted(failures)
        some = f"{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}"
        which = f"Rank {some}" if len(ranks) == 1 else f"{len(ranks)} ranks ({some})"
        first = failures[ranks[0]]
        said = f"{which} failed: {first}" if len(ranks) == 1 else f"{which} failed, the first of them with {first}"
        error = cls(first if is_alone else said)
        error.failures = {rank: without_secrets(reason) for rank, reason in failures.items()}
        return error


class StorageError(CheckpointError, OSError):
    """The storage refused or failed.

    Attributes:
        errno: that of the underlying OSError, if there is one; ETIMEDOUT if no response came in time.
        attempts: the number of attempts; None if the storage does not retry.
    """

    attempts: int | None = None

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        fqn: str | None = None,
        byte_range: tuple[int, int] | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, fqn=fqn, byte_range=byte_range)
        self.errno = errno

    @classmethod
    def from_os_error(
        cls,
        what: str,
        path: str,
        error: BaseException,
        tried: str = "",
        *,
        redact: Callable[[str], str] = without_secrets,
    ) -> StorageError:
        """Wrap an error of the storage client, and explain the usual errno values.

        Args:
            what: the operation that failed, as in "Could not {what}".
            path: the file.
            error: what the client raised.
            tried: the number of attempts and their duration, appended to the client's words.
            redact: removes secrets from the client's words.
        """
        number = getattr(error, "errno", None)
        advice = {
            errno.ENOSPC: " The storage is full: free space and save again.",
            errno.EDQUOT: " The quota is used up: free space and save again.",
            errno.EACCES: " Check the permissions of the target.",
            errno.EPERM: " Check the permissions of the target.",
            errno.EROFS: " The target is mounted read-only.",
            errno.EEXIST: " Something else has that name: give another path.",
            errno.ENOTDIR: " There is a file where a directory has to be: give another path.",
            errno.EISDIR: " There is a directory where a file has to be: give another path.",
        }.get(number or 0, "")
        if isinstance(error, NotImplementedError):
            advice = " This storage can't do that: it may be for reading only."
        words = redact(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        return cls(f"Could not {what}: {words}{tried}.{advice}", path=path, errno=number)


class MetadataError(CheckpointError):
    """`.metadata` can't be read, or what it says contradicts itself."""


class UnsafeMetadataError(MetadataError):
    """`.metadata` asks for a global that is not allowed, for a call, or for more memory than it may take."""


class UnsafePathError(CheckpointError):
    """A path inside the checkpoint leads out of it."""


class UnsafeObjectError(CheckpointError):
    """A stored Python object needs more than `weights_only` loading allows; `trusted_globals=` widens it."""


class FormatError(CheckpointError):
    """A data file is not what docs/format.md says it must be."""


class WrongMagicError(FormatError):
    """The file does not begin or end like a data file."""


class UnsupportedVersionError(FormatError):
    """The file needs a newer reader: its format version or one of its features is unknown here."""


class UnknownCodecError(FormatError):
    """A record names a codec that this reader does not have."""


class TruncatedFileError(FormatError):
    """The file is shorter than it must be."""


class FileMismatchError(FormatError):
    """The file is not the one that `.metadata` names: of another save, swapped, or grown."""


class CorruptDataError(CheckpointError):
    """Stored bytes fail their CRC, or do not decode to what the footer says."""


class ShapeMismatchError(CheckpointError):
    """The requested shape differs from the saved shape."""


class MissingKeyError(CheckpointError, KeyError):
    """The checkpoint has no such key."""


class DtypeMismatchError(CheckpointError):
    """The requested dtype differs from the saved one, and no conversion was asked for."""
