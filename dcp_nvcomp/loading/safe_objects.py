"""Loading of stored Python objects without executing anything that is not trusted."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import re
import threading
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from dcp_nvcomp.errors import CheckpointError, CorruptDataError, StorageError, UnsafeObjectError
from dcp_nvcomp.format.metadata.allowed_globals import resolve_trusted_globals

_ZIP = b"PK\x03\x04"
_NEEDS_BYTEARRAY = (
    "A stored object needs bytearray, which weights_only loading allows, but which can be made to fill the memory."
)
_BYTEARRAY = (b"c__builtin__\nbytearray\n", b"cbuiltins\nbytearray\n")


class SafeLoader:
    """Loads stored objects with `weights_only=True`, widened by globals that the user trusts."""

    def __init__(self, trusted_globals: Sequence[str], *, check_objects: bool) -> None:
        self.trusted = list(resolve_trusted_globals(trusted_globals).values())
        self.checks_objects = check_objects

    def checked(self, data: io.BytesIO, fqn: str) -> io.BytesIO:
        """Return a bytes item unchanged, after loading it safely once if `check_objects` asked for that."""
        if self.checks_objects:
            self.load_object(data, fqn)
            data.seek(0)
        return data

    def load_object(self, data: io.BytesIO, fqn: str) -> Any:
        with _naming(fqn):
            return _load(data, self.trusted)

    def load_tensor(self, data: io.BytesIO, fqn: str) -> torch.Tensor:
        with _naming(fqn):
            return load_tensor_safely(data, self.trusted)


@contextmanager
def _naming(fqn: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        error.fqn = fqn
        raise


def load_tensor_safely(data: io.BytesIO, trusted: Sequence[Any] = (), *, crcs: bool = False) -> torch.Tensor:
    loaded = _load(data, trusted, crcs=crcs)
    if not isinstance(loaded, torch.Tensor):
        raise CorruptDataError(f"A {type(loaded).__name__} is stored in place of a tensor.")
    return loaded


def check_crcs(data: io.BytesIO) -> None:
    """Check the CRCs of what `torch.save` wrote, which `torch.load` does not do; ignore what is not an archive."""
    if not _is_archive(data):
        return
    try:
        with zipfile.ZipFile(data) as archive:
            _check_crcs(archive, _stored_members(archive, data))
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises almost anything for corrupt input
        raise CorruptDataError(f"A stored archive is corrupt: {error}.") from error
    finally:
        data.seek(0)


def check_file(path: str) -> None:
    """Refuse a file of `torch.save` of a few bytes that would make torch.load allocate any amount of memory."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != _ZIP:
                raise CorruptDataError(
                    "This is no file of torch.save, or one from before torch 1.6: load it with torch.load, and save it "
                    "again."
                )
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise CorruptDataError("The file is a compressed archive, which torch.save never writes.")
            _refuse_overlaps(members, os.fstat(file.fileno()).st_size)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                if any(data.find(name) >= 0 for name in _BYTEARRAY):
                    raise UnsafeObjectError(_NEEDS_BYTEARRAY)
    except (CheckpointError, MemoryError):
        raise
    except OSError as error:
        raise StorageError.from_os_error("read", path, error) from error
    except Exception as error:  # zipfile raises almost anything for corrupt input
        raise CorruptDataError(f"The archive is corrupt: {error}.") from error


def _load(data: io.BytesIO, trusted: Sequence[Any], *, crcs: bool = False) -> Any:
    try:
        _check_archive(data, trusted, crcs)
        with allowed_globals(trusted):
            return torch.load(data, map_location="cpu", weights_only=True)
    except (CheckpointError, MemoryError, Warning):  # a warning that the user makes an error says nothing of the data
        raise
    except zipfile.BadZipFile as error:
        raise CorruptDataError(f"A stored archive is corrupt: {error}.") from error
    except pickle.UnpicklingError as error:
        raise UnsafeObjectError(
            f"A stored object needs more than weights_only loading allows. {what_it_needs(error, _ADVICE)}"
        ) from error
    except Exception as error:  # torch.load raises almost anything for corrupt input
        raise CorruptDataError(f"A stored object cannot be loaded: {type(error).__name__}: {error}") from error


# Of what torch allows and checks in the whole process: one load at a time may change it.
_changing = threading.RLock()


