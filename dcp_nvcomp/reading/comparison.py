"""Compare two checkpoints: keys, shapes, dtypes and, bit for bit, values."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_nvcomp.calls.tables import Shown, Table, counted, left
from dcp_nvcomp.calls.values import Path
from dcp_nvcomp.engines.tensors import dtype_name, without_lazy_bits
from dcp_nvcomp.errors import UnsafeObjectError
from dcp_nvcomp.format.metadata.paths import has_keys, paths_of
from dcp_nvcomp.reading.checkpoint import Checkpoint, open_checkpoint

# Torch computes nothing with their elements.
_BITS_ONLY: Final = ("float4_e2m1fn_x2",)


@dataclass(frozen=True)
class Difference:
    """How one key differs."""

    fqn: str
    kind: str
    what: str  # both sides, in a few words
    elements: int | None = None  # how many elements differ in their bits; None if values were not compared
    max_difference: float | None = None


@dataclass(frozen=True)
class Comparison(Shown):
    """Result of `compare`.

    Attributes:
        a: the first checkpoint.
        b: the second one.
        equal: how many keys are equal.
        differences: of the others, in the order of the first checkpoint's keys.
        values: whether values were compared too, not only shapes and dtypes.
    """

    a: str
    b: str
    equal: int
    differences: tuple[Difference, ...]
    values: bool = True

    @property
    def is_equal(self) -> bool:
        """True if nothing differs."""
        return not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        differences = [
            {**vars(one), "max_difference": None if one.max_difference is None else _json_number(one.max_difference)}
            for one in self.differences
        ]
        return {
            "schema": 1,
            "a": self.a,
            "b": self.b,
            "equal": self.equal,
            "values": self.values,
            "differences": differences,
        }

    def shown(self) -> Iterator[str | Table]:
        """Return what it prints: the keys that differ, and how many are equal."""
        if self.differences:
            rows = [(one.fqn, one.kind, one.what) for one in self.differences]
            yield Table([left("key"), left("differs"), left("how", 1)], rows)
        differ = f", {len(self.differences)} differ" if self.differences else ""
        compared = "values" if self.values else "shapes and dtypes"
        are, their = ("is", "its") if self.equal == 1 else ("are", "their")
        yield f"{counted(self.equal, 'key')} {are} equal in {their} {compared}{differ}."


def _json_number(value: float) -> float | str:
    return value if abs(value) < float("inf") else str(value)


def compare(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    values: bool = True,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints, of this package or of stock DCP.

    Args:
        a: the first one: a local path or any fsspec URL.
        b: the second one.
        values: False to compare keys, shapes and dtypes only, which reads no tensor.
        storage_options: for the fsspec filesystems of both.
        progress: called with the bytes that were compared, and of how many.

    Raises:
        CheckpointError: one of them can't be read.
    """
    options = dict(storage_options or {})
    with open_checkpoint(a, **options) as first, open_checkpoint(b, **options) as second:
        found = {fqn: _described_difference(fqn, first, second) for fqn in dict.fromkeys([*first, *second])}
        for fqn, difference in _differing_places(first, second).items():
            found[fqn] = found[fqn] or difference
        if values:
            same = [fqn for fqn, difference in found.items() if difference is None]
            found.update(_differing_values(same, first, second, progress))
        differences = tuple(difference for difference in found.values() if difference is not None)
        return Comparison(first.path, second.path, len(found) - len(differences), differences, values)


def _described_difference(fqn: str, first: Checkpoint, second: Checkpoint) -> Difference | None:
    if fqn not in second:
        return Difference(fqn, "only in a", _described(first.metadata.state_dict_metadata[fqn]))
    if fqn not in first:
        return Difference(fqn, "only in b", _described(second.metadata.state_dict_metadata[fqn]))
    one, other = first.metadata.state_dict_metadata[fqn], second.metadata.state_dict_metadata[fqn]
    what = f"{_described(one)} and {_described(other)}"
    if isinstance(one, TensorStorageMetadata) != isinstance(other, TensorStorageMetadata):
        return Difference(fqn, "kind", what)
    if isinstance(one, TensorStorageMetadata) and isinstance(other, TensorStorageMetadata):
        if one.size != other.size:
            return Difference(fqn, "shape", what)
        if one.properties.dtype != other.properties.dtype:
            return Difference(fqn, "dtype", what)
    return None


def _differing_places(first: Checkpoint, second: Checkpoint) -> dict[str, Difference]:
    """Return where the keys of dicts are others, as far as both checkpoints say what they were."""
    if not (has_keys(first.metadata) and has_keys(second.metadata)):
        return {}
    ours, theirs = paths_of(first.metadata), paths_of(second.metadata)
    found = {}
    for fqn in ours.keys() & theirs.keys():
        one, other = map(_shown_place, (ours[fqn], theirs[fqn]))
        if len(ours[fqn]) == len(theirs[fqn]) and one != other:
            found[fqn] = Difference(fqn, "place", f"{one} and {other}")
    return found


