"""Python objects as bytes, as `torch.save` writes them, with no more of a tensor than what it shows.

`torch.save` stores the whole memory that a view is a part of. Here a view takes its own bytes only, unless tensors of
the same object together show half of that memory or more: then it is stored as it is, so that they still share it.
"""

from __future__ import annotations

import io
import pickle
import types
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_nvcomp.errors import ConfigurationError

_TENSORS = (torch.Tensor, torch.nn.Parameter)
# What is smaller, or has no memory of a tensor in it, is not worth a second look.
_SMALL_NBYTES = 4096
_FIRST_STORAGE = b"/data/0"


def serialized(value: Any, *, whole: bool = False) -> io.BytesIO:
    """Return an object as `torch.save` writes it; read from its beginning.

    Args:
        value: the object.
        whole: refuse one with a tensor that other ranks have shards of: its pickle has those of this rank alone.

    Raises:
        ConfigurationError: it has such a tensor.
    """
    data = io.BytesIO()
    torch.save(value, data, pickle_module=_pickle_module(_WholePickler) if whole else pickle)
    if data.tell() > _SMALL_NBYTES and _FIRST_STORAGE in data.getvalue():
        views = _views_of_more(value)
        if views:
            data = io.BytesIO()
            torch.save(value, data, pickle_module=_pickle_module(_copying_pickler(views)))
    data.seek(0)
    return data


def is_whole(tensor: torch.Tensor) -> bool:
    """Return True if this rank has all of a tensor, also of one of all ranks; nothing is run on it for that."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        return mesh.get_coordinate() is not None and all(
            placement.is_replicate() or mesh.size(dim) == 1 for dim, placement in enumerate(tensor.placements)
        )
    if is_sharded_tensor(tensor):
        shards: Any = tensor
        return len(shards.local_shards()) == len(shards.metadata().shards_metadata)
    return True


def is_sharded_tensor(tensor: torch.Tensor) -> bool:
    """Return True for a ShardedTensor, whose class has no public name."""
    return any(kind.__name__ == "ShardedTensor" for kind in type(tensor).__mro__)


class _WholePickler(pickle.Pickler):
    """Refuses tensors that are not whole, wherever an object has them."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)  # whatever else an object says that it is
        if issubclass(kind, torch.Tensor) and not is_whole(value):
            raise ConfigurationError(
                f"A {kind.__name__} of which this rank has a shard lies in a tuple, a set or another object, which is "
                "saved as one rank has it, so the shards of the other ranks would be lost: put it into a dict or a "
                "list, where it is saved as a tensor, or a whole tensor in its place; its to_local(), where each rank "
                "saves for itself. What TrainingState saves of a scheduler or a scaler is such an object: give its "
                "sharded tensors a key of their own."
            )
        return NotImplemented


def _views_of_more(value: Any) -> dict[int, torch.Tensor]:
    """Return the tensors in an object that show little of their memory, by `id`."""
    found = _Tensors()
    found.dump(value)
    views: dict[int, torch.Tensor] = {}
    for group in found.by_memory.values():
        shown_nbytes = sum(tensor.nbytes for tensor in group)
        if 2 * shown_nbytes < group[0].untyped_storage().nbytes():
            views |= {id(tensor): tensor for tensor in group}
    return views


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


class _Tensors(pickle.Pickler):
    """Finds the tensors in an object, by the memory that they are views of."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=2)  # as torch.save
        self.by_memory: dict[tuple[str, int], list[torch.Tensor]] = {}

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if type(value) in _TENSORS and value.layout == torch.strided and not value.is_quantized and not value.is_meta:
            key = str(value.device), value.untyped_storage().data_ptr()
            self.by_memory.setdefault(key, []).append(value)
        return int, ()  # nothing of it is wanted here

    def persistent_id(self, value: Any) -> Any:
        return "storage" if torch.is_storage(value) else None


def _copying_pickler(views: dict[int, torch.Tensor]) -> type[pickle.Pickler]:
    """Return a pickler that stores copies of views."""

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            view = views.get(id(value))
            if view is None or view is not value:
                return NotImplemented
            copied = view.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(view, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, view.requires_grad)
            else:
                copied.requires_grad_(view.requires_grad)
            vars(copied).update(vars(view))
            copies.append(copied)  # lives on: what the pickler remembers, it knows by address
            return copied.__reduce_ex__(2)  # type: ignore[no-untyped-call]

    copies: list[torch.Tensor] = []
    return Pickler


def _pickle_module(pickler: type[pickle.Pickler]) -> Any:
    """Return a module as `torch.save` takes one, with a pickler of ours."""
    module = types.ModuleType("pickle")
    vars(module).update(vars(pickle) | {"Pickler": pickler})
    return module
