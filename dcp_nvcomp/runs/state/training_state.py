"""TrainingState: all that a training run has to remember, as one value of a state dict.

Values other than tensors are stored in tuples of one: DCP takes dicts apart, loses empty ones, and can't load what it
was not told the inside of.
"""

from __future__ import annotations

import hashlib
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from dcp_nvcomp.calls.values import fqn_of
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.format.metadata.paths import SavedEntry
from dcp_nvcomp.loading.matching import completed, is_extra_state, saved_names
from dcp_nvcomp.redaction import printable
from dcp_nvcomp.runs.state.loaders import LOADER, LoaderPart, Reshard, joined, reshard_for, split_state, state_for
from dcp_nvcomp.runs.state.optimizers import optimizers_of

_SEED_NBYTES: Final = 8
_GENERATORS: Final = "generators"
_DATA: Final = "data"


class TrainingState:
    """Model, optimizers, schedulers, data loader and generators of random numbers, for saving and restoring as one.

    A run that is restored on as many ranks goes on bit for bit as it would have (as far as its kernels are
    deterministic). On another number of ranks,

    - model and optimizers are resharded;
    - schedulers and scaler are those of all ranks;
    - data loaders go on where the old ones together were: see `reshard`;
    - generators: a rank takes those of the rank with its number; one that was not there before is seeded anew, in a
      way that depends on what was saved, so that it happens again the same.

    Args:
        model: the model, sharded or not.
        optimizers: its optimizer, or several.
        scheduler: of learning rates, or several, or anything with `state_dict` that is the same on all ranks.
        scaler: a `GradScaler`.
        dataloader: torchdata's `StatefulDataLoader`, or anything with `state_dict` and `load_state_dict`. Make a new
            iterator of it after a restore.
        reshard: how the states of data loaders are moved to another number of ranks: a function that is given those of
            the old ranks (`LoaderPart`s, by rank) and the new number, and returns the new ones. By default what
            `ElasticSampler` needs.
        generators: further generators of the training's own, by name.
        data_group: among whose ranks the data is divided: those of data parallelism, where others share their batches.
            By default all.

    Raises:
        ConfigurationError: a value has no `state_dict` or no `load_state_dict`.

    Examples:
        >>> import tempfile, torch, dcp_nvcomp
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> state, run = {"train": TrainingState(model, optimizer)}, tempfile.mkdtemp()
        >>> with dcp_nvcomp.CheckpointManager(run, every=1) as manager:
        ...     saved = manager.save(1, state).saved.result()
        ...     expected = torch.rand(2)
        ...     manager.restore(state).step
        1
        >>> torch.equal(torch.rand(2), expected)
        True
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        scheduler: Any = None,
        scaler: Any = None,
        dataloader: Any = None,
        reshard: Reshard | None = None,
        generators: Mapping[str, torch.Generator] | None = None,
        data_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._optimizers = _several(optimizers)
        self._shared = {"scheduler": _several(scheduler), "scaler": _several(scaler)}
        self._loader, self._reshard = dataloader, reshard
        self._own_generators = dict(generators or {})
        is_distributed = dist.is_available() and dist.is_initialized()
        self._rank = dist.get_rank() if is_distributed else 0
        self._count = dist.get_world_size() if is_distributed else 1
        self._data_rank = dist.get_rank(data_group) if is_distributed else 0
        self._data_count = dist.get_world_size(data_group) if is_distributed else 1
        self._expected: Sequence[SavedEntry] | None = None
        shared = [(name, one) for name, values in self._shared.items() for one in values]
        for name, value in (*shared, ("dataloader", dataloader)):
            if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                raise ConfigurationError(
                    f"TrainingState({name}={type(value).__name__}) needs state_dict and load_state_dict; for data "
                    "loaders see torchdata's StatefulDataLoader."
                )

    def expect(self, entries: Sequence[SavedEntry] | None) -> None:
        """Say what the checkpoint has that is loaded next; `load` and `CheckpointManager.restore` do so.

        Args:
            entries: the saved values below this one, with their names and places from there on; None once the load is
                over.
        """
        self._expected = None if entries is None else [entry for entry in entries if entry.path]

    def state_dict(self) -> dict[str, Any]:
        """Return what to save; or, after `expect`, what to load into."""
        state = self._tensors()
        for name, values in self._shared.items():
            if values:
                state[name] = (tuple(value.state_dict() for value in values),)
        state["ranks"] = (self._count, self._data_count)
        if self._expected is None:
            state[_GENERATORS] = {str(self._rank): (_capture_generators(self._own_generators),)}
            if self._loader is not None:
                state[_DATA] = {str(self._data_rank): split_state(self._part())}
            return _ToSave(state)
        fqns = [entry.fqn for entry in self._expected]
        ranks, data = _ranks_of(fqns, _GENERATORS), _ranks_of(fqns, _DATA)
        if ranks:
            state[_GENERATORS] = {str(self._rank if self._rank in ranks else ranks[0]): ()}
        if self._loader is not None:
            state[_DATA] = {
                str(rank): dict.fromkeys(_names_of(fqns, rank), ())
                for rank in (data if len(data) != self._data_count else [self._data_rank])
            } or {str(self._data_rank): {LOADER: ()}}  # which the load misses, and says so
        if self._rank == 0:
            _warn_of_left(self._expected, state)
        return state

    def _tensors(self) -> dict[str, Any]:
        model = get_model_state_dict(self._model)
        if self._expected is not None:
            extra: dict[str, list[SavedEntry]] = {}
            for entry in self._expected_below("model"):
                if entry.path and is_extra_state(str(entry.path[0])):
                    below = SavedEntry(fqn_of(entry.path[1:]), entry.path[1:], entry.item)
                    extra.setdefault(str(entry.path[0]), []).append(below)
            model |= {fqn: completed({}, saved) for fqn, saved in extra.items() if fqn in model}
        if not self._optimizers:
            return {"model": model}
        optimizers = optimizers_of(self._model, self._optimizers)
        if self._expected is None:
            return {"model": model, "optimizer": optimizers.state_dict()}
        saved = [entry for entry in self._expected_below("optimizer") if entry.path]
        return {"model": model, "optimizer": optimizers.destination(saved)}

    def _expected_below(self, *place: str) -> list[SavedEntry]:
        assert self._expected is not None
        length = len(place)
        found = [entry for entry in self._expected if entry.path[:length] == place]
        return [SavedEntry(fqn_of(entry.path[length:]), entry.path[length:], entry.item) for entry in found]

    def _part(self) -> LoaderPart:
        return LoaderPart(self._loader.state_dict(), getattr(self._loader, "batch_size", None))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was loaded.

        Args:
            state_dict: as `state_dict` returned it, filled.

        Raises:
            CheckpointError: the data loader can't go on with this number of ranks; or what was saved of the optimizers
                has no place in them.
            ConfigurationError: DCP's own `load` has loaded it, which fills what a fresh state has and no more.
        """
        if isinstance(state_dict, _ToSave):
            raise ConfigurationError(
                "A TrainingState is restored by CheckpointManager.restore or dcp_nvcomp.load: dcp.load leaves what a "
                "fresh state has no place for, such as the state of its optimizers."
            )
        set_model_state_dict(self._model, state_dict["model"])
        if self._optimizers:
            optimizers_of(self._model, self._optimizers).load_state_dict(state_dict["optimizer"])
        for name, values in self._shared.items():
            loaded = state_dict[name][0] if values else ()
            if len(loaded) != len(values):
                raise CheckpointError(f"{len(loaded)} were saved, and {len(values)} are there.", fqn=name)
            for value, one in zip(values, loaded, strict=True):
                value.load_state_dict(one)
        if self._loader is not None:
            _, count = state_dict["ranks"]
            self._load_data({int(rank): joined(parts) for rank, parts in state_dict[_DATA].items()}, count)
        # last: what comes before may draw random numbers
        for rank, (loaded,) in state_dict.get(_GENERATORS, {}).items():
            if rank == str(self._rank):
                _restore_generators(loaded, self._own_generators)
            else:
                _seed_generators(loaded, self._rank, self._own_generators)

    def _load_data(self, parts: Mapping[int, LoaderPart], count: int) -> None:
        if count == self._data_count:
            state = state_for(self._loader, parts[self._data_rank])
        else:
            reshard = reshard_for(self._loader) if self._reshard is None else self._reshard
            state = reshard([parts[rank] for rank in sorted(parts)], self._data_count)[self._data_rank]
        self._loader.load_state_dict(state)
        # a loader that makes its iterator now draws its seed before the generators are set, as it did when it was saved
        self._loader.state_dict()


