"""The state of optimizers by the names of parameters: all that is in them, and nothing that is not.

Torch's `get_state_dict` names entries alike, but by a step of the optimizer without gradients, which passes over frozen
parameters and empty groups, and can't be made where `step` needs a closure. Here it is the last resort, for layouts
that nothing else says, and for FSDP1's flat parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dcp_nvcomp.calls.values import PLAIN_TENSORS, Vacant, nested
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, MissingKeyError
from dcp_nvcomp.format.metadata.paths import SavedEntry
from dcp_nvcomp.loading.matching import saved_names
from dcp_nvcomp.reading.comparison import is_same

_STATE: Final = "state"
_GROUPS: Final = "param_groups"
_PARAMS: Final = "params"
# What an optimizer's state dict has beside these two, by the number of the optimizer.
_EXTRA: Final = "extra"
_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_NO_STATE: Final[Mapping[str, Any]] = {}


def optimizers_of(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Optimizers | Fsdp1Optimizers:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return Fsdp1Optimizers(model, optimizers)
    return Optimizers(model, optimizers)


@dataclass(frozen=True)
class _Group:
    optimizer: torch.optim.Optimizer
    number: int
    fqns: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.optimizer.param_groups[self.number].items() if name != _PARAMS}


class Optimizers:
    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        groups: list[dict[str, Any]] = []
        extra: dict[str, Any] = {}
        fqns = {id(parameter): fqn for fqn, parameter in self._parameters()}
        for number, optimizer in enumerate(self._optimizers):
            own = optimizer.state_dict()
            names: dict[Any, str] = {}
            for group, described in zip(self._groups(optimizer, fqns), own[_GROUPS], strict=True):
                names |= dict(zip(described[_PARAMS], group.fqns, strict=True))
                groups.append({**described, _PARAMS: list(group.fqns)})
            others = {key: value for key, value in own.items() if key not in (_STATE, _GROUPS)}
            of_none = {key: value for key, value in own[_STATE].items() if key not in names}
            if others or of_none:
                extra[str(number)] = {**others, **({_STATE: of_none} if of_none else {})}
            for key, fqn in names.items():
                if key in own[_STATE]:
                    if fqn in state:
                        raise ConfigurationError("This parameter is in two optimizers.", fqn=fqn)
                    state[fqn] = own[_STATE][key]
        return {_STATE: state, _GROUPS: groups, **({_EXTRA: extra} if extra else {})}

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Yield the parameters of the model by their names, as `get_model_state_dict` has them."""
        for name, parameter in self._model.named_parameters():
            module: Any = self._model
            parts = []
            for part in name.split("."):
                is_wrapper = part in _WRAPPERS or (part == "module" and isinstance(module, DistributedDataParallel))
                if not is_wrapper:
                    parts.append(part)
                module = getattr(module, part)
            yield ".".join(parts), parameter

    @staticmethod
    def _groups(optimizer: torch.optim.Optimizer, fqns: Mapping[int, str]) -> list[_Group]:
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group[_PARAMS]):
                if id(parameter) not in fqns:
                    raise ConfigurationError(
                        f"Parameter {position} of group {number} of {type(optimizer).__name__}, of shape "
                        f"{tuple(parameter.shape)}, is not one of the model: give TrainingState the module that all "
                        "parameters of its optimizers are in."
                    )
            groups.append(_Group(optimizer, number, tuple(fqns[id(one)] for one in group[_PARAMS])))
        return groups

    def destination(self, entries: Sequence[SavedEntry]) -> Any:
        if not entries:
            raise MissingKeyError("The checkpoint has nothing of optimizers.", fqn="optimizer")
        there = self.state_dict()
        own = there[_STATE]
        parameters = dict(self._parameters())
        saved = {str(entry.path[1]) for entry in entries if entry.path[0] == _STATE and len(entry.path) > 2}
        names = {name: fqn for fqn, name in saved_names(parameters, saved).items()}
        templates: Mapping[Any, Any] | None = None
        places: dict[str, Any] = {}
        for entry in entries:
            if not isinstance(entry.item, TensorStorageMetadata):
                places[entry.fqn] = Vacant()
                continue
            fqn = names.get(str(entry.path[1])) if entry.path[0] == _STATE and len(entry.path) > 2 else None
            parameter = None if fqn is None else parameters.get(fqn)
            known = _at(own.get(fqn, _NO_STATE), entry.path[2:])
            if parameter is not None and not _fits(known, entry.item) and self._may_be_of_any_layout(parameter, entry):
                templates = self._templates() if templates is None else templates
                known = _at(templates.get(fqn, _NO_STATE), entry.path[2:])
            known = known if _fits(known, entry.item) else _place(entry, parameter)
            option = None if fqn is not None else _at(there, entry.path)
            places[entry.fqn] = known.to(option.device) if isinstance(option, torch.Tensor) else known
        return nested({entry.fqn: entry.path for entry in entries}, places)

    def _may_be_of_any_layout(self, parameter: torch.Tensor, entry: SavedEntry) -> bool:
        """Return True if state of a parameter may be of another class than that, or be sharded in another way."""
        of_torch = all(type(one).__module__.startswith("torch.optim") for one in self._optimizers)
        is_other_shape = isinstance(parameter, DTensor) and len(entry.item.chunks) > 1  # type: ignore[union-attr]
        is_other_shape = is_other_shape and entry.item.size != parameter.shape  # type: ignore[union-attr]
        return not of_torch or type(_local(parameter)) not in PLAIN_TENSORS or is_other_shape

    def _templates(self) -> Mapping[Any, Any]:
        """Return state as a step without gradients makes it, of which only layouts matter; nothing if it can't be."""
        before = [[dict(group) for group in one.param_groups] for one in self._optimizers]
        had_state = [bool(one.state) for one in self._optimizers]
        had_gradient = {id(parameter) for _, parameter in self._parameters() if parameter.grad is not None}
        found: Mapping[Any, Any] = {}
        with suppress(Exception):  # whatever an optimizer's step raises that needs more than gradients
            found = cast(Mapping[Any, Any], get_optimizer_state_dict(self._model, list(self._optimizers))[_STATE])
        for one, groups, had in zip(self._optimizers, before, had_state, strict=True):
            for group, options in zip(one.param_groups, groups, strict=True):
                group.update(options)
            if not had:
                one.state.clear()
        for _, parameter in self._parameters():
            if id(parameter) not in had_gradient:
                parameter.grad = None
        return found

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        parameters = dict(self._parameters())
        loaded = _by_names_of(parameters, loaded)
        state, saved_groups = loaded[_STATE], loaded[_GROUPS]
        fqns = {id(parameter): fqn for fqn, parameter in parameters.items()}
        groups = {number: self._groups(one, fqns) for number, one in enumerate(self._optimizers)}
        matched = _matched(saved_groups, [group for own in groups.values() for group in own], state)
        for number, optimizer in enumerate(self._optimizers):
            extra = loaded.get(_EXTRA, {}).get(str(number), {})
            own = optimizer.state_dict()
            new: dict[str, Any] = {_STATE: dict(extra.get(_STATE, {})), _GROUPS: []}
            for group, described in zip(groups[number], own[_GROUPS], strict=True):
                if isinstance(optimizer, torch.optim.LBFGS) and list(group.fqns) != matched[group].get(_PARAMS):
                    raise _no_place(
                        {f"optimizer.{_STATE}"}, "LBFGS keeps it by the order of its parameters, which is another"
                    )
                options = {name: value for name, value in matched[group].items() if name != _PARAMS}
                new[_GROUPS].append({**group.options, **options, _PARAMS: described[_PARAMS]})
                new[_STATE] |= {
                    key: dict(state[fqn])
                    for key, fqn in zip(described[_PARAMS], group.fqns, strict=True)
                    if fqn in state
                }
            new |= {key: value for key, value in extra.items() if key != _STATE}
            optimizer.load_state_dict(new)
            for group in groups[number]:
                _set_options(group, matched[group])
                for fqn in group.fqns:
                    _set_state(optimizer.state, parameters[fqn], state.get(fqn, _NO_STATE))
        self._check(loaded)

    def _check(self, loaded: Mapping[str, Any]) -> None:
        there = self.state_dict()
        found = {
            f"optimizer.{_STATE}.{fqn}.{name}"
            for fqn, values in loaded.get(_STATE, _NO_STATE).items()
            for name, value in values.items()
            if not _is_there(value, there[_STATE].get(fqn, _NO_STATE), name)
        }
        for key, value in loaded.get(_EXTRA, {}).items():
            if not is_same(value, there.get(_EXTRA, {}).get(key)):
                found.add(f"optimizer.{_EXTRA}.{key}")
        if found:
            raise _no_place(found, "the optimizer's load_state_dict did not take them as they are")


