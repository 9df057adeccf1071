"""The planner of our own `load`: plans with the caller's, or as DCP's default one does, but quickly for plain tensors.

DCP takes about 20 us to find out which saved shards a tensor overlaps, and 300 us if there are 512 of them. A plain
tensor that was saved as one shard of the same size overlaps that; the parts of a DTensor are compared with all saved
shards of the tensor at once (`SavedShards`). Everything else is left to DCP's default planner.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from dcp_nvcomp.calls.suggestions import missing_key
from dcp_nvcomp.calls.values import (
    PLAIN_TENSORS,
    Flattened,
    Key,
    Path,
    flatten_as_stock,
    is_default_planner,
    replace_at,
)
from dcp_nvcomp.errors import (
    ConfigurationError,
    DtypeMismatchError,
    MetadataError,
    MissingKeyError,
    ShapeMismatchError,
)
from dcp_nvcomp.format.collector import collector_paused
from dcp_nvcomp.format.metadata.paths import paths_of
from dcp_nvcomp.loading.matching import Matched, ParameterNames, match
from dcp_nvcomp.loading.read_plan import refuse_shared_elements

_Ints = npt.NDArray[np.int64]

_MANY_SHARDS: Final = 8  # from so many on numpy is quicker than a loop

# What certainly takes no tensor. Other values may: a ShardedTensor is not a torch.Tensor.
_NO_TENSORS: Final = (bool, int, float, complex, str, bytes, type(None), np.ndarray, np.generic)


def planner_for(planner: LoadPlanner | None, *, may_cast: bool = True, may_leave: Collection[str] = ()) -> LoadPlanner:
    if planner is None:
        return WholeTensorPlanner(may_cast=may_cast, may_leave=may_leave)
    if not is_default_planner(planner, DefaultLoadPlanner):
        return planner
    assert isinstance(planner, DefaultLoadPlanner)
    return WholeTensorPlanner(
        flatten_state_dict=planner.flatten_state_dict,
        flatten_sharded_tensors=planner.flatten_sharded_tensors,
        allow_partial_load=planner.allow_partial_load,
        may_cast=may_cast,
        may_leave=may_leave,
    )


class WholeTensorPlanner(DefaultLoadPlanner):
    """DCP's default planner, quick for plain tensors saved as one shard, and clear about what can't be loaded."""

    def __init__(self, *, may_cast: bool, may_leave: Collection[str], **options: Any) -> None:
        super().__init__(**options)
        self._may_cast, self._may_leave = may_cast, may_leave
        self._matched: Matched | None = None
        self._names: ParameterNames | None = None
        self._nested: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        if not self.flatten_state_dict:
            _refuse_meta(state_dict)
            super().set_up_planner(state_dict, metadata, is_coordinator)
            self._nested = state_dict
            return
        matched = match(state_dict, metadata)
        _refuse_meta(matched.values)
        self.flatten_state_dict = False  # it is flat; DCP would take dicts apart all the same
        dicts = {fqn: value for fqn, value in matched.values.items() if isinstance(value, Mapping)}
        rest = {fqn: value for fqn, value in matched.values.items() if fqn not in dicts}
        super().set_up_planner(rest, metadata, is_coordinator)
        self.state_dict |= dicts
        # what was on the meta device is somewhere else now
        moved = [fqn for fqn, value in matched.values.items() if _is_meta(value)]
        self._matched = replace(matched, made=matched.made.union(moved))
        self._names = ParameterNames(Flattened(matched.values, matched.paths))
        self._nested = state_dict

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        saved = self.metadata.state_dict_metadata
        for fqn, value in self.state_dict.items():
            if isinstance(value, torch.Tensor):
                _check(fqn, value, saved.get(fqn), may_cast=self._may_cast)
            elif isinstance(value, _NO_TENSORS):
                _check_object(fqn, value, saved.get(fqn))
        if not self.allow_partial_load:
            missing = next((fqn for fqn in self.state_dict if fqn not in saved), None)
            if missing is not None:
                raise MissingKeyError(missing_key(missing, saved))
        items, others, shards = list[ReadItem](), dict[str, Any](), SavedShards()
        wanted_numel: dict[str, int] = {}  # of tensors that may be in several shards
        with collector_paused():
            for fqn, value in self.state_dict.items():
                item = saved.get(fqn)
                if type(value) in PLAIN_TENSORS and _is_one_shard(item, value):
                    items.append(_whole(fqn, value))
                elif type(value) is DTensor and type(item) is TensorStorageMetadata and _has_many_shards(item, value):
                    if value.device_mesh.get_coordinate() is not None:
                        wanted = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
                        items += shards.items(fqn, item.chunks, wanted)
                        wanted_numel[fqn] = sum(part.sizes.numel() for part in wanted)
                else:
                    others[fqn] = value
                    if type(item) is TensorStorageMetadata and (type(value) in PLAIN_TENSORS or type(value) is DTensor):
                        wanted_numel[fqn] = _local_numel(value)
        rest = create_default_local_load_plan(others, self.metadata, not self.allow_partial_load)
        _check_found(wanted_numel, items + rest.items)
        return LoadPlan(items + rest.items)

    def unplaced(self, asked: Collection[str]) -> Collection[str]:
        """Return the saved keys below this destination's containers for which it has no place."""
        if self._matched is None:
            return ()
        assert self.metadata is not None
        there = {*asked, *self._matched.paths}
        if self.metadata.state_dict_metadata.keys() <= there:
            return ()
        own = {key for key, value in self._nested.items() if isinstance(value, Mapping | list)} - set(self._may_leave)
        return [fqn for fqn, path in paths_of(self.metadata).items() if fqn not in there and path[0] in own]

    def warn_of_left(self, keys: Collection[str]) -> None:
        """Warn of saved values that have no place in the destination's dicts and lists: of what `unplaced` returned."""
        assert self.metadata is not None
        if keys:
            _warn_of_left(self._nested, {fqn: path for fqn, path in paths_of(self.metadata).items() if fqn in keys})

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        if self._matched is not None:
            for fqn in self._matched.made:
                replace_at(self._nested, self._matched.paths[fqn], self.state_dict[fqn])
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)
        fqn = read_item.dest_index.fqn
        path: Path = (fqn,) if self._matched is None else self._matched.paths[fqn]
        if self._names is not None:
            self.state_dict[fqn] = self._names.renamed(self.state_dict[fqn], path)
        replace_at(self._nested, path, self.state_dict[fqn])

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        value = self.state_dict.get(read_item.dest_index.fqn)
        if type(value) in PLAIN_TENSORS and isinstance(value, torch.Tensor) and value.shape == read_item.lengths:
            return value
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return tensor