def _capture_generators(own: Mapping[str, torch.Generator]) -> dict[str, Any]:
    """Return the states of this process's generators: of Python, NumPy and torch, and of the current CUDA device."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": (version, torch.tensor(words, dtype=torch.int64), gauss),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "own": {name: generator.get_state() for name, generator in own.items()},
    }
    if _uses_cuda():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _restore_generators(state: Mapping[str, Any], own: Mapping[str, torch.Generator]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for name, generator in own.items():
        if name in state["own"]:
            generator.set_state(state["own"][name])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _seed_generators(state: Mapping[str, Any], rank: int, own: Mapping[str, torch.Generator]) -> None:
    """Seed the generators of a rank that was not there when the state was saved: differently from all other ranks'."""

    def seed(name: str) -> int:
        digest = hashlib.sha256(f"{name} {rank} ".encode() + state["torch"].numpy().tobytes()).digest()
        return int.from_bytes(digest[:_SEED_NBYTES], "little") >> 1

    random.seed(seed("python"))
    np.random.seed(seed("numpy") % (1 << 32))
    torch.default_generator.manual_seed(seed("torch"))
    for name, generator in own.items():
        generator.manual_seed(seed(f"own {name}"))
    if _uses_cuda():
        torch.cuda.manual_seed(seed("cuda"))


