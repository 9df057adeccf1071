"""Read and write safetensors: one file, or a directory of files with their index, as huggingface_hub names them.

A directory's index is written last. Until then PROGRESS_NAME says which source the files are of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.conversion.entries import ObjectEntry, Source, TensorEntry, exists_already, is_file, pieces
from dcp_nvcomp.conversion.safetensors_format import (
    DTYPES,
    INDEX_NAME,
    MAX_HEADER_NBYTES,
    PROGRESS_NAME,
    SINGLE_NAME,
    StoredPart,
    header_of,
    is_name_of_model,
    parse_header,
    shard_name,
)
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConcurrentSaveError,
    ConfigurationError,
    CorruptDataError,
    IncompleteCheckpointError,
)
from dcp_nvcomp.format.block_grid import Box, element_span, strides_of
from dcp_nvcomp.format.recognition import linked_to, names_and_links
from dcp_nvcomp.options import parent_and_name
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem, check_relative_path, published_name
from dcp_nvcomp.storage.open import open_filesystem, place_of

# One of several files of a model, as huggingface_hub names them; those of stock DCP, `shard-...`, are of a rank each.
_OF_SEVERAL: Final = re.compile(r"(?!shard-\d)(.+)-(\d{5})-of-(\d{5})\.safetensors")


class SafetensorsSource(Source):
    """A safetensors file, or a directory of such files."""

    def __init__(self, path: str, **storage_options: Any) -> None:
        self.path = without_secrets(path)
        self._options = storage_options
        self._filesystems: dict[str, Filesystem] = {}
        self._index: Mapping[str, str] = {}
        try:
            paths = [path] if is_file(path, storage_options) else self._paths(place_of(path).rstrip("/") or "/")
            if not paths:
                raise CheckpointNotFoundError("There is no safetensors file.", path=self.path)
            self._parts = [(file, part) for file in map(linked_to, paths) for part in self._header(file)]
            self._check_keys()
            self._check_index()
            self.files = list(dict.fromkeys(file for file, _ in self._parts))
            self.has_keys = all(part.path != (part.key,) for _, part in self._parts)
        except BaseException:
            self.close()
            raise

    def _file(self, file: str) -> tuple[Filesystem, str]:
        """Return the directory that a file is in, and its name there."""
        parent, name = parent_and_name(file)
        if parent not in self._filesystems:
            self._filesystems[parent] = open_filesystem(parent, storage_options=self._options)
        return self._filesystems[parent], name

    def _paths(self, directory: str) -> list[str]:
        """Return the files of a directory; local ones may be links, as in the cache of huggingface_hub."""
        with contextlib.closing(open_filesystem(directory, storage_options=self._options)) as filesystem:
            names = names_and_links(filesystem)
        if INDEX_NAME in names:
            filesystem, name = self._file(linked_to(f"{directory}/{INDEX_NAME}"))
            data = filesystem.read_all(name, limit_nbytes=MAX_HEADER_NBYTES)
            try:
                weight_map = parse_json(data)["weight_map"]
                wanted = [check_relative_path(one, path=self.path) for one in sorted(set(weight_map.values()))]
                real = {one: linked_to(f"{directory}/{one}") for one in wanted}
                self._index = {key: real[one] for key, one in weight_map.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CorruptDataError(
                    "This is not an index of safetensors.", path=filesystem.location(name)
                ) from error
        elif PROGRESS_NAME in names:
            raise IncompleteCheckpointError(
                "A conversion to this directory was cut off: repeat it, and it goes on where it was.", path=self.path
            )
        else:
            wanted = [name for name in names if name.endswith(".safetensors")]
            self._check_numbers(wanted)
        return [f"{directory}/{name}" for name in wanted]

    def _check_numbers(self, names: Sequence[str]) -> None:
        """Refuse a part of a model's files, which say in their names how many they are."""
        there: dict[tuple[str, str], set[int]] = {}
        for name in names:
            if found := _OF_SEVERAL.fullmatch(name):
                there.setdefault((found[1], found[3]), set()).add(int(found[2]))
        for (stem, count), numbers in sorted(there.items()):
            first = 0 if 0 in numbers else 1
            missing = next((one for one in range(first, first + int(count)) if one not in numbers), None)
            if missing is not None:
                raise IncompleteCheckpointError(
                    f"The file {stem}-{missing:05d}-of-{count}.safetensors is missing: fetch it too, or give the files "
                    "one by one.",
                    path=self.path,
                )

    def _header(self, file: str) -> list[StoredPart]:
        filesystem, name = self._file(file)
        path = filesystem.location(name)
        nbytes = filesystem.file_nbytes(name)
        if nbytes is None:
            raise CheckpointNotFoundError("There is no such file.", path=path)
        length = int.from_bytes(filesystem.read(name, 0, 8), "little") if nbytes >= 8 else -1
        if not 0 < length <= min(MAX_HEADER_NBYTES, nbytes - 8):
            raise CorruptDataError("This is not a safetensors file.", path=path)
        return parse_header(filesystem.read(name, 8, 8 + length), path=path, file_nbytes=nbytes)

    def _check_keys(self) -> None:
        where: dict[str, str] = {}
        for file, part in self._parts:
            if part.key in where:
                raise CheckpointError(
                    f"Two tensors have this key, in {without_secrets(where[part.key])} and here: convert one file, or "
                    "remove what does not belong here.",
                    path=file,
                    fqn=part.key,
                )
            where[part.key] = file

    def _check_index(self) -> None:
        there = {(part.key, file) for file, part in self._parts}
        for key, file in self._index.items():
            if (key, file) not in there:
                raise IncompleteCheckpointError(
                    f"{INDEX_NAME} says that this tensor is in this file, which lacks it: if one of the two is older "
                    "than the other, fetch both again; if the tensor is not needed, convert without the index.",
                    path=without_secrets(file),
                    fqn=key,
                )

    def entries(self) -> Sequence[TensorEntry | ObjectEntry]:
        return [
            TensorEntry(part.key, part.path, part.shape, part.dtype, partial(_read_range, *self._file(file), part))
            for file, part in self._parts
        ]

    def close(self) -> None:
        for filesystem in self._filesystems.values():
            filesystem.close()