def _shown_place(path: Path) -> str:
    parts = [f"position {part}" if isinstance(part, int) else repr(getattr(part, "value", part)) for part in path]
    return f"[{']['.join(parts)}]"


def _described(item: Any) -> str:
    if isinstance(item, TensorStorageMetadata):
        return f"{dtype_name(item.properties.dtype)} {list(item.size)}"
    return "a Python object"


def _differing_values(
    fqns: Sequence[str], first: Checkpoint, second: Checkpoint, progress: Callable[[int, int], None] | None
) -> dict[str, Difference]:
    found = {}
    total_nbytes = sum(getattr(first.stored(fqn), "nbytes", 0) for fqn in fqns)
    done_nbytes = 0
    for group in first.groups(fqns):
        objects = [fqn for fqn in group if first.stored(fqn) is None]
        tensors = [fqn for fqn in group if first.stored(fqn) is not None]
        ours, theirs = first.read(tensors), second.read(tensors)
        for fqn in tensors:
            done_nbytes += ours[fqn].nbytes
            difference = _tensor_difference(fqn, ours.pop(fqn), theirs.pop(fqn))
            if difference is not None:
                found[fqn] = difference
        for fqn in objects:
            difference = _object_difference(fqn, first, second)
            if difference is not None:
                found[fqn] = difference
        if progress is not None:
            progress(done_nbytes, total_nbytes)
    return found


def _tensor_difference(fqn: str, one: torch.Tensor, other: torch.Tensor) -> Difference | None:
    differs = differing_elements(one, other)
    count = int(differs.sum())
    if not count:
        return None
    what = f"{count} of {one.numel()} elements differ"
    pairs = [tensor.reshape(-1)[differs] for tensor in (one, other)] if dtype_name(one.dtype) not in _BITS_ONLY else []
    if not pairs:
        return Difference(fqn, "values", what, count)
    is_integer = not (one.is_floating_point() or one.is_complex())
    largest = _integer_gap(*pairs) if is_integer else _gap(*pairs)
    text = f"{largest:.6g}" if isinstance(largest, float) else str(largest)
    return Difference(fqn, "values", f"{what}, by at most {text}", count, float(largest))


def _gap(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the largest difference of two elements; NaN if one is NaN where the other is not."""
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    gap = (one - other).abs()
    gap[one == other] = 0.0  # 0.0 and -0.0, or infinities
    gap[one.isnan() & other.isnan()] = 0.0
    return float("nan") if bool(gap.isnan().any()) else float(gap.max())


def _integer_gap(one: torch.Tensor, other: torch.Tensor) -> int:
    """Return the largest difference of two integers, which may be too large for a float to be exact."""
    a, b = (tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor for tensor in (one, other))
    larger, smaller = np.maximum(a.numpy(), b.numpy()), np.minimum(a.numpy(), b.numpy())
    return int((larger.astype(np.uint64) - smaller.astype(np.uint64)).max())  # modulo 2^64, of which it is less


def _object_difference(fqn: str, first: Checkpoint, second: Checkpoint) -> Difference | None:
    if first.read_stored_object(fqn) == second.read_stored_object(fqn):
        return None
    try:
        one, other = first[fqn], second[fqn]
    except UnsafeObjectError:
        return Difference(fqn, "unknown", "objects that are not read, because they could run code")
    if is_same(one, other):
        return None
    a, b = _short(one), _short(other)
    return Difference(fqn, "values", f"{a} and {b}" if a != b else f"{a} and another that begins alike")


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def is_same(one: Any, other: Any) -> bool:
    """Return whether two objects are the same. What only prints alike is not."""
    try:
        return _is_same(one, other)
    except RecursionError:  # something is in itself
        return bool(_pickled(one) == _pickled(other))


def differing_elements(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return for each element of two strided tensors of the same shape and dtype whether its bits differ; flat."""
    flat = [without_lazy_bits(tensor).reshape(-1) for tensor in (one, other)]
    if not one.numel():
        return torch.empty(0, dtype=torch.bool)
    a, b = (tensor.view(torch.uint8).view(-1, one.element_size()) for tensor in flat)
    return (a != b).any(1)


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _is_same_tensor(one, other)
    if isinstance(one, Mapping):
        return bool(one.keys() == other.keys()) and all(_is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return struct.pack("2d", one.real, one.imag) == struct.pack("2d", other.real, other.imag)
    try:
        if bool(one == other):
            return True
    except Exception:  # comparisons that are ambiguous or fail
        pass
    return bool(_pickled(one) == _pickled(other))


def _is_same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.layout != other.layout:
        return False
    if one.layout != torch.strided or one.is_quantized:
        return bool(_pickled(one) == _pickled(other))
    return not bool(differing_elements(one, other).any())


def _pickled(value: Any) -> Any:
    data = io.BytesIO()
    try:
        torch.save(value, data)
    except Exception:  # it was loaded, so this is of an odd class
        return id(value)
    return data.getvalue()