class SavedShards:
    """The saved shards of tensors, of which many may be the same.

    DCP looks at each saved shard of each tensor: half a million at 512 ranks. Tensors of one shape share their shards
    in `.metadata`, so there are few sets of shards, and numpy takes microseconds to compare one with a wanted part.
    """

    def __init__(self) -> None:
        self._bounds: dict[tuple[int, ...], tuple[_Ints, _Ints]] = {}  # by the ids of the shards, which stay alive

    def items(
        self, fqn: str, saved: Sequence[ChunkStorageMetadata], wanted: Sequence[ChunkStorageMetadata]
    ) -> list[ReadItem]:
        """Return what to read for the wanted parts of a tensor.

        Args:
            fqn: the tensor's name.
            saved: its saved shards; not to be changed as long as this object is used.
            wanted: the parts that this rank has, as `DTensor.__create_chunk_list__` makes them.
        """
        starts, stops = self._bounds_of(saved)
        items = []
        for number, part in enumerate(wanted):
            start, stop = np.array(part.offsets, np.int64), np.add(part.offsets, part.sizes, dtype=np.int64)
            overlapping = ((starts < stop) & (start < stops)).all(1)
            for at in np.flatnonzero(overlapping).tolist():
                items.append(_overlap(fqn, saved[at], at, part, number))
        return items

    def _bounds_of(self, saved: Sequence[ChunkStorageMetadata]) -> tuple[_Ints, _Ints]:
        key = tuple(map(id, saved))
        found = self._bounds.get(key)
        if found is None:
            starts = np.array([shard.offsets for shard in saved], np.int64)
            found = self._bounds[key] = starts, starts + np.array([shard.sizes for shard in saved], np.int64)
        return found


def _overlap(fqn: str, saved: ChunkStorageMetadata, at: int, part: ChunkStorageMetadata, number: int) -> ReadItem:
    bounds = list(zip(saved.offsets, saved.sizes, part.offsets, part.sizes, strict=True))
    begins = [max(first, second) for first, _, second, _ in bounds]
    ends = [min(first + size, second + length) for first, size, second, length in bounds]
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(fqn, part.offsets, number),
        torch.Size([begin - first for begin, first in zip(begins, part.offsets, strict=True)]),
        MetadataIndex(fqn, saved.offsets, at),
        torch.Size([begin - first for begin, first in zip(begins, saved.offsets, strict=True)]),
        torch.Size([end - begin for end, begin in zip(ends, begins, strict=True)]),
    )


def _check(fqn: str, value: torch.Tensor, saved: Any, *, may_cast: bool) -> None:
    if saved is None:
        return
    if type(value) in PLAIN_TENSORS:
        refuse_shared_elements(value, fqn)
    if not isinstance(saved, TensorStorageMetadata):
        raise ShapeMismatchError("The destination is a tensor, but a Python object was saved.", fqn=fqn)
    if saved.size != value.shape:
        raise ShapeMismatchError(
            f"The destination has shape {tuple(value.shape)}, but {tuple(saved.size)} was saved.", fqn=fqn
        )
    if not may_cast and saved.properties.dtype != value.dtype:
        raise DtypeMismatchError(
            f"The destination has {value.dtype}, but {saved.properties.dtype} was saved: load into a tensor "
            "of that dtype, or let `load` convert with dtype='cast'.",
            fqn=fqn,
        )


