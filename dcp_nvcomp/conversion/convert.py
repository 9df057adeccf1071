"""Convert from one checkpoint format to another; all but files of torch.save in pieces of at most 32 MiB."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dcp_nvcomp.calls.suggestions import missing_prefix
from dcp_nvcomp.calls.values import Path, fqn_of
from dcp_nvcomp.conversion.checkpoints import (
    CheckpointSource,
    ConvertingPlanner,
    is_name_of_checkpoint,
    write_dcp,
    write_ours,
)
from dcp_nvcomp.conversion.entries import Source, TensorEntry, check_no_overlap, selected, stamps
from dcp_nvcomp.conversion.safetensors import SafetensorsSource, write_safetensors
from dcp_nvcomp.conversion.safetensors_format import is_name_of_model
from dcp_nvcomp.conversion.torch_files import CompressedFileSource, TorchFileSource, write_torch
from dcp_nvcomp.errors import CheckpointNotFoundError, ConfigurationError
from dcp_nvcomp.format.recognition import TORCH_SUFFIXES, recognize
from dcp_nvcomp.options import check_choice
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.open import open_filesystem, real_place

Format = Literal["dcp-nvcomp", "dcp", "safetensors", "torch"]


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

    Objects are not loaded on the way to a checkpoint: one that would run code gets there as it is.

    Args:
        source: a checkpoint of this package or of stock DCP, a file of `torch.save` or of
            `save_compressed_checkpoint`, or a safetensors file or directory of them: a local path or any fsspec URL.
        destination: a directory, or for `torch` and a single safetensors file a file: a path or URL.
        to: the format to write; by default what the destination's suffix says, else `"dcp-nvcomp"`.
        prefix: convert only keys that begin with it, such as `"model."`, and cut it off.
        dtype: what to convert tensors of floating-point numbers to.
        max_shard_nbytes: how large a safetensors file of a directory may be, unless it holds a single tensor.
        codec: of `NvcompWriter`, for `"dcp-nvcomp"`.
        overwrite: True if what is at the destination may be replaced. A checkpoint or a file is, once the new one is
            complete; of a directory of several safetensors files the old ones go first.
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

    Examples:
        >>> import tempfile, torch, dcp_nvcomp
        >>> path = tempfile.mkdtemp()
        >>> _ = dcp_nvcomp.save({"model": {"w": torch.ones(3)}}, f"{path}/step", no_dist=True)
        >>> dcp_nvcomp.convert(f"{path}/step", f"{path}/model.safetensors", prefix="model.").tensors
        1
    """
    source, destination = os.fspath(source), os.fspath(destination)
    target = check_choice("to", _format_of(destination) if to is None else to, Format)
    options = dict(storage_options or {})
    if real_place(source) == real_place(destination):
        raise ConfigurationError("The source and the destination are the same place.")
    reading = dict(source_options if source_options is not None else options)
    opened = _open(source, reading)
    try:
        check_no_overlap(opened.files, destination, _names_in(destination, target))
        entries = selected(opened.entries(), prefix=prefix, dtype=dtype)
        if not entries:
            raise _nothing_selected(opened, prefix)
        tensors = [entry for entry in entries if isinstance(entry, TensorEntry)]
        total_nbytes = sum(entry.nbytes for entry in tensors)
        moved = _Moved(total_nbytes, progress)
        planner = ConvertingPlanner(entries, moved, has_keys=opened.has_keys)
        if target == "dcp-nvcomp":
            write_ours(destination, planner, codec=codec, overwrite=overwrite, storage_options=options)
        elif target == "dcp":
            write_dcp(destination, planner, overwrite=overwrite, storage_options=options)
        elif target == "safetensors":
            write_safetensors(
                destination,
                entries,
                moved,
                source=[*stamps(opened.files, reading), prefix],
                max_shard_nbytes=max_shard_nbytes,
                overwrite=overwrite,
                storage_options=options,
            )
        else:
            if not opened.has_keys:
                _warn_of_text([entry.path for entry in entries])
            write_torch(destination, entries, moved, overwrite=overwrite, storage_options=options)
        return Conversion(
            opened.path, without_secrets(destination), target, len(tensors), len(entries) - len(tensors), total_nbytes
        )
    finally:
        opened.close()


def _warn_of_text(paths: Iterable[Path]) -> None:
    """Warn of keys that are text because it is not known that they were numbers."""
    odd = next((path for path in paths if any(isinstance(part, str) and part.isdecimal() for part in path)), None)
    if odd is not None:
        warnings.warn(
            f"The source does not say which keys of dicts were numbers, so those of {fqn_of(odd)!r} stay text. "
            "load_state_dict of an optimizer passes over such state: make ints of its keys first.",
            UserWarning,
            stacklevel=3,
        )


class _Moved:
    """Adds up what was converted, and reports it."""

    def __init__(self, total_nbytes: int, report: Callable[[int, int], None] | None) -> None:
        self._done_nbytes, self._total_nbytes, self._report = 0, total_nbytes, report

    def __call__(self, nbytes: int) -> None:
        self._done_nbytes += nbytes
        if self._report is not None:
            self._report(self._done_nbytes, self._total_nbytes)


def _nothing_selected(source: Source, prefix: str) -> ConfigurationError:
    keys = [entry.key for entry in source.entries()]
    says = missing_prefix(prefix, keys) if prefix and keys else "The checkpoint has no keys."
    return ConfigurationError(says, path=source.path)


def _format_of(destination: str) -> str:
    if destination.endswith(".safetensors"):
        return "safetensors"
    return "torch" if destination.endswith(TORCH_SUFFIXES) else "dcp-nvcomp"


def _names_in(destination: str, target: str) -> Callable[[str], bool] | None:
    """Return which files of the destination a conversion may write or remove; None if it is a single file."""
    if target == "torch" or (target == "safetensors" and destination.endswith(".safetensors")):
        return None
    return is_name_of_model if target == "safetensors" else is_name_of_checkpoint


def _open(path: str, options: dict[str, Any]) -> Source:
    with contextlib.closing(open_filesystem(path, storage_options=options)) as filesystem:
        found = recognize(filesystem)
    if found.kind == "checkpoint":
        return CheckpointSource(path, **options)
    # a file that is damaged from its first byte on is what its name says
    if found.kind in ("safetensors", "safetensors files") or (
        found.kind == "other file" and path.endswith(".safetensors")
    ):
        return SafetensorsSource(path, **options)
    if found.kind in ("torch file", "old torch file") or (found.kind == "other file" and path.endswith(TORCH_SUFFIXES)):
        return TorchFileSource(path, **options)
    if found.kind == "one file":
        return CompressedFileSource(path, **options)
    if found.kind in ("nothing", "incomplete"):
        nothing = "There is nothing to convert: no checkpoint, no safetensors files, no file of torch.save."
        raise CheckpointNotFoundError(nothing, path=without_secrets(path))
    raise ConfigurationError(
        f"This is {found.what}, not a checkpoint, safetensors files or a file of torch.save: {found.advice}.",
        path=without_secrets(path),
    )
