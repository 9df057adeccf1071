"""torch_checkpointing: a storage whose files are compressed and checked, and which commits on any storage.

    CheckpointManager.Config(storage_config=NvcompStorageConfig("s3://bucket/run"))

The library writes files under `tmp_<id>`, waits for all ranks, and renames that to `<id>` on rank 0. Here:

    tmp_<id>/model_0.pt     -> <id>/.data-<job>/model_0.pt   a compressed stream (dcp_nvcomp/streams)
    rename(tmp_<id>, <id>)  -> <id>/.commit.json             its files, their sizes and CRCs; is never replaced
    <id>/model_0.pt         -> .commit.json                  names the file; what it does not name is not there

`<job>` is the same on all ranks and another one in the next job, so what a killed save has left is never taken for a
part of the next. Where nothing was committed, files are read as they are: checkpoints of the library's own storage.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion
from torch.utils.serialization import config as serialization_config
from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from dcp_nvcomp.conversion.safetensors_format import parse_header
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptDataError,
    StorageError,
)
from dcp_nvcomp.format.data_file import DataFileRef, find_data_file
from dcp_nvcomp.format.framing import HEADER_MAGIC
from dcp_nvcomp.integrations.torch_checkpointing_commit import (
    COMMIT_NAME,
    Commit,
    is_data,
    is_temporary,
    read_commit,
    write_commit,
)
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import place_of
from dcp_nvcomp.streams.reader import PlainReader, StreamIndex, StreamReader
from dcp_nvcomp.streams.writer import StreamWriter, tensor_of

_LENGTH_NBYTES = 8
_REMEMBERED, _REMEMBERED_NBYTES = 16, 4 << 20


class NvcompStorageConfig(StorageConfig):
    """Configure torch_checkpointing's `CheckpointManager` to write compressed files. All ranks make one together.

    Make it after `init_process_group`: the ranks agree on where the files of this job go.

    Args:
        path: what the ids of checkpoints are relative to: a local path or any fsspec URL.
        temp_dir_prefix: that of `CheckpointWriterConfig`.
        storage_options: of the storage, such as `endpoint_url`.
        **options: of `NvcompWriter`, such as `codec` and `thread_count`.

    Raises:
        ConfigurationError: an option can't work or is unknown, or the process group is missing.

    Examples:
        >>> from torch_checkpointing import CheckpointManager  # doctest: +SKIP
        >>> from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorageConfig  # doctest: +SKIP
        >>> config = CheckpointManager.Config(storage_config=NvcompStorageConfig("checkpoints"))  # doctest: +SKIP
        >>> manager = CheckpointManager(config)  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        temp_dir_prefix: str = "tmp_",
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.path, self.temp_dir_prefix = place_of(path), temp_dir_prefix
        self.options, self.storage_options = options, dict(storage_options or {})
        NvcompWriter(self.path, **options, **self.storage_options)  # fail at once on wrong ones
        job = [uuid.uuid4().hex]
        if dist.is_initialized():
            dist.broadcast_object_list(job, src=0)
        elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigurationError(
                "Make NvcompStorageConfig after torch.distributed.init_process_group, on all ranks: they agree on "
                "where their files go."
            )
        self.job = job[0]

    def create_storage(self) -> NvcompStorage:
        """Return a storage. torch_checkpointing calls this, in the process that writes too."""
        return NvcompStorage(self)


