"""What is at a path: a checkpoint, the directory of a run, or a file of another kind, and which call takes it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError
from dcp_nvcomp.format.data_file import find_data_file, read_footer
from dcp_nvcomp.format.framing import HEADER_MAGIC
from dcp_nvcomp.format.names import (
    DATA_FILE_SUFFIX,
    METADATA_NAME,
    ONE_FILE_KEY,
    STREAM_KEY,
    data_file_rank,
    rank_of_metadata_name,
    save_id_of_copy,
)
from dcp_nvcomp.format.record import KIND_BYTES
from dcp_nvcomp.options import parent_and_name
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import place_of

Kind = Literal[
    "checkpoint",
    "incomplete",
    "run",
    "safetensors files",
    "torch files",
    "nothing",
    "part of a checkpoint",
    "one file",
    "torch file",
    "old torch file",
    "safetensors",
    "other file",
]

TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")
_SAFETENSORS_NAMES: Final = re.compile(r".*\.safetensors(?:\.index\.json)?|\.dcp_nvcomp_conversion\.json", re.DOTALL)
# What is read of a file: enough for the name in a zip's first header and for tar's mark.
_HEAD_NBYTES: Final = 512
# Of a run with many steps, the last ones are looked at.
_MOST_FOLDERS: Final = 16

# Legacy files of torch.save begin with a pickled number.
_OLD_TORCH: Final = re.compile(rb"\x80.\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19\.", re.DOTALL)
_MAGICS: Final = (
    (re.compile(rb"PK\x03\x04"), "a zip archive"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive"),
    (re.compile(rb"\x1f\x8b|BZh|\xfd7zXZ\x00|\x28\xb5\x2f\xfd"), "a compressed file or archive"),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), "an HDF5 file"),
    (re.compile(rb"\x93NUMPY"), "a file of numpy"),
    (re.compile(rb"GGUF"), "a GGUF file"),
    (re.compile(rb"\x80[\x02-\x05]"), "a pickle"),
)
_ARCHIVES: Final = ("a zip archive", "a tar archive", "a compressed file or archive")

_CONVERTS: Final = "`dcp_nvcomp.convert` (or `dcp-nvcomp convert`) makes a checkpoint of"


@dataclass(frozen=True)
class Found:
    """What is at a path."""

    kind: Kind
    what: str  # for people, such as "a file of torch.save"
    advice: str  # which call takes it, or what to give instead


def is_local(path: str) -> bool:
    """True if it is a path on this machine."""
    return "://" not in place_of(path)


def linked_to(path: str) -> str:
    """Return where a local path leads over all its links; a URL as it is."""
    return os.path.realpath(place_of(path)) if is_local(path) else path


def file_at(filesystem: Filesystem) -> tuple[Filesystem, str, int] | None:
    """Return the file, if the path of a directory leads to one: what it is in, its name and its size."""
    path = linked_to(filesystem.path)
    if filesystem.reopen is None or path.endswith("/") or (is_local(path) and not os.path.isfile(path)):
        return None
    parent, name = parent_and_name(path)
    if parent.endswith("://") and not parent.startswith("memory"):  # a bucket or a host
        return None
    beside = filesystem.reopen(parent)
    try:
        nbytes = beside.file_nbytes(name)
    except BaseException:
        beside.close()
        raise
    if nbytes is None:
        beside.close()
        return None
    return beside, name, nbytes


def recognize(filesystem: Filesystem) -> Found:
    """Return what is at a path."""
    if filesystem.file_nbytes(METADATA_NAME) is not None:
        return _CHECKPOINT
    file = file_at(filesystem)
    if file is None:
        return _of_directory(filesystem)
    with contextlib.closing(file[0]):
        return _of_file(*file)


def stands_alone(beside: Filesystem, name: str, nbytes: int) -> bool:
    """Return True if a file is one that `load_compressed_checkpoint` reads, damaged or not."""
    try:
        return _of_file(beside, name, nbytes).kind == "one file"
    except CheckpointError:
        return False


def refused(
    filesystem: Filesystem, wanted: str = "a checkpoint", *, but: Collection[Kind] = ()
) -> CheckpointNotFoundError | None:
    """Return the error for a path at which there is something else than what was wanted; None if there is nothing."""
    try:
        found = recognize(filesystem)
    except CheckpointError:  # there is a first error to raise
        return None
    if found.kind in ("nothing", "incomplete", *but):
        return None
    return CheckpointNotFoundError(f"This is {found.what}, not {wanted}: {found.advice}.", path=filesystem.path)


_CHECKPOINT: Final = Found("checkpoint", "a checkpoint, which is a directory", "`load` or `open_checkpoint` reads it")


def _of_file(beside: Filesystem, name: str, nbytes: int) -> Found:
    if name == METADATA_NAME or rank_of_metadata_name(name) is not None or save_id_of_copy(name) is not None:
        return _part(beside, "the metadata")
    head = beside.read(name, 0, min(nbytes, _HEAD_NBYTES))
    if head.startswith(HEADER_MAGIC):
        what = None if data_file_rank(name) is not None else _what_stands_alone(beside, name, nbytes)
        if what is None:
            return _part(beside, "a data file")
        return Found("one file", what, f"`load_compressed_checkpoint` reads it, and {_CONVERTS} it")
    if data_file_rank(name) is not None:
        return _part(beside, "a data file")
    if _is_torch_zip(head):
        return Found("torch file", "a file of torch.save", f"torch.load reads it, and {_CONVERTS} it")
    if _OLD_TORCH.match(head):
        return Found(
            "old torch file",
            "a file of torch.save in its format before PyTorch 1.6",
            "torch.load reads it; what torch.save makes of that, `dcp_nvcomp.convert` takes",
        )
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= nbytes - 8:
        return Found("safetensors", "a safetensors file", f"{_CONVERTS} it")
    if not nbytes:
        return Found("other file", "an empty file", "a checkpoint is a directory with `.metadata` in it")
    what = next((what for magic, what in _MAGICS if magic.match(head)), "a file of another format")
    unpack = "unpack it, and give what is in it" if what in _ARCHIVES else "no call of this package reads it"
    return Found("other file", what, unpack)


def _part(beside: Filesystem, what: str) -> Found:
    path = without_secrets(beside.path)
    return Found("part of a checkpoint", f"{what} of a checkpoint", f"give the directory that it is in, {path!r}")


_STANDS_ALONE: Final = {
    ONE_FILE_KEY: "a file of save_compressed_checkpoint",
    STREAM_KEY: "a compressed stream, such as a file of torch.save",
}


def _what_stands_alone(beside: Filesystem, name: str, nbytes: int) -> str | None:
    try:
        records = read_footer(beside, find_data_file(beside, name, nbytes)).records
    except CheckpointError:  # damaged, which its own reader explains
        return _STANDS_ALONE[ONE_FILE_KEY]
    names = {record.fqn for record in records if record.kind == KIND_BYTES}
    return next((what for key, what in _STANDS_ALONE.items() if key in names), None)


def _is_torch_zip(head: bytes) -> bool:
    name_nbytes = int.from_bytes(head[26:28], "little")
    return head.startswith(b"PK\x03\x04") and head[30 : 30 + name_nbytes].endswith(b"data.pkl")


def _of_directory(filesystem: Filesystem) -> Found:
    names = filesystem.list_names()
    if any(rank_of_metadata_name(name) is not None for name in names):
        return _CHECKPOINT
    if any(name.endswith(DATA_FILE_SUFFIX) for name in names):
        return Found("incomplete", "what is left of a save that never finished", "`dcp-nvcomp recover` looks into it")
    names = names_and_links(filesystem)
    if any(map(_SAFETENSORS_NAMES.fullmatch, names)):
        return Found("safetensors files", "a directory of safetensors files", f"{_CONVERTS} them")
    steps = _steps_in(filesystem)
    if steps:
        return Found(
            "run",
            "a directory with checkpoints below it",
            f"give one of them, such as {filesystem.location(steps[-1])!r}; "
            "`dcp-nvcomp ls` lists those below a directory",
        )
    files = [name for name in names if name.endswith(TORCH_SUFFIXES)]
    if files:
        return Found("torch files", "a directory of files of torch.save", f"{_CONVERTS} each, such as {files[0]!r}")
    return Found("nothing", "nothing", "")


def names_and_links(filesystem: Filesystem) -> list[str]:
    """Return the sorted names of the files in a directory, and of links to files, which a hub's cache is made of."""
    names = set(filesystem.list_names())
    if is_local(filesystem.path):
        with contextlib.suppress(OSError), os.scandir(place_of(filesystem.path)) as items:
            names |= {item.name for item in items if item.is_symlink() and os.path.isfile(item.path)}
    return sorted(names)


def _steps_in(filesystem: Filesystem) -> list[str]:
    """Return the folders directly in a directory that are checkpoints, of those with the largest numbers."""
    folders = sorted(filesystem.list_folders(), key=lambda name: [int(one) for one in re.findall(r"\d{1,19}", name)])
    some = folders[-_MOST_FOLDERS:]
    sizes = filesystem.map(lambda folder: filesystem.file_nbytes(f"{folder}/{METADATA_NAME}"), some)
    return [folder for folder, nbytes in zip(some, sizes, strict=True) if nbytes is not None]
