"""The options of a manager: checked, forwarded to writers, readers and storage, and what all its parts share."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist

from dcp_nvcomp.calls.suggestions import unknown_option
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.format.framing import MAX_METADATA_NBYTES
from dcp_nvcomp.loading.reader import NvcompReader
from dcp_nvcomp.options import DEADLINE_OPTION, option_names
from dcp_nvcomp.runs.events import Event
from dcp_nvcomp.runs.retention import Keep, KeepRule
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.runs.tiers.nodes import Nodes
from dcp_nvcomp.saving.plans.differences import OnDifference
from dcp_nvcomp.saving.writer import NvcompWriter

REPLICAS: Final = "replicas"


@dataclass(frozen=True)
class ForwardedOptions:
    """Options of `NvcompWriter` and `NvcompReader`; and for the durable tier's filesystem, with its deadline."""

    writer: Mapping[str, Any]
    reader: Mapping[str, Any]
    storage: Mapping[str, Any]

    @staticmethod
    def of(root: str, options: Mapping[str, Any], own_names: Sequence[str] = ()) -> ForwardedOptions:
        writer_names, reader_names = set(option_names(NvcompWriter)), set(option_names(NvcompReader))
        writer = {name: value for name, value in options.items() if name in writer_names}
        reader = {name: value for name, value in options.items() if name in reader_names}
        rest = {name: value for name, value in options.items() if name not in writer_names | reader_names}
        if "reference" in writer:
            raise ConfigurationError("reference= is chosen by the manager: incremental=True.")
        for name in rest:
            close = difflib.get_close_matches(name, own_names, n=1, cutoff=0.8)
            if close:
                raise unknown_option(name, close)
        NvcompWriter(root, **writer, **rest)  # these two look at all values, and open the storage
        NvcompReader(root, **reader, **rest)
        deadline = {name: value for name, value in options.items() if name == DEADLINE_OPTION}
        return ForwardedOptions(writer, reader, {**rest, **deadline})

    def durable_writer(self, path: str, reference: Sequence[str] | None = None) -> NvcompWriter:
        return NvcompWriter(path, reference=reference, **{**self.writer, **self.storage})

    def fast_writer(self, path: str) -> NvcompWriter:
        """Return a writer into the fast tier: what a power failure takes from there is on other nodes."""
        return NvcompWriter(path, **{**self.writer, "sync_files": False})

    @property
    def own_metadata_limit_nbytes(self) -> int:
        """How large the `.metadata` may be that a manager reads to find out what is there.

        A limit that is lower than usual is of what is restored: it refuses a step, and does not make it pass unseen.
        """
        given: int = self.reader.get("metadata_limit_nbytes", 0)
        return max(MAX_METADATA_NBYTES, given)

    @property
    def for_durable_reader(self) -> dict[str, Any]:
        return {**self.reader, **self.storage}


@dataclass(frozen=True)
class RunContext:
    nodes: Nodes
    fast: FastTier | None
    durable: DurableTier
    keep: Keep | KeepRule | None
    fast_keep: int
    copies: int  # nodes that get those of each node's files
    every: int
    emit: Callable[[Event], None]
    group: dist.ProcessGroup | None
    options: ForwardedOptions
    on_difference: OnDifference

    def is_due(self, step: int) -> bool:
        return is_multiple(step, self.every)


def check_count(name: str, value: Any, *, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r} must be a whole number of at least {least}.")
    return value


def check_tiers(every: Any, fast: Any, fast_every: Any, fast_keep: Any, copies: Any) -> None:
    """Raise ConfigurationError if options can't work, or those of the fast tier contradict each other."""
    check_count("every", every)
    check_count("fast_keep", fast_keep)
    if fast_every is not None:
        check_count("fast_every", fast_every)
    if copies != REPLICAS:
        check_count("copies", copies, least=0)
    if fast is None and (fast_every is not None or copies):
        raise ConfigurationError("fast_every= and copies= are of the fast tier: name its directory with fast=.")


def is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step > 0 and step % every == 0


def job_id() -> str | None:
    """Return torchrun's id of this job; None without torchrun, and if it was given none."""
    found = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return None if found in ("", "none") else found