class NvcompStorage(Storage):
    """The storage of `NvcompStorageConfig`. Paths are relative to the config's, or begin with it."""

    def __init__(self, config: NvcompStorageConfig) -> None:
        self._config = config
        self._root = config.path.rstrip("/")
        self._save_options = NvcompWriter(config.path, **config.options, **config.storage_options).options
        self._load_options = NvcompReader(config.path, **config.storage_options).load_options
        self._commits: dict[str, Commit] = {}
        self._indexes = dict[tuple[str, DataFileRef], StreamIndex]()
        self._made = set[str]()  # directories of saves that this process has begun

    @property
    def mmap_fill_workers(self) -> int:
        """One: a read decodes on several threads by itself."""
        return 1

    def _open(self, directory: str) -> contextlib.closing[Filesystem]:
        return contextlib.closing(self._save_options.open(directory))

    def _relative(self, path: Path) -> str:
        """Return a path relative to the config's; `pathlib` turns `s3://` into `s3:/`."""
        text, root = path.as_posix(), Path(self._root).as_posix()
        if text == root:
            return ""
        if text.startswith(root + "/"):
            return text[len(root) + 1 :]
        if path.is_absolute() or re.match(r"\w+:/", text):
            raise ConfigurationError(f"The path is not below that of NvcompStorageConfig, {self._root}.", path=text)
        return text

    def _url(self, path: Path) -> str:
        relative = self._relative(path)
        return f"{self._root}/{relative}" if relative else self._root

    def _staged(self, path: Path, *, is_directory: bool = False) -> tuple[str, str] | None:
        """Return the directory that `tmp_<id>` is renamed to and the path below it; None for any other path."""
        parts, prefix = self._relative(path).split("/"), self._config.temp_dir_prefix
        for at in reversed(range(len(parts) - (0 if is_directory else 1))):
            if parts[at].startswith(prefix) and parts[at] != prefix:
                final = "/".join([self._root, *parts[:at], parts[at][len(prefix) :]])
                return final, "/".join(parts[at + 1 :])
        return None

    def _is_committed(self, final: str) -> bool:
        with self._open(final) as filesystem:
            return filesystem.file_nbytes(COMMIT_NAME) is not None

    def _refuse_committed(self, path: Path, *, is_directory: bool = False) -> None:
        """Raise CheckpointExistsError for what would change a committed checkpoint."""
        staged = self._staged(path, is_directory=is_directory)
        if self._is_committed(staged[0]) if staged is not None else self._find_commit(path) is not None:
            raise CheckpointExistsError(
                "A checkpoint was committed here, which nothing changes: remove it, or take another id.",
                path=self._url(path),
            )

    @property
    def _data_name(self) -> str:
        return f".data-{self._config.job}"

    def _data(self, final: str) -> str:
        return f"{final}/{self._data_name}"

    def _place(self, path: Path) -> tuple[str, str]:
        """Return the directory and the name of a file that was not committed."""
        staged = self._staged(path)
        if staged is not None:
            return self._data(staged[0]), quote(staged[1], safe="")
        parent, _, name = self._url(path).rpartition("/")
        return parent, name

    def _find_commit(self, path: Path) -> tuple[Commit, str] | None:
        """Return the committed checkpoint that a path is in or names, and the path in it."""
        parts = [part for part in self._relative(path).split("/") if part]
        for count in range(len(parts), 0, -1):
            directory = "/".join([self._root, *parts[:count]])
            commit = self._commits.get(directory) or read_commit(self._save_options.open, directory)
            if commit is not None:
                self._commits[directory] = commit
                return commit, "/".join(parts[count:])
        return None

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """Return a file, decoded, of which only what is read is fetched."""
        found = self._find_commit(path)
        if found is not None:
            commit, inner = found
            if inner not in commit.files:
                raise CheckpointNotFoundError("The checkpoint has no such file.", path=self._url(path))
            return self._stream(commit.data, commit.files[inner])
        directory, name = self._place(path)
        with self._open(directory) as filesystem:
            nbytes = _nbytes(filesystem, name)
            if filesystem.read(name, 0, min(nbytes, len(HEADER_MAGIC))) == HEADER_MAGIC:
                return self._stream(directory, find_data_file(filesystem, name, nbytes))
        return PlainReader(self._save_options.open(directory), name, nbytes)

    def _stream(self, directory: str, file: DataFileRef) -> StreamReader:
        """Open a stream. What its file says of it is remembered: a load opens it for its size, and for each range."""
        with ExitStack() as opened:
            filesystem = opened.enter_context(self._open(directory))
            index = self._indexes.get((directory, file))
            if index is None:
                index = StreamIndex.read(filesystem, file, self._load_options)
                if len(self._indexes) >= _REMEMBERED:
                    self._indexes.clear()
                if len(index.literals) <= _REMEMBERED_NBYTES:
                    self._indexes[directory, file] = index
            opened.pop_all()
            return StreamReader(filesystem, index, self._load_options)

    def stream_write(self, path: Path) -> Any:
        """Return a stream for a file; without its tensors, all is compressed as bytes."""
        return self.get_write_stream(path, None)

    def get_write_stream(self, path: Path, data: object) -> Any:
        """Return the stream that torch.save writes `data` to."""
        self._refuse_committed(path)
        directory, name = self._place(path)
        return _Stream(f"{directory}/{name}", data, **self._config.options, **self._config.storage_options)

    def write(self, path: Path, data: Any) -> None:
        """Write a whole file: JSON, bytes, or safetensors, whose tensors are found by their header."""
        with memoryview(data).cast("B") as view:
            tensors = _safetensors(view) or {"bytes": tensor_of(view)}
            with self.get_write_stream(path, tensors) as stream:
                stream.write(view)

    def delete(self, path: Path) -> None:
        """Remove a file that was not committed."""
        self._refuse_committed(path)
        directory, name = self._place(path)
        with self._open(directory) as filesystem:
            _nbytes(filesystem, name)
            filesystem.remove([name])

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make a directory, with its parents; one of `tmp_<id>` once in a job, as ranks may be in another save of it.

        Raises:
            CheckpointExistsError: a checkpoint was committed there, or this process has begun to save it before.
        """
        self._refuse_committed(path, is_directory=True)
        staged, directory = self._staged(path, is_directory=True), self._url(path)
        if staged is not None:
            if directory in self._made:
                raise CheckpointExistsError(
                    "This job has begun to save here before: take another id, or make a new NvcompStorageConfig.",
                    path=directory,
                )
            self._made.add(directory)
            directory = self._data(staged[0])
        with self._open(directory) as filesystem:
            filesystem.create_directory()

    def rmdir(self, path: Path) -> None:
        """Remove a directory and all that is in it; a checkpoint stops being one first."""
        staged, directory = self._staged(path, is_directory=True), self._url(path)
        if staged is not None:
            self._refuse_committed(path, is_directory=True)
            directory = self._data(staged[0])
        self._commits.pop(directory, None)
        self._remove(directory)

    def _remove(self, directory: str) -> None:
        with self._open(directory) as filesystem:
            filesystem.remove([COMMIT_NAME])
            filesystem.remove(file.name for file in filesystem.list_below().files)
        self._remove_folders(directory)

    def _remove_folders(self, directory: str) -> None:
        with self._open(directory) as filesystem:
            filesystem.refuse_link()
            for folder in filesystem.list_folders():
                self._remove_folders(f"{directory}/{folder}")
            filesystem.remove_directory()

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """Commit the directory `tmp_<id>` as `<id>`, or move a file.

        Raises:
            OSError: what is at `dst_path` is in the way, or there is nothing at `src_path`.
        """
        staged = self._staged(src_path, is_directory=True)
        if staged is not None and not staged[1]:
            final = staged[0]
            if final != self._url(dst_path):
                raise StorageError(f"This can only be renamed to {final}.", path=str(dst_path), errno=errno.ENOTSUP)
            for folder in write_commit(self._save_options.open, final, self._data_name):
                with contextlib.suppress(CheckpointError):  # of saves that never came to an end
                    self._remove(f"{final}/{folder}")
        elif is_directory:
            raise StorageError(
                f"Only a directory {self._config.temp_dir_prefix}<id> can be renamed: give NvcompStorageConfig the "
                "temp_dir_prefix of CheckpointWriterConfig.",
                path=str(src_path),
                errno=errno.ENOTSUP,
            )
        else:
            self._move_file(src_path, dst_path)

    def _move_file(self, src_path: Path, dst_path: Path) -> None:
        self._refuse_committed(src_path)
        self._refuse_committed(dst_path)
        if self.isdir(dst_path):
            raise StorageError("A directory is in the way of a file.", path=str(dst_path), errno=errno.EISDIR)
        (source, name), (target, new_name) = self._place(src_path), self._place(dst_path)
        with self._open(source) as filesystem, self._open(target) as there:
            nbytes = _nbytes(filesystem, name)
            if (source, name) == (target, new_name):
                return
            with there.open_replacement(new_name) as output:
                for start in range(0, nbytes, filesystem.read_nbytes):
                    output.write(filesystem.read(name, start, min(start + filesystem.read_nbytes, nbytes)))
            filesystem.remove([name])

    def _names(self, path: Path, *, is_directory: bool) -> tuple[str, list[str]] | None:
        """Return the path of something in a checkpoint, and those of the checkpoint's files; None elsewhere."""
        staged = self._staged(path, is_directory=is_directory)
        if staged is not None:
            if self._is_committed(staged[0]):  # what was there is elsewhere now
                return staged[1], []
            with self._open(self._data(staged[0])) as filesystem:
                return staged[1], [unquote(name) for name in filesystem.list_names() if not is_temporary(name)]
        found = self._find_commit(path)
        return None if found is None else (found[1], list(found[0].files))

    def ls(self, path: Path) -> list[str]:
        """Return the names of what is in a directory."""
        found = self._names(path, is_directory=True)
        if found is not None:
            below = f"{found[0]}/" if found[0] else ""
            return sorted({name[len(below) :].split("/")[0] for name in found[1] if name.startswith(below)})
        with self._open(self._url(path)) as filesystem:
            names = [*filesystem.list_names(), *filesystem.list_folders()]
            return sorted({name for name in names if not is_temporary(name) and not is_data(name)})

    def exists(self, path: Path) -> bool:
        """Return True if there is such a file, or a directory with something in it. A load begins with this."""
        self._commits.pop(self._url(path), None)
        return self.isdir(path) or self._is_file(path)

    def _is_file(self, path: Path) -> bool:
        found = self._names(path, is_directory=False)
        if found is not None:
            return found[0] in found[1]
        directory, name = self._place(path)
        with self._open(directory) as filesystem:
            return filesystem.file_nbytes(name) is not None

    def isdir(self, path: Path) -> bool:
        """Return True if there is such a directory with something in it; what was never committed is not there."""
        if self._url(path) in self._made:  # the library does not commit, in silence, what is not there
            staged = self._staged(path, is_directory=True)
            return staged is not None and not self._is_committed(staged[0])
        return bool(self.ls(path))

    def getsize(self, path: Path) -> int:
        """Return the size of a file, decoded."""
        with self.stream_read(path) as stream:
            return stream.seek(0, io.SEEK_END)

    def remap_path(self, path: Path) -> str:
        """Return where a path is."""
        return self._url(path)


