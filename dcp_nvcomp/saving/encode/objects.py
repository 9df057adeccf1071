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

_TENSORS = (torch.Tensor, torch.nn.Parameter)
# What is smaller, or has no memory of a tensor in it, is not worth a second look.
_SMALL_NBYTES = 4096
_FIRST_STORAGE = b"/data/0"


def serialized(value: Any) -> io.BytesIO:
    """Return an object as `torch.save` writes it; read from its beginning."""
    data = io.BytesIO()
    torch.save(value, data)
    if data.tell() > _SMALL_NBYTES and _FIRST_STORAGE in data.getvalue():
        views = _views_of_more(value)
        if views:
            data = io.BytesIO()
            torch.save(value, data, pickle_module=_pickle_module(views))
    data.seek(0)
    return data


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


def _pickle_module(views: dict[int, torch.Tensor]) -> Any:
    """Return a module as `torch.save` takes one, whose pickler stores copies of views."""

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
    module = types.ModuleType("pickle")
    vars(module).update(vars(pickle) | {"Pickler": Pickler})
    return module
