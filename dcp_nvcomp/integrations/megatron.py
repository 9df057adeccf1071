"""Megatron-core 0.16 to 0.19: `dist_checkpointing` through this package.

What Megatron itself puts beside the data files (`metadata.json`, `common.pt` until 0.18) stays as it is, and says
`torch_dist`.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import megatron.core
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.integrations.async_writer import NvcompAsyncWriter
from dcp_nvcomp.integrations.installing import check_options
from dcp_nvcomp.integrations.stock_classes import Kind
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.saving.writer import NvcompWriter

_KNOWN = ("0.16", "0.17", "0.18", "0.19")  # in the tests; Megatron changes what is used here from one to the next
# How its optimizers name float32 weights: before the key of those that the model computes with.
_DERIVED: Mapping[str, Any] = {"derived": {"optimizer.state.fp32_param.*": "*"}}
_PRIVATE = (
    "MCoreSavePlanner",
    "_get_filesystem_reader",
    "_replace_state_dict_keys_with_sharded_keys",
    "mcore_to_pyt_state_dict",
)


class NvcompSaveStrategy(megatron_torch.TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Save sharded state, synchronously or with `async_sharded_save=True`.

    Args:
        backend: the name under which `metadata.json` tells Megatron how to load it.
        version: of that.
        writer: options of `NvcompWriter`, but for the path.
        **options: of Megatron's own strategy. Those that tune its writer mean nothing here.

    Raises:
        ConfigurationError: `separation_hint`, which names data files by keys, a wrong option, or a Megatron that is not
            known.
    """

    def __init__(
        self, backend: str = "torch_dist", version: int = 1, *, writer: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        if options.get("separation_hint") is not None:
            raise ConfigurationError(
                "separation_hint= is for Megatron's own files: data files of this package are not named by keys."
            )
        _check_megatron()
        check_options("writer", writer)
        super().__init__(backend, version, **options)
        self._writer_options = dict(writer or {})

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save and wait; called by Megatron."""
        _save(self, self._writer_options, sharded_state_dict, checkpoint_dir)

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], async_strategy: str | None = None
    ) -> Any:
        """Plan, and return what `AsyncCallsQueue` is to call; called by Megatron."""
        return _async_save(self, self._writer_options, sharded_state_dict, checkpoint_dir, async_strategy)


class NvcompLoadStrategy(megatron_torch.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Load sharded state that `NvcompSaveStrategy` or Megatron's own strategy saved.

    Args:
        reader: options of `NvcompReader`, but for the path.
        **options: of Megatron's own strategy.

    Raises:
        ConfigurationError: a wrong option, or a Megatron that is not known.
    """

    def __init__(self, reader: Mapping[str, Any] | None = None, **options: Any) -> None:
        _check_megatron()
        check_options("reader", reader)
        super().__init__(**options)
        self._reader_options = dict(reader or {})
        _hook_readers()

    def load(self, *args: Any, **kwargs: Any) -> Any:
        """Load; called by Megatron."""
        with self._reading():
            return super().load(*args, **kwargs)

    def load_tensors_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return which tensors there are; called by Megatron."""
        with self._reading():
            return super().load_tensors_metadata(*args, **kwargs)

    def load_sharded_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """Return which tensors and objects there are; called by Megatron."""
        with self._reading():
            return super().load_sharded_metadata(*args, **kwargs)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        token = _reader_options.set(self._reader_options)
        try:
            yield
        finally:
            _reader_options.reset(token)


def register(writer: Mapping[str, Any] | None = None, reader: Mapping[str, Any] | None = None) -> None:
    """Let Megatron's own strategies for `torch_dist` save and load through this package, in this process and for good.

    Call it before Megatron saves or loads. Subclasses of its saving strategy are left alone, and so are calls that ask
    it for `separation_hint`; what they save is loaded all the same.

    Args:
        writer: options of `NvcompWriter`, but for the path.
        reader: options of `NvcompReader`, but for the path.

    Raises:
        ConfigurationError: a wrong option, or a Megatron that is not known.
    """
    _check_megatron()
    check_options("writer", writer)
    check_options("reader", reader)
    _registered["writer"], _registered["reader"] = dict(writer or {}), dict(reader or {})
    _hook_saves()
    _hook_readers()


_registered: dict[Kind, Mapping[str, Any]] = {}
_reader_options: ContextVar[Mapping[str, Any] | None] = ContextVar("reader_options", default=None)


def _save(strategy: Any, options: Mapping[str, Any], sharded_state_dict: Any, checkpoint_dir: Any) -> None:
    writer = NvcompWriter(checkpoint_dir, **{**_DERIVED, **options})
    dcp_save(_state_of(strategy, sharded_state_dict), storage_writer=writer, planner=_planner(strategy))


def _async_save(
    strategy: Any,
    options: Mapping[str, Any],
    sharded_state_dict: Any,
    checkpoint_dir: Any,
    async_strategy: str | None = None,
) -> Any:
    parts = _async_parts(async_strategy)
    writer = NvcompAsyncWriter(checkpoint_dir, **{**_DERIVED, **options})
    plan, finalize, request = (
        parts[name] for name in ("save_state_dict_async_plan", "save_state_dict_async_finalize", "AsyncRequest")
    )
    planned = plan(_state_of(strategy, sharded_state_dict), writer, None, 0, planner=_planner(strategy))
    if isinstance(planned[0], tuple):  # Megatron's own: what is to be cached comes with it
        planned = planned[0]
    write, copy, arguments = writer.get_save_function_and_args()
    return request(write, arguments, [lambda: finalize(*planned)], async_fn_kwargs={}, preload_fn=copy)


def _async_parts(strategy: str | None) -> Mapping[str, Any]:
    """Return the functions and the class of an asynchronous save by their names."""
    if strategy is not None:  # "mcore" or "nvrx"; before 0.17 Megatron has no choice yet
        _, parts = megatron_torch.get_async_strategy(strategy)
        return dict(parts)
    from megatron.core.dist_checkpointing.strategies import async_utils, state_dict_saver

    return {**vars(state_dict_saver), "AsyncRequest": async_utils.AsyncRequest}


def _state_of(strategy: Any, sharded: Any) -> Any:
    by_key, _, _ = megatron_torch._replace_state_dict_keys_with_sharded_keys(sharded, strategy.keep_only_main_replica)
    return megatron_torch.mcore_to_pyt_state_dict(by_key, False)


def _planner(strategy: Any) -> Any:
    return megatron_torch.MCoreSavePlanner(
        dedup_replicated_tensors=not strategy.keep_only_main_replica,
        flatten_state_dict=False,
        can_run_decentralized_global_plan=strategy.keep_only_main_replica,
    )


class _OneLoadReader(NvcompReader):
    """A reader for one load, which reads `.metadata` once: Megatron asks for it again after the load."""

    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read is None:
            self._read = super().read_metadata(*args, **kwargs)
        return self._read


@functools.cache
def _hook_saves() -> None:
    """Let the methods of Megatron's strategy ask `_registered`: programs make it by its class, or by its name."""
    stock = megatron_torch.TorchDistSaveShardedStrategy

    def hooked(before: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if type(self) is not stock or self.separation_hint is not None:
                return before(self, *args, **kwargs)
            return ours(self, _registered["writer"], *args, **kwargs)

        return method

    stock.save, stock.async_save = hooked(stock.save, _save), hooked(stock.async_save, _async_save)


@functools.cache
def _hook_readers() -> None:
    """Let Megatron get our reader while one of our strategies loads, in that thread only, or always if registered."""

    def hooked(before: Callable[..., Any], otherwise: Mapping[str, Any] | None) -> Callable[..., Any]:
        @functools.wraps(before)
        def reader_of(checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
            options = _reader_options.get()
            if options is None:
                options = _registered.get("reader", otherwise)
            if options is None:
                return before(checkpoint_dir, *args, **kwargs)
            return _OneLoadReader(checkpoint_dir, **options)

        return reader_of

    megatron_torch._get_filesystem_reader = hooked(megatron_torch._get_filesystem_reader, None)
    if hasattr(serialization, "_get_filesystem_reader"):
        serialization._get_filesystem_reader = hooked(serialization._get_filesystem_reader, {})


@functools.cache
def _check_megatron() -> None:
    """Refuse a Megatron whose checkpoints might be saved and not be loaded again, before anything is saved."""
    version = str(megatron.core.__version__)
    found = re.match(r"\d+\.\d+", version)
    if found is None or found[0] not in _KNOWN:
        raise ConfigurationError(
            f"Megatron-core {version} is not known to this version of dcp-nvcomp, which is made for {_KNOWN[0]} to "
            f"{_KNOWN[-1]}: what it saved there might not be loaded again. Install one of these, or look for a newer "
            "dcp-nvcomp."
        )
    for name in _PRIVATE:
        if not hasattr(megatron_torch, name):
            raise ConfigurationError(
                f"Megatron-core {version} has no {megatron_torch.__name__}.{name}, which the strategies build on. "
                f"Install a released version of {_KNOWN[0]} to {_KNOWN[-1]}, or look for a newer dcp-nvcomp."
            )