def _by_names_of(parameters: Mapping[str, Any], loaded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what was loaded by the names of parameters here, which may differ in wrappers of modules."""
    groups = loaded[_GROUPS]
    saved = dict.fromkeys(fqn for group in groups for fqn in group[_PARAMS])
    names = {name: fqn for fqn, name in saved_names(parameters, saved).items()}
    return {
        **loaded,
        _STATE: {names.get(fqn, fqn): values for fqn, values in loaded.get(_STATE, _NO_STATE).items()},
        _GROUPS: [{**group, _PARAMS: [names.get(fqn, fqn) for fqn in group[_PARAMS]]} for group in groups],
    }


def _at(value: Any, path: Sequence[Any]) -> Any:
    """Return what is at a place in nested containers; None if there is none."""
    for part in path:
        part = getattr(part, "value", part)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _fits(known: Any, item: TensorStorageMetadata) -> bool:
    return isinstance(known, torch.Tensor) and known.shape == item.size and known.dtype == item.properties.dtype


def _place(entry: SavedEntry, parameter: torch.Tensor | None) -> torch.Tensor:
    """Return a tensor to load an entry into: like its parameter if it has that shape."""
    item = entry.item
    assert isinstance(item, TensorStorageMetadata)
    dtype = item.properties.dtype
    if parameter is not None and item.size and item.size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    if len(item.chunks) > 1:
        raise CheckpointError(
            f"This was saved in {len(item.chunks)} shards, and the optimizer does not say how to shard it: take one "
            "step with it before the restore, so that it has state of that layout.",
            fqn=f"optimizer.{entry.fqn}",
        )
    # counts of steps are on the host, unless the optimizer says otherwise when it takes them
    device = "cpu" if parameter is None or not item.size or isinstance(parameter, DTensor) else parameter.device
    return torch.empty(item.size, dtype=dtype, device=device)


def _matched(
    saved: Sequence[Mapping[str, Any]], own: Sequence[_Group], state: Mapping[str, Any]
) -> dict[_Group, Mapping[str, Any]]:
    """Return which saved group each group is: that of the same parameters; empty ones in their order."""
    empty = [group for group in saved if not group[_PARAMS]]
    by_parameters = {frozenset(group[_PARAMS]): group for group in saved if group[_PARAMS]}
    matched: dict[_Group, Mapping[str, Any]] = {}
    for group in own:
        if not group.fqns:
            matched[group] = empty.pop(0) if empty else {}
        elif frozenset(group.fqns) in by_parameters:
            matched[group] = by_parameters[frozenset(group.fqns)]
    there = {fqn for group in own for fqn in group.fqns}
    known = {fqn for group in saved for fqn in group[_PARAMS]}
    missing = {f"optimizer.{_STATE}.{fqn}.{name}" for fqn in state.keys() - there for name in state[fqn]}
    if missing:
        raise _no_place(missing, "the optimizers have no parameters of these names")
    found = set(map(id, matched.values()))
    if len(matched) < len(own) or empty or known - there:
        raise _no_place(
            {f"optimizer.{_GROUPS}.{number}" for number, group in enumerate(saved) if id(group) not in found}
            or {f"optimizer.{_GROUPS}"},
            f"the groups of parameters are others: {_shown([group[_PARAMS] for group in saved])} were saved, "
            f"{_shown([group.fqns for group in own])} are there",
        )
    return matched


def _shown(groups: Sequence[Sequence[str]]) -> str:
    texts = (", ".join(group[:2]) + (f", ... {len(group)} in all" if len(group) > 2 else "") for group in groups)
    return ", ".join(f"[{text}]" for text in texts)


def _no_place(names: set[str], why: str) -> CheckpointError:
    ordered = sorted(names)
    shown = ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")
    return CheckpointError(
        f"What was saved has no place in the optimizer: {shown}; {why}. Make the optimizer of the parameters that it "
        "was saved with (requires_grad may change), or load the model alone, with open_checkpoint and load_into."
    )


def _set_options(group: _Group, saved: Mapping[str, Any]) -> None:
    """Give a group its saved options, those too that load_state_dict leaves out or converts."""
    there = group.optimizer.param_groups[group.number]
    for name, value in saved.items():
        if name != _PARAMS and not (name in there and is_same(_local(there[name]), _local(value))):
            there[name] = value


def _set_state(state: Any, parameter: torch.Tensor, saved: Mapping[str, Any]) -> None:
    """Give a parameter its saved state where load_state_dict converted it, as it does to the parameter's dtype."""
    if parameter not in state:
        return
    there = state[parameter]
    for name, value in saved.items():
        if isinstance(there, dict) and not _is_there(value, there, name):
            device = there[name].device if isinstance(there.get(name), torch.Tensor) else None
            there[name] = value.to(device) if isinstance(value, torch.Tensor) and device is not None else value


def _is_there(value: Any, there: Any, name: Any) -> bool:
    if not isinstance(there, Mapping) or name not in there:
        return False
    found = there[name]
    if found is value:
        return True
    if isinstance(found, torch.Tensor) and not found.dim() and _is_number(value):
        number, saved = _local(found).item(), value.item() if isinstance(value, torch.Tensor) else value
        return bool(number == saved or (number != number and saved != saved))  # or both are NaN
    if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor):
        return type(found) is type(value) and is_same(_local(found), _local(value).to(_local(found).device))
    return is_same(_nested_local(found), _nested_local(value))


def _is_number(value: Any) -> bool:
    """Return True for what an optimizer may make a tensor of, or of another dtype: its count of steps."""
    return type(value) in (int, float) or (type(value) is torch.Tensor and not value.dim())


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _nested_local(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _nested_local(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_nested_local(one) for one in value]
    return _local(value).detach().cpu() if isinstance(value, torch.Tensor) else value


class Fsdp1Optimizers:
    """The optimizers of a model with flat parameters of FSDP1, whose state only torch can take apart."""

    def __init__(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Return what the optimizers hold; state for parameters that have none yet is made."""
        return get_optimizer_state_dict(self._model, self._optimizers)

    def destination(self, entries: Sequence[SavedEntry]) -> Any:
        return self.state_dict()

    def load_state_dict(self, loaded: Any) -> None:
        options = StateDictOptions(strict=False)
        set_optimizer_state_dict(self._model, self._optimizers, loaded, options=options)