def _read_range(filesystem: Filesystem, name: str, part: StoredPart, box: Box) -> torch.Tensor:
    """Read from the first to the last element of a box."""
    if not box.elements:
        return torch.empty(box.sizes, dtype=part.dtype)
    first, last = element_span(part.shape, box)
    data = bytearray((last - first) * part.dtype.itemsize)
    filesystem.read_into(name, part.start + first * part.dtype.itemsize, memoryview(data))
    flat = torch.frombuffer(data, dtype=torch.uint8).view(part.dtype)
    return flat.as_strided(box.sizes, strides_of(part.shape))


@dataclass(frozen=True)
class _File:
    name: str
    entries: tuple[TensorEntry, ...]

    @property
    def header(self) -> bytes:
        paths = {entry.key: entry.path for entry in self.entries}
        return header_of([(entry.key, entry.shape, entry.dtype) for entry in self.entries], paths)

    @property
    def data_nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


def write_safetensors(
    path: str,
    entries: Sequence[TensorEntry | ObjectEntry],
    moved: Callable[[int], None],
    *,
    source: Sequence[Any],
    max_shard_nbytes: int,
    overwrite: bool,
    storage_options: Mapping[str, Any],
) -> None:
    """Write tensors as safetensors."""
    tensors = _tensors(entries)
    if path.endswith(".safetensors"):
        directory, name = parent_and_name(path)
        files = [_File(name, tuple(tensors))]
    else:
        directory, files = path, _split(tensors, max_shard_nbytes)
    headers = [file.header for file in files]  # before anything is written: a key may be one that the format can't have
    with contextlib.closing(open_filesystem(directory, storage_options=storage_options)) as filesystem:
        if path.endswith(".safetensors"):
            if not overwrite and filesystem.file_nbytes(files[0].name) is not None:
                raise exists_already(filesystem, files[0].name)
            filesystem.create_directory()
            _write(filesystem, files[0], moved)
        else:
            _write_directory(filesystem, files, moved, _progress(source, headers), overwrite=overwrite)


