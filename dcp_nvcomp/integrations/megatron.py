"""Megatron-core: `dist_checkpointing` through this package.

    dist_checkpointing.save(sharded, path, NvcompSaveStrategy())
    dist_checkpointing.load(sharded, path, NvcompLoadStrategy())    also checkpoints of Megatron's own format torch_dist

    register()      for programs that ask Megatron for its default strategies, as Megatron-LM's flags do

What Megatron itself puts beside the data files (`common.pt`, `metadata.json`) stays as it is, and says `torch_dist`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from megatron.core.dist_checkpointing.strategies import base
from megatron.core.dist_checkpointing.strategies import torch as megatron_torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.state_dict_saver import (
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.integrations.async_writer import NvcompAsyncWriter
from dcp_nvcomp.integrations.installing import check_options
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.saving.writer import NvcompWriter

__all__ = ["NvcompLoadStrategy", "NvcompSaveStrategy", "register"]

_FORMAT = ("torch_dist", 1)


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
        self,
        backend: str = _FORMAT[0],
        version: int = _FORMAT[1],
        *,
        writer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if options.get("separation_hint") is not None:
            raise ConfigurationError(
                "separation_hint= is for Megatron's own files: data files of this package are not named by keys."
            )
        check_options("writer", writer)
        super().__init__(backend, version, **options)
        self._writer_options = dict(writer or {})
        self._replace_keys = _private("_replace_state_dict_keys_with_sharded_keys")

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Save and wait; called by Megatron."""
        writer = NvcompWriter(checkpoint_dir, **self._writer_options)
        dcp_save(self._state_of(sharded_state_dict), storage_writer=writer, planner=self._planner())

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Plan, and return what `AsyncCallsQueue` is to call; called by Megatron."""
        writer = NvcompAsyncWriter(checkpoint_dir, **self._writer_options)
        planned = save_state_dict_async_plan(
            self._state_of(sharded_state_dict), writer, None, 0, planner=self._planner()
        )[0]
        write, copy, arguments = writer.get_save_function_and_args()
        return AsyncRequest(write, arguments, [lambda: save_state_dict_async_finalize(*planned)], preload_fn=copy)

    def _state_of(self, sharded_state_dict: Any) -> Any:
        sharded, _, _ = self._replace_keys(sharded_state_dict, self.keep_only_main_replica)
        return megatron_torch.mcore_to_pyt_state_dict(sharded, False)

    def _planner(self) -> Any:
        return megatron_torch.MCoreSavePlanner(
            dedup_replicated_tensors=not self.keep_only_main_replica,
            flatten_state_dict=False,
            can_run_decentralized_global_plan=self.keep_only_main_replica,
        )


class NvcompLoadStrategy(megatron_torch.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """Load sharded state that `NvcompSaveStrategy` or Megatron's own strategy saved.

    Args:
        reader: options of `NvcompReader`, but for the path.

    Raises:
        ConfigurationError: a wrong option, or a Megatron that is not known.
    """

    def __init__(self, reader: Mapping[str, Any] | None = None) -> None:
        check_options("reader", reader)
        super().__init__()
        self._reader_options = dict(reader or {})
        _hook_readers()

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Load; called by Megatron."""
        with self._reading():
            return super().load(sharded_state_dict, checkpoint_dir)

    def load_tensors_metadata(self, checkpoint_dir: str | os.PathLike[str], metadata: Metadata | None = None) -> Any:
        """Return which tensors there are; called by Megatron."""
        with self._reading():
            return super().load_tensors_metadata(checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: str | os.PathLike[str]) -> Any:
        """Return which tensors and objects there are; called by Megatron."""
        with self._reading():
            return super().load_sharded_metadata(checkpoint_dir)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        token = _reader_options.set(self._reader_options)
        try:
            yield
        finally:
            _reader_options.reset(token)


class _OneLoadReader(NvcompReader):
    """A reader for one load, which reads `.metadata` once: Megatron asks for it again after the load."""

    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read is None:
            self._read = super().read_metadata(*args, **kwargs)
        return self._read


def register(writer: Mapping[str, Any] | None = None, reader: Mapping[str, Any] | None = None) -> None:
    """Make these the default strategies for `torch_dist`, in this process and for good.

    Call it before Megatron saves or loads. Programs that make `TorchDistSaveShardedStrategy` by name are not reached.

    Args:
        writer: options of `NvcompWriter`, but for the path.
        reader: options of `NvcompReader`, but for the path.

    Raises:
        ConfigurationError: a wrong option, or a Megatron that is not known.
    """
    save, load = NvcompSaveStrategy(writer=writer), NvcompLoadStrategy(reader)

    def register_ours() -> None:
        base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, *_FORMAT, save)
        base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, *_FORMAT, load)

    _private("register_default_torch_strategies")
    # at each look-up Megatron registers its own strategies again: what it calls for that is what has to change
    megatron_torch.register_default_torch_strategies = register_ours


_reader_options: ContextVar[Mapping[str, Any] | None] = ContextVar("reader_options", default=None)


@functools.cache
def _hook_readers() -> None:
    """Let Megatron's loading get our reader while one of our strategies loads, in that thread only."""
    before = _private("_get_filesystem_reader")

    def reader_of(checkpoint_dir: Any, cache_metadata: bool = False) -> Any:
        options = _reader_options.get()
        return before(checkpoint_dir, cache_metadata) if options is None else _OneLoadReader(checkpoint_dir, **options)

    megatron_torch._get_filesystem_reader = reader_of


def _private(name: str) -> Any:
    found = getattr(megatron_torch, name, None)
    if found is None:
        raise ConfigurationError(
            f"This Megatron-core has no {megatron_torch.__name__}.{name}, which the strategies build on: they are made "
            "for 0.16. Use that, or another version of dcp-nvcomp."
        )
    return found
