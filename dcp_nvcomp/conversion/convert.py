"""convert: from one checkpoint format to another, streamed.

    source: this package or stock DCP (a directory with `.metadata`), torch.save (a file), safetensors (a file or files)
      -> entries -> prefix, dtype ->
    target: dcp-nvcomp, dcp, safetensors, torch

All but files of torch.save are read and written in pieces of 32 MiB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from dcp_nvcomp.conversion.entries import ObjectEntry, Source, TensorEntry, selected
from dcp_nvcomp.conversion.sources.checkpoints import CheckpointSource
from dcp_nvcomp.conversion.sources.safetensors import SafetensorsSource
from dcp_nvcomp.conversion.sources.torch_files import TorchFileSource
from dcp_nvcomp.conversion.targets.checkpoints import write_dcp, write_ours
from dcp_nvcomp.conversion.targets.safetensors import write_safetensors
from dcp_nvcomp.conversion.targets.torch_files import write_torch
from dcp_nvcomp.errors import CheckpointNotFoundError, ConfigurationError
from dcp_nvcomp.format.names import METADATA_NAME, rank_of_metadata_name
from dcp_nvcomp.options import check_choice
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.open import open_filesystem, place_of

__all__ = ["Conversion", "Format", "convert"]

Format = Literal["dcp-nvcomp", "dcp", "safetensors", "torch"]

_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Conversion:
    """Result of `convert`.

    Attributes:
        source: what was read.
        destination: what was written.
        format: its format.
        tensors: how many tensors were converted.
        objects: how many Python objects.
        nbytes: size of the tensors in memory.
    """

    source: str
    destination: str
    format: str
    tensors: int
    objects: int
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        return {"schema": 1, **vars(self)}


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Format | None = None,
    prefix: str = "",
    dtype: torch.dtype | None = None,
    max_shard_nbytes: int = 5_000_000_000,
    codec: Any = "auto",
    overwrite: bool = False,
    source_options: Mapping[str, Any] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Convert a checkpoint. Values keep their bits, unless another dtype is asked for.

    Args:
        source: a checkpoint of this package or of stock DCP, a file of `torch.save`, or a safetensors file or directory
            of them: a local path or any fsspec URL.
        destination: a directory, or for `torch` and a single safetensors file a file: a path or URL.
        to: the format to write; by default what the destination's suffix says, else `"dcp-nvcomp"`.
        prefix: convert only keys that begin with it, such as `"model."`, and cut it off.
        dtype: what to convert tensors of floating-point numbers to.
        max_shard_nbytes: how large a safetensors file of a directory may be, unless it holds a single tensor.
        codec: of `NvcompWriter`, for `"dcp-nvcomp"`.
        overwrite: True if a checkpoint at the destination may be replaced.
        source_options: for the source's fsspec filesystem; by default `storage_options`.
        storage_options: for the destination's fsspec filesystem.
        progress: called with the bytes that were converted, and of how many.

    Returns:
        What was converted.

    Raises:
        ConfigurationError: an option can't work, or the format can't hold a value.
        CheckpointNotFoundError: there is no source.
        CheckpointExistsError: there is something at the destination, and it may not be replaced.
        UnsafeObjectError: an object would run code, and has to be loaded to be written.
        CheckpointError: the source can't be read.

    Example:
        >>> import tempfile, torch, dcp_nvcomp
        >>> path = tempfile.mkdtemp()
        >>> _ = dcp_nvcomp.save({"model": {"w": torch.ones(3)}}, f"{path}/step", no_dist=True)
        >>> dcp_nvcomp.convert(f"{path}/step", f"{path}/model.safetensors", prefix="model.").tensors
        1
    """
    source, destination = os.fspath(source), os.fspath(destination)
    target = check_choice("to", _format_of(destination) if to is None else to, Format)
    options = dict(storage_options or {})
    if place_of(source).rstrip("/") == place_of(destination).rstrip("/"):
        raise ConfigurationError("The source and the destination are the same place.")
    opened = _open(source, dict(source_options if source_options is not None else options))
    try:
        entries = selected(opened.entries(), prefix=prefix, dtype=dtype)
        if not entries:
            raise ConfigurationError(f"No key begins with {prefix!r}." if prefix else "The checkpoint has no keys.")
        tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
        total_nbytes = sum(entry.nbytes for entry in tensors)
        moved = _Moved(total_nbytes, progress)
        _write(target, destination, entries, moved, options, max_shard_nbytes, codec, overwrite)
        return Conversion(
            opened.path, without_secrets(destination), target, len(tensors), len(entries) - len(tensors), total_nbytes
        )
    finally:
        opened.close()


class _Moved:
    """Adds up what was converted, and tells of it."""

    def __init__(self, total_nbytes: int, tell: Callable[[int, int], None] | None) -> None:
        self._done_nbytes, self._total_nbytes, self._tell = 0, total_nbytes, tell

    def __call__(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        if self._tell is not None:
            self._tell(self._done_nbytes, self._total_nbytes)


def _format_of(destination: str) -> str:
    if destination.endswith(".safetensors"):
        return "safetensors"
    return "torch" if destination.endswith(_TORCH_SUFFIXES) else "dcp-nvcomp"


def _open(path: str, options: dict[str, Any]) -> Source:
    if path.endswith(".safetensors"):
        return SafetensorsSource(path, **options)
    if path.endswith(_TORCH_SUFFIXES):
        return TorchFileSource(path, **options)
    filesystem = open_filesystem(path, storage_options=options)
    try:
        names = filesystem.list_names()
    finally:
        filesystem.close()
    if any(name == METADATA_NAME or rank_of_metadata_name(name) is not None for name in names):
        return CheckpointSource(path, **options)
    if any(name.endswith(".safetensors") for name in names):
        return SafetensorsSource(path, **options)
    if not names and not path.endswith("/"):
        try:
            return TorchFileSource(path, **options)  # perhaps a file of another suffix
        except CheckpointNotFoundError:
            pass
    raise CheckpointNotFoundError(
        "There is nothing to convert: no checkpoint, no safetensors files, no file of torch.save.",
        path=without_secrets(path),
    )


def _write(
    target: str,
    destination: str,
    entries: list[TensorEntry | ObjectEntry],
    moved: Callable[[int], None],
    options: dict[str, Any],
    max_shard_nbytes: int,
    codec: Any,
    overwrite: bool,
) -> None:
    if target == "dcp-nvcomp":
        write_ours(destination, entries, moved, codec=codec, overwrite=overwrite, storage_options=options)
    elif target == "dcp":
        write_dcp(destination, entries, moved, overwrite=overwrite, storage_options=options)
    elif target == "safetensors":
        write_safetensors(
            destination,
            entries,
            moved,
            max_shard_nbytes=max_shard_nbytes,
            overwrite=overwrite,
            storage_options=options,
        )
    else:
        write_torch(destination, entries, moved, overwrite=overwrite, storage_options=options)