@contextmanager
def allowed_globals(trusted: Sequence[Any] = ()) -> Iterator[None]:
    """Let `torch.load` with `weights_only=True` use what is trusted, and `bytes`, but for empty ones only.

    Sparse tensors whose indices are outside raise a `RuntimeError`: whoever made them dense would write there.
    """
    with _changing:
        before = torch.serialization.get_safe_globals()
        wanted = [*trusted, *before, (_empty_bytes, "builtins.bytes")]
        if bytes in wanted:
            wanted.pop()
        # at the end torch forbids all that it is given here, whoever had allowed it
        more = [one for one in wanted if one not in before]
        checked = torch.sparse.check_sparse_tensor_invariants()  # type: ignore[no-untyped-call]
        with torch.serialization.safe_globals(more), checked:
            yield


def _begin_again() -> None:
    """In a forked child, which lacks the thread that may hold the lock."""
    global _changing
    _changing = threading.RLock()


os.register_at_fork(after_in_child=_begin_again)


def _empty_bytes() -> bytes:
    """Stand in for `bytes`, as pickles of protocol 2 call it for b""; with a number it would fill the memory."""
    return b""


_ADVICE: Final = (
    "If you trust this checkpoint, name its globals in trusted_globals=, or register them with "
    "torch.serialization.add_safe_globals."
)


def what_it_needs(error: Exception, advice: str) -> str:
    """Return the one sentence of torch's page that matters, and the advice, where it helps."""
    filled = re.search(r"Can only (?:append|extend|SETITEMS?)\b.*but got <class '([\w.]+)'>", str(error))
    if filled:
        return (
            f"It has a {filled[1]} with items, which such loading never reads, whatever is trusted: save it as a list "
            "or dict. If you trust who wrote it, `load` reads it, without safe_objects=True."
        )
    named = re.search(r"GLOBAL (\S+) was not", str(error)) or re.search(r"but got <class '([\w.]+)'>", str(error))
    needs = f"It needs {_qualified(named[1])}." if named else f"torch says: {' '.join(str(error).split())[:300]}"
    return f"{advice} {needs}"


def _qualified(name: str) -> str:
    return name if "." in name else f"builtins.{name}"


def _check_archive(data: io.BytesIO, trusted: Sequence[Any], crcs: bool) -> None:
    """Refuse archives of a few bytes that would make torch.load allocate any amount of memory."""
    if not _is_archive(data):
        # torch.load would try the formats from before torch 1.6, in which the file alone determines the sizes
        raise CorruptDataError("A stored object is not an archive of torch.save.")
    with zipfile.ZipFile(data) as archive:
        members = _stored_members(archive, data)
        if len(members) < len(archive.infolist()):
            raise CorruptDataError("A stored object is a compressed archive, which torch.save never writes.")
        if crcs:
            _check_crcs(archive, members)
    data.seek(0)
    # as pickles of protocol 2 name it; searched in all bytes, because parsers may disagree on what an archive contains
    if bytearray not in trusted and any(name in data.getvalue() for name in _BYTEARRAY):
        raise UnsafeObjectError(
            f"{_NEEDS_BYTEARRAY} If you trust this checkpoint, name 'builtins.bytearray' in trusted_globals=."
        )


def _is_archive(data: io.BytesIO) -> bool:
    return bytes(data.getbuffer()[:4]) == _ZIP


def _stored_members(archive: zipfile.ZipFile, data: io.BytesIO) -> list[zipfile.ZipInfo]:
    """Return the files that are not compressed, after checking that together they are no larger than the archive."""
    members = [member for member in archive.infolist() if member.compress_type == zipfile.ZIP_STORED]
    _refuse_overlaps(members, data.getbuffer().nbytes)
    return members


def _refuse_overlaps(members: Sequence[zipfile.ZipInfo], nbytes: int) -> None:
    if sum(member.file_size for member in members) > nbytes:
        raise CorruptDataError("A stored object is an archive whose files overlap.")


def _check_crcs(archive: zipfile.ZipFile, members: Sequence[zipfile.ZipInfo]) -> None:
    for member in members:
        if member.CRC:  # zero if torch.serialization.set_crc32_options(False) had switched them off
            with archive.open(member) as file:
                while file.read(1 << 20):  # raises BadZipFile at the end if the CRC is another
                    pass