def _uses_cuda() -> bool:
    # not before the training has: it would take a context of hundreds of MB
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class _ToSave(dict[str, Any]):
    """A state dict to be saved. DCP's `load` fills such a one too, and gives it back."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (list(self.items()),)


def _warn_of_left(entries: Sequence[SavedEntry], state: Mapping[str, Any]) -> None:
    """Warn of what was saved and is not asked for, such as a scheduler that this state was not given."""
    left = dict.fromkeys(str(entry.path[0]) for entry in entries if entry.path[0] not in state)
    saved = dict.fromkeys(str(entry.path[1]) for entry in entries if entry.path[0] == "model" and len(entry.path) > 1)
    taken = set(saved_names(state["model"], saved).values())
    left |= dict.fromkeys(f"model.{fqn}" for fqn in saved if fqn not in taken)
    if left:
        shown = ", ".join(list(left)[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
        warnings.warn(
            f"The checkpoint also has {printable(shown)}, which this TrainingState does not have; it is not restored.",
            UserWarning,
            stacklevel=2,
        )


def _several(values: Any) -> tuple[Any, ...]:
    if values is None:
        return ()
    return tuple(values) if isinstance(values, list | tuple) else (values,)


def _ranks_of(fqns: Iterable[str], kind: str) -> list[int]:
    """Return the ranks that saved something of a kind, in order."""
    names = (fqn.split(".") for fqn in fqns)
    return sorted({int(name[1]) for name in names if name[0] == kind and len(name) > 1 and name[1].isdecimal()})


def _names_of(fqns: Iterable[str], rank: int) -> list[str]:
    prefix = f"{_DATA}.{rank}."
    return sorted(fqn[len(prefix) :] for fqn in fqns if fqn.startswith(prefix))