class _Stream(StreamWriter):
    """A stream to which torch.save writes without CRCs of its own: blocks have theirs, which reads compare."""

    def __enter__(self) -> StreamWriter:
        self._saving = ExitStack()
        if TorchVersion(torch.__version__) >= "2.12":  # before, this was for all threads
            self._saving.enter_context(serialization_config.patch("save.compute_crc32", False))  # type: ignore[attr-defined]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        try:
            self._saving.close()
        finally:
            super().__exit__(*error)


def _nbytes(filesystem: Filesystem, name: str) -> int:
    nbytes = filesystem.file_nbytes(name)
    if nbytes is None:
        raise CheckpointNotFoundError("There is no such file.", path=filesystem.location(name))
    return nbytes


def _safetensors(view: memoryview) -> dict[str, torch.Tensor]:
    """Return the tensors in bytes that are a safetensors file; none in others."""
    begin = _LENGTH_NBYTES + int.from_bytes(view[:_LENGTH_NBYTES], "little")
    if begin > len(view):
        return {}
    try:
        parts = parse_header(bytes(view[_LENGTH_NBYTES:begin]), path="", file_nbytes=len(view))
    except CorruptDataError:
        return {}
    return {part.key: tensor_of(view[part.start : part.stop], part.dtype).view(part.shape) for part in parts}
