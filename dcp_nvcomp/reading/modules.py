"""Load a plain module from an opened checkpoint: into its own tensors, and new ones for those on the meta device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_nvcomp.calls.suggestions import missing_below_prefix
from dcp_nvcomp.calls.values import nested
from dcp_nvcomp.errors import ConfigurationError, DtypeMismatchError, MissingKeyError, ShapeMismatchError
from dcp_nvcomp.format.metadata.paths import paths_below, paths_of
from dcp_nvcomp.loading.matching import is_extra_state, saved_names
from dcp_nvcomp.options import DtypePolicy, check_choice

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class Source(Protocol):
    """What is needed of a `Checkpoint`."""

    @property
    def path(self) -> str:
        """Where it is."""

    @property
    def metadata(self) -> Metadata:
        """The checkpoint's metadata."""

    def read(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return some values."""

    def read_into(self, tensors: Mapping[str, torch.Tensor]) -> object:
        """Fill tensors."""


def load_into_module(source: Source, module: torch.nn.Module, *, prefix: str, dtype: str, device: torch.device) -> None:
    """Load a module; see `Checkpoint.load_into`."""
    check_choice("dtype", dtype, DtypePolicy)
    state = module.state_dict(keep_vars=True)
    # by the checkpoint's names, which wrappers of the module that was saved may have changed
    keys = saved_names({prefix + name: None for name in state}, source.metadata.state_dict_metadata)
    keys = {name: keys[prefix + name] for name in state}
    _check(source, state, keys, prefix=prefix, may_cast=dtype == "cast")
    made: dict[int, torch.Tensor] = {}  # by what is on the meta device: two names of one tensor stay one
    tensors: dict[str, torch.Tensor] = {}
    assigned: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or is_extra_state(name):
            continue
        if not value.is_meta:
            tensors[keys[name]] = value.detach()
            continue
        if id(value) not in made:
            made[id(value)] = _like(value, device)
            tensors[keys[name]] = made[id(value)].detach()
        assigned[name] = made[id(value)]
    source.read_into(tensors)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or is_extra_state(name):
            assigned[name] = _extra_state(source, keys[name])
    if assigned:
        module.load_state_dict(assigned, strict=False, assign=True)


def _extra_state(source: Source, key: str) -> Any:
    if key in source.metadata.state_dict_metadata:
        return source.read([key])[key]
    below = paths_below(paths_of(source.metadata), key)
    return nested(below, source.read(below))


def _like(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    tensor = torch.empty(value.shape, dtype=value.dtype, device=device)
    return torch.nn.Parameter(tensor, value.requires_grad) if isinstance(value, torch.nn.Parameter) else tensor


def _check(source: Source, state: Mapping[str, Any], keys: Mapping[str, str], *, prefix: str, may_cast: bool) -> None:
    """Refuse what can't be loaded, before anything is."""
    there = source.metadata.state_dict_metadata
    paths = paths_of(source.metadata)
    for name, value in state.items():
        key = keys[name]
        stored = there.get(key)
        if isinstance(value, torch.Tensor) and not is_extra_state(name):
            if stored is None:
                raise MissingKeyError(missing_below_prefix(name, prefix, state, there), path=source.path)
            _check_tensor(source.path, key, value, stored, may_cast=may_cast)
        elif stored is None and not paths_below(paths, key):
            raise MissingKeyError(missing_below_prefix(name, prefix, state, there), path=source.path)


def _check_tensor(path: str, key: str, value: torch.Tensor, stored: Any, *, may_cast: bool) -> None:
    if not isinstance(stored, TensorStorageMetadata):
        raise ShapeMismatchError("The module has a tensor, the checkpoint a Python object.", path=path, fqn=key)
    if type(value) not in _PLAIN:
        raise ConfigurationError(
            f"The module's tensor is a {type(value).__name__}: use dcp_nvcomp.load for sharded models.",
            path=path,
            fqn=key,
        )
    if stored.size != value.shape:
        raise ShapeMismatchError(
            f"The module has shape {tuple(value.shape)}, the checkpoint {tuple(stored.size)}.", path=path, fqn=key
        )
    if stored.properties.dtype != value.dtype and not may_cast:
        raise DtypeMismatchError(
            f"The module has {value.dtype}, the checkpoint {stored.properties.dtype}: dtype='cast' converts.",
            path=path,
            fqn=key,
        )
