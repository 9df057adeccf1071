"""Step: the engine without files: how fast it encodes and decodes, by batch size, and where the time goes."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Iterator, Mapping
from functools import cache, cached_property, partial
from typing import Any

import torch

from benchmarks.gpu_acceptance.host import MIB, Host
from benchmarks.gpu_acceptance.made import State, made_state
from benchmarks.gpu_acceptance.results import PLAIN_COPY, Probe
from benchmarks.gpu_codecs import EngineWork, timed
from benchmarks.gpu_device import host_memory, synchronize
from benchmarks.measuring import Case, alternate, paired
from benchmarks.states import nbytes_of
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.engine import EnginePolicy

_CODECS = ("ans", "planes-deflate")
_BATCHES_MIB = (32, 128, 256, 512)
_TOP = 15


class _Shared:
    """State, device and host memory of all probes, made when first needed."""

    def __init__(self, host: Host) -> None:
        self.host = host

    @cached_property
    def state(self) -> State:
        return made_state(self.host.pick(1024, 3) * MIB, self.host.torch_device)

    @cached_property
    def device(self) -> Device:
        return self.host.device()

    @cached_property
    def arena(self) -> torch.Tensor:
        return host_memory(nbytes_of(self.state) * 5 // 4 + 64 * MIB, self.host.torch_device)

    def work(self, codec: str, batch_mib: int, *, check_encodes: bool = True) -> EngineWork:
        policy = EnginePolicy(self.host.pick(4096, 64) * MIB, check_encodes=check_encodes)
        return EngineWork(self.state, codec, self.device, batch_mib * MIB, self.arena, policy)

    @cache  # noqa: B019  lives as long as the process
    def warm(self, batch_mib: int) -> EngineWork:
        """Return work that was done before, so that nothing is compiled or made when it is done again."""
        work = self.work("auto", batch_mib)
        for _ in range(2):
            work.encode()
            work.decode()
        return work


def probes(host: Host) -> Iterator[Probe]:
    shared = _Shared(host)
    batches = host.pick(_BATCHES_MIB, (1, 4))
    # what is most wanted first: the time may end before they do
    for batch_mib in batches:
        yield f"auto, batches of {batch_mib} MiB", partial(_rates, shared, "auto", batch_mib)
    yield "staging", partial(_staging, shared, batches[1:3])
    for batch_mib in batches[1:2]:
        for action in ("encode", "decode"):
            yield f"profile of {action}, batches of {batch_mib} MiB", partial(_profile, shared, action, batch_mib)
            yield f"Python in {action}, batches of {batch_mib} MiB", partial(_python, shared, action, batch_mib)
    unchecked = partial(_rates, shared, "auto", batches[-2], check_encodes=False)
    yield f"auto, batches of {batches[-2]} MiB, not checked", unchecked
    for codec in host.pick(_CODECS, ()):
        for batch_mib in batches[-2:]:
            yield f"{codec}, batches of {batch_mib} MiB", partial(_rates, shared, codec, batch_mib)


def _rates(shared: _Shared, codec: str, batch_mib: int, *, check_encodes: bool = True) -> Mapping[str, Any]:
    work = shared.work(codec, batch_mib, check_encodes=check_encodes)
    seconds = timed(work, shared.host.pick(3, 1))
    nbytes = nbytes_of(shared.state)
    row: dict[str, Any] = {"codec": codec, "checked": "yes" if check_encodes else "no"}
    row |= {"batch_mib": batch_mib, "ratio": nbytes / work.encode()}
    for name, spent in seconds.items():
        row[f"{name.replace(' ', '_')}_rate"] = spent.rate(nbytes / 1e9)
    return {"rows": {"engine": [row]}}


def _staging(shared: _Shared, batches_mib: tuple[int, ...]) -> Mapping[str, Any]:
    """Copy a state off the GPU, encoded and as it is."""
    device, state = shared.host.torch_device, shared.state
    pinned = {name: host_memory(tensor.nbytes, device) for name, tensor in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            pinned[name].copy_(tensor.view(torch.uint8).reshape(-1), non_blocking=True)
        synchronize(device)

    cases = {PLAIN_COPY: Case(copy)}
    for batch_mib in batches_mib:
        work = shared.work("auto", batch_mib)
        cases[f"auto, batches of {batch_mib} MiB"] = Case(work.encode_overlapped)
    seconds = alternate(cases, repeats=shared.host.pick(5, 1))
    plain, nbytes = seconds[PLAIN_COPY], nbytes_of(state)
    rows = [
        {"how": how, "seconds": spent, "rate": spent.rate(nbytes / 1e9), "speedup": paired(plain, spent)}
        for how, spent in seconds.items()
    ]
    return {"nbytes": nbytes, "rows": {"staging": rows}}


def _profile(shared: _Shared, action: str, batch_mib: int) -> Mapping[str, Any]:
    """List the slowest kernels and operators, and count the calls of CUDA, with torch's profiler."""
    run = getattr(shared.warm(batch_mib), action)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not shared.host.stand_in:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        shared.host.synchronize()
    averages = profile.key_averages()
    batches = max(1, nbytes_of(shared.state) // (batch_mib * MIB))
    return {
        "batches": batches,
        "on the GPU": _top(averages, "self_device_time_total"),
        "on the CPU": _top(averages, "self_cpu_time_total"),
        "calls of CUDA": {one.key: one.count for one in averages if one.key.startswith("cu")},
    }


def _top(averages: Any, time: str) -> list[Mapping[str, Any]]:
    slowest = sorted(averages, key=lambda one: getattr(one, time), reverse=True)[:_TOP]
    return [
        {"name": one.key[:120], "count": one.count, "milliseconds": getattr(one, time) / 1e3}
        for one in slowest
        if getattr(one, time) > 0
    ]


def _python(shared: _Shared, action: str, batch_mib: int) -> Mapping[str, Any]:
    """List the slowest functions of the engine's own thread, waiting for the GPU included."""
    run = getattr(shared.warm(batch_mib), action)
    profile = cProfile.Profile()
    profile.runcall(run)
    shared.host.synchronize()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    slowest = sorted(stats.items(), key=lambda item: item[1][2], reverse=True)[:_TOP]
    return {
        "functions": [
            {"name": f"{file.rpartition('/')[2]}:{line} {name}", "count": calls, "milliseconds": own * 1e3}
            for (file, line, name), (calls, _, own, _, _) in slowest
        ]
    }
