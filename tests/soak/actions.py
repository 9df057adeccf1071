"""The actions of ranks in a soak: save, load, verify, recover, clean."""

from __future__ import annotations

import errno
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.staging import staged_by
from dcp_nvcomp import NvcompReader, NvcompWriter, async_save, tools
from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from dcp_nvcomp.storage.objects.s3 import S3Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.conformance.sabotage import FailingSavePlanner
from tests.faults.intercept import Fault, FaultyCalls, intercept_system_calls

from .contents import content, facts, local, placed
from .places import Place

DAYS_SECONDS = 2 * 86400.0
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES)


class RandomFaults:
    """A hook that lets some of the system calls fail, and cuts some reads and writes short."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._faults = FaultyCalls()
        self._rate = self._draw.choice([0.0, 0.01, 0.05])

    def __call__(self, name: str, call: Any, *args: Any, **options: Any) -> Any:
        kind = self._draw.random()
        if kind < self._rate:
            number, done = self._draw.choice(ERRORS), self._draw.random() < 0.3
            self._faults.fault = Fault(len(self._faults.names), number, done)
        elif kind < 2 * self._rate:
            self._faults.fault = Fault(len(self._faults.names), 0)
        return self._faults(name, call, *args, **options)


def _break_system_calls(place: Place, seed: int) -> None:
    """From here on in this process, if the place is a disk with faults."""
    if place.faulty and not place.options:
        intercept_system_calls(setattr, RandomFaults(seed))


def save(
    place: Place,
    path: str,
    family: int,
    seed: int,
    *,
    how: str,
    writer_options: dict[str, Any],
    failing_rank: int | None = None,
) -> None:
    """Save a content, `how` being `sync`, `async` (that of DCP), `staged` or `copied`."""
    state = {"tensors": placed(content(family, seed), seed), "facts": facts(family, seed)}
    _break_system_calls(place, seed)
    writer = NvcompWriter(f"{place.url}/{path}", **writer_options, **place.options)
    planner = None if failing_rank is None else FailingSavePlanner("resolve_data", rank=failing_rank, survivors=0)
    no_dist = not dist.is_initialized()
    if how == "async":
        dcp.async_save(state, storage_writer=writer, planner=planner, no_dist=no_dist).result()
    elif how in ("staged", "copied"):
        with staged_by("copy" if how == "copied" else "encode"):
            saving = async_save(state, storage_writer=writer, planner=planner, no_dist=no_dist)
        for tensor in state["tensors"].values():  # as training would
            own = local(tensor)
            own.copy_(~own)
        saving.upload_completion.result()
    else:
        dcp.save(state, storage_writer=writer, planner=planner, no_dist=no_dist)


def load(place: Place, path: str, family: int, candidates: list[int], seed: int, *, verify: str) -> list[int]:
    """Load, and say which contents this rank's part fits; every byte of the destination is wrong before."""
    states = {candidate: placed(content(family, candidate), seed) for candidate in candidates}
    into = {"tensors": placed(content(family, candidates[0]), seed), "facts": facts(family, -1)}
    for tensor in into["tensors"].values():
        own = local(tensor)
        own.copy_(~own)
    _break_system_calls(place, seed)
    reader = NvcompReader(f"{place.url}/{path}", verify=verify, **place.options)
    dcp.load(into, storage_reader=reader, no_dist=not dist.is_initialized())
    return [
        candidate
        for candidate, state in states.items()
        if into["facts"] == facts(family, candidate)
        and all(torch.equal(local(into["tensors"][key]), local(tensor)) for key, tensor in state.items())
    ]


def named_files(place: Place, path: str) -> list[str]:
    """What `.metadata` names, without itself, its immutable copy first."""
    filesystem = open_filesystem(f"{place.url}/{path}", storage_options=place.plain_options)
    data = filesystem.read_all(METADATA_NAME, limit_nbytes=1 << 30)
    metadata = parse_metadata(data, path=path)
    assert metadata.storage_meta is not None
    files = {value[0][0] for value in metadata.storage_data.values()}
    return [f"__{metadata.storage_meta.save_id}.metadata", *sorted(files)]


def verify(place: Place, path: str) -> list[tuple[str, str]]:
    """Severity and text of what a full verification finds."""
    try:
        found = tools.verify(f"{place.url}/{path}", full=True, storage_options=place.options)
    except CheckpointError as error:  # `.metadata` can't be read: there is nothing to go by
        return [("error", str(error))]
    return [(finding.severity, f"{finding.file}: {finding.what}") for finding in found.findings]


def recover(place: Place, path: str, save_id: str | None) -> str:
    """Bring `.metadata` back; what became of it."""
    return tools.recover(f"{place.url}/{path}", save_id=save_id, storage_options=place.options).outcome


def clean_now(place: Place, path: str) -> int:
    """Clean up; how many orphans went."""
    return len(tools.clean(f"{place.url}/{path}", storage_options=place.options).orphans)


def clean_later(place: Place, path: str) -> int:
    """Clean up as if days had gone by."""
    for kind in (PosixFilesystem, S3Filesystem):
        real = kind.now_seconds
        kind.now_seconds = lambda self, real=real: real(self) + DAYS_SECONDS  # type: ignore[method-assign]
    return clean_now(place, path)