def _write_directory(
    filesystem: Filesystem, files: Sequence[_File], moved: Callable[[int], None], progress: bytes, *, overwrite: bool
) -> None:
    names = filesystem.list_names()
    unfinished = PROGRESS_NAME in names and INDEX_NAME not in names and SINGLE_NAME not in names
    there = [name for name in names if is_name_of_model(name)]
    if there and not (overwrite or unfinished):
        raise exists_already(filesystem, there[0])
    old = [name for name in names if is_name_of_model(published_name(name) or name)]
    filesystem.create_directory()
    if len(files) == 1:
        _write(filesystem, files[0], moved)  # before the old ones go: huggingface's loaders look for this name first
        _remove(filesystem, [name for name in old if name != SINGLE_NAME])
        filesystem.remove([PROGRESS_NAME])
        return
    if overwrite or not unfinished or _known_progress(filesystem) != progress:
        filesystem.publish(PROGRESS_NAME, b"{}")  # of nothing, until nothing of an earlier one is there
        _remove(filesystem, old)
        filesystem.publish(PROGRESS_NAME, progress)
    for file in files:
        if _is_there(filesystem, file):
            moved(file.data_nbytes)
        else:
            _write(filesystem, file, moved)
    if _known_progress(filesystem) != progress:
        raise ConcurrentSaveError("Another conversion writes to this directory: choose another.", path=filesystem.path)
    filesystem.publish(INDEX_NAME, _index(files))
    filesystem.remove([PROGRESS_NAME])


def _remove(filesystem: Filesystem, names: Sequence[str]) -> None:
    """Remove files of an earlier conversion, the index first, so that none names what is gone."""
    filesystem.remove([name for name in names if name == INDEX_NAME])
    filesystem.remove([name for name in names if name != INDEX_NAME])


def _progress(source: Sequence[Any], headers: Sequence[bytes]) -> bytes:
    """Return what an attempt leaves that is cut off: only one of the same source, into the same files, goes on."""
    digest = hashlib.sha256(b"".join(headers)).hexdigest()
    return json.dumps({"source": source, "headers": digest}, indent=1).encode()


def _known_progress(filesystem: Filesystem) -> bytes:
    return filesystem.read_all(PROGRESS_NAME, limit_nbytes=MAX_HEADER_NBYTES)


def _tensors(entries: Sequence[TensorEntry | ObjectEntry]) -> list[TensorEntry]:
    objects = [entry.key for entry in entries if isinstance(entry, ObjectEntry)]
    if objects:
        shown = ", ".join(map(repr, objects[:3]))
        raise ConfigurationError(
            f"safetensors holds tensors only, and {len(objects)} keys are Python objects, such as {shown}: choose "
            "what to convert with prefix=, such as 'model.'."
        )
    tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
    for entry in tensors:
        if entry.dtype not in DTYPES:
            advice = "convert with dtype=" if entry.dtype.is_floating_point else "leave it out by prefix="
            raise ConfigurationError(f"safetensors has no {entry.dtype}: {advice}.", fqn=entry.key)
    return tensors


def _split(tensors: Sequence[TensorEntry], max_shard_nbytes: int) -> list[_File]:
    groups: list[list[TensorEntry]] = [[]]
    nbytes = 0
    for entry in tensors:
        if groups[-1] and nbytes + entry.nbytes > max_shard_nbytes:
            groups.append([])
            nbytes = 0
        groups[-1].append(entry)
        nbytes += entry.nbytes
    if len(groups) == 1:
        return [_File(SINGLE_NAME, tuple(groups[0]))]
    return [_File(shard_name(number, len(groups)), tuple(group)) for number, group in enumerate(groups, 1)]


def _is_there(filesystem: Filesystem, file: _File) -> bool:
    """True if an earlier attempt finished this file."""
    header = file.header
    nbytes = filesystem.file_nbytes(file.name)
    return nbytes == len(header) + file.data_nbytes and filesystem.read(file.name, 0, len(header)) == header


def _write(filesystem: Filesystem, file: _File, moved: Callable[[int], None]) -> None:
    with filesystem.open_replacement(file.name) as output:
        output.write(file.header)
        for entry in file.entries:
            for box in pieces(entry.shape, entry.dtype.itemsize):
                tensor = entry.read(box)
                if tensor.numel():
                    output.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
                moved(tensor.nbytes)


def _index(files: Sequence[_File]) -> bytes:
    return json.dumps(
        {
            "metadata": {"total_size": sum(file.data_nbytes for file in files)},
            "weight_map": {entry.key: file.name for file in files for entry in file.entries},
        },
        indent=2,
    ).encode()
