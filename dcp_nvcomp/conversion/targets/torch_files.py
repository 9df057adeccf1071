"""Files of `torch.save`. It takes the whole state at once, so all of it has to be in memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from dcp_nvcomp.calls.files import parent_and_name
from dcp_nvcomp.calls.flattening import nested
from dcp_nvcomp.conversion.entries import ObjectEntry, TensorEntry, paths_in_order
from dcp_nvcomp.errors import CheckpointExistsError
from dcp_nvcomp.storage.base import OutputStream
from dcp_nvcomp.storage.open import open_filesystem


def write_torch(
    path: str,
    entries: Sequence[TensorEntry | ObjectEntry],
    moved: Callable[[int], None],
    *,
    overwrite: bool,
    storage_options: Mapping[str, Any],
) -> None:
    """Write a file of `torch.save` with nested dicts and lists; it appears, or is replaced, once it is complete."""
    directory, name = parent_and_name(path)
    filesystem = open_filesystem(directory, storage_options=storage_options)
    try:
        if not overwrite and filesystem.file_nbytes(name) is not None:
            raise CheckpointExistsError(
                "There is such a file already; overwrite=True, or --overwrite, replaces it.",
                path=filesystem.location(name),
            )
        state = nested(paths_in_order(entries), _values(entries, moved))
        filesystem.create_directory()
        output = filesystem.open_replacement(name)
        try:
            _save(state, output)
            output.close()
        except BaseException:
            output.abort()
            raise
    finally:
        filesystem.close()


def _values(entries: Sequence[TensorEntry | ObjectEntry], moved: Callable[[int], None]) -> dict[str, Any]:
    """Read everything; what is tied in the source is one tensor."""
    values: dict[str, Any] = {}
    tied: dict[Hashable, torch.Tensor] = {}
    for entry in entries:
        if isinstance(entry, ObjectEntry):
            values[entry.key] = entry.reader.value()
            continue
        memory = entry.reader.memory
        tensor = None if memory is None else tied.get((memory, entry.dtype))
        if tensor is None:
            tensor = entry.read_all()
        if memory is not None:
            tied[memory, entry.dtype] = tensor
        values[entry.key] = tensor
        moved(tensor.nbytes)
    return values


def _save(state: Any, output: OutputStream) -> None:
    file = _File(output)
    try:
        torch.save(state, file)  # type: ignore[arg-type]  # it needs no more of a file than these methods
    except Exception:  # torch may raise another error than the one that stopped it
        if file.error is not None:
            raise file.error from None
        raise


class _File:
    """An output stream as `torch.save` writes to files: front to back."""

    def __init__(self, output: OutputStream) -> None:
        self._output = output
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            view = memoryview(data).cast("B")
            self._output.write(view)
        except BaseException as error:
            self.error = error
            raise
        return len(view)

    def flush(self) -> None:
        pass