def _local_numel(tensor: torch.Tensor) -> int:
    """Return how many elements of a tensor this rank has."""
    if not isinstance(tensor, DTensor):
        return tensor.numel()
    with torch.no_grad():
        return tensor.to_local().numel() if tensor.device_mesh.get_coordinate() is not None else 0


def _check_found(wanted_numel: Mapping[str, int], items: Sequence[ReadItem]) -> None:
    """Refuse shards that leave out a part of what this rank is to load: it would stay as it was."""
    found_numel = dict.fromkeys(wanted_numel, 0)
    for item in items:
        if item.dest_index.fqn in found_numel:
            found_numel[item.dest_index.fqn] += item.lengths.numel()
    for fqn, wanted in wanted_numel.items():
        found = found_numel[fqn]
        if found < wanted:
            raise MetadataError(
                f"The shards that `.metadata` lists leave a part of this tensor out: they hold {found} of the {wanted} "
                "elements that this rank is to load.",
                fqn=fqn,
            )


def _check_object(fqn: str, value: Any, saved: Any) -> None:
    if isinstance(saved, TensorStorageMetadata):
        raise ShapeMismatchError(
            f"The destination is a Python object ({type(value).__name__}), but a tensor was saved, of shape "
            f"{tuple(saved.size)} and {saved.properties.dtype}: load into such a tensor.",
            fqn=fqn,
        )


def _refuse_meta(values: Mapping[str, Any]) -> None:
    if dist.is_available() and dist.is_initialized():
        return  # DCP makes tensors of them on the group's device
    for fqn, value in values.items():
        if _is_meta(value):
            raise ConfigurationError(
                "The destination is on the meta device, which holds no values: materialize it first, for example with "
                "to_empty().",
                fqn=fqn,
            )


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _is_one_shard(saved: Any, tensor: torch.Tensor) -> bool:
    if type(saved) is not TensorStorageMetadata or saved.size != tensor.shape or len(saved.chunks) != 1:
        return False
    shard = saved.chunks[0]
    return shard.sizes == saved.size and not any(shard.offsets) and tensor.numel() > 0


def _has_many_shards(saved: TensorStorageMetadata, tensor: torch.Tensor) -> bool:
    return saved.size == tensor.shape and tensor.dim() > 0 and len(saved.chunks) >= _MANY_SHARDS


def _whole(fqn: str, tensor: torch.Tensor) -> ReadItem:
    origin, size = torch.Size([0] * tensor.dim()), tensor.shape
    index = MetadataIndex(fqn, origin, 0)
    return ReadItem(LoadItemType.TENSOR, index, origin, index, origin, size)


def _warn_of_left(state: Mapping[str, Any], left: Mapping[str, Path]) -> None:
    shown = ", ".join(map(repr, list(left)[:3]))
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    message = (
        f"{len(left)} saved value(s) were not loaded, as the destination has no place for them: {shown}{more}. A load "
        "fills what the state dict has; CheckpointManager.restore brings back all that was saved, and open_checkpoint "
        "reads any of it."
    )
    if any(_is_below_empty(state, path) for path in left.values()):
        message += (
            " A dict that they belong to is empty: an optimizer has its state from the first step on; get_state_dict "
            "of torch.distributed.checkpoint.state_dict makes it before."
        )
    warnings.warn(message, UserWarning, stacklevel=2)


def _is_below_empty(state: Mapping[str, Any], path: Path) -> bool:
    value: Any = state
    for part in path:
        if not isinstance(value, Mapping):
            return False
        if not value:
            return True
        value = value.get(part if isinstance(part, str) else getattr(part, "value", None))
    return False


def with_own_keys(planner: LoadPlanner) -> Any:
    """Return a planner that knows the destination's keys; the given one, unless it is DCP's and some are not text."""
    if not is_default_planner(planner, DefaultLoadPlanner):
        return planner
    assert isinstance(planner, DefaultLoadPlanner)
    if not planner.flatten_state_dict:
        return planner
    try:
        paths = flatten_as_stock(planner.original_state_dict).paths
    except ConfigurationError:  # two keys of one name, of which DCP knows one
        return planner
    odd = {fqn: path for fqn, path in paths.items() if any(type(part) is Key for part in path)}
    return _OwnKeys(planner, odd) if odd else planner


class _OwnKeys:
    """DCP's planner for all but objects under such keys."""

    def __init__(self, planner: DefaultLoadPlanner, paths: dict[str, Path]) -> None:
        self._planner, self._paths = planner, paths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self._paths.get(read_item.dest_index.fqn)
        if path is None:
            self._planner.load_bytes(read_item, value)
        else:
            replace_at(self._planner.original_state_dict, path, torch.load(value, weights_only=False))
