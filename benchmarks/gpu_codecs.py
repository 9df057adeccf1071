"""Parts of `gpu`: the CUDA engine by itself, without files.

"engine" is what a save and a load get: kernels, nvCOMP, checksums, copies between GPU and host. Staging is done as by a
save, with two engines: one encodes while what the other has encoded is copied, and a third thread compares what has
arrived. "device" is the GPU's own time for it, without those copies and without what the host does before and after: by
how much the engine could still gain from better overlap. The ceiling is nvCOMP's open coder alone on the planes that it
codes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import LifoQueue, SimpleQueue
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_device import Meter, RawCoder, host_memory, synchronize, with_siblings
from benchmarks.measuring import Case, Spread, alternate, paired
from benchmarks.results import Plot, Report
from benchmarks.slices import EXPONENT_CODERS, exponents
from benchmarks.states import State, build_state, component, nbytes_of
from dcp_nvcomp.codecs import Ans, CodecChain
from dcp_nvcomp.codecs.base import EncodedBlock
from dcp_nvcomp.codecs.choose import parse_codec, sample_nbytes
from dcp_nvcomp.codecs.coders import DEFAULT_SLICE_NBYTES
from dcp_nvcomp.codecs.encoded_run import EncodedRun, encoded_nbytes
from dcp_nvcomp.engines.cuda.decode_jobs import DecodeJob, DecodeRun, JobChecks, Work
from dcp_nvcomp.engines.cuda.device import Device
from dcp_nvcomp.engines.cuda.encode import EncodeJob
from dcp_nvcomp.engines.cuda.engine import CudaEngine
from dcp_nvcomp.engines.cuda.fallback import EnginePolicy
from dcp_nvcomp.engines.cuda.pool import ENGINES_PER_DEVICE
from dcp_nvcomp.engines.tensors import element_type
from dcp_nvcomp.saving.encode.choices import spread_sample

MIB = 1 << 20
CODECS = ("auto", "planes-zstd", "planes-deflate", "zstd", "ans")
OPEN_CODECS = CODECS[:4]
POLICY = EnginePolicy(2 << 30)
# How many bytes of blocks the engine is handed at once: as a save of a small and of a large state does.
BATCHES = (32 * MIB, 256 * MIB)
ENCODE_TARGET, DECODE_TARGET, ANS_TARGET = 60.0, 80.0, 150.0


@dataclass(frozen=True)
class _Batch:
    """Blocks that are handed to an engine together, as runs of them in the state, and where they are decoded to."""

    jobs: Sequence[EncodeJob]
    outs: Sequence[torch.Tensor]

    @property
    def max_encoded_nbytes(self) -> int:
        return sum(job.chain.max_encoded_nbytes(nbytes) for job in self.jobs for nbytes in job.block_nbytes.tolist())

    def works(self, encoded: Sequence[EncodedBlock]) -> Iterator[Work]:
        """Yield what decodes it: runs, but for blocks that an engine has encoded one by one."""
        at = 0
        for job, out in zip(self.jobs, self.outs, strict=True):
            mine, at = encoded[at : at + job.count], at + job.count
            if isinstance(mine, EncodedRun):
                yield DecodeRun(mine, job.chain, out)
                continue
            for one, to in zip(mine, out.split(job.block_nbytes.tolist()), strict=True):
                yield DecodeJob(one.data, one.row, job.chain, to)


def _run(tensor: torch.Tensor, out: torch.Tensor, chain: CodecChain) -> tuple[EncodeJob, torch.Tensor]:
    """Return the blocks of a tensor as a save hands them to an engine."""
    bounds = np.append(np.arange(0, tensor.nbytes, chain.block_nbytes), tensor.nbytes)
    return EncodeJob((tensor.view(torch.uint8).reshape(-1),), chain, bounds=bounds), out.view(torch.uint8).reshape(-1)


def _batches(runs: Iterable[tuple[EncodeJob, torch.Tensor]], batch_nbytes: int) -> Iterator[_Batch]:
    jobs: list[EncodeJob] = []
    outs: list[torch.Tensor] = []
    room = batch_nbytes
    for job, out in runs:
        assert job.bounds is not None
        at = 0
        while at < job.count:
            fitting = int(np.searchsorted(job.bounds, job.bounds[at] + room, side="right")) - 1 - at
            if fitting < 1 and jobs:
                yield _Batch(jobs, outs)
                jobs, outs, room = [], [], batch_nbytes
                continue
            stop = at + max(fitting, 1)
            start, end = job.bounds[[at, stop]].tolist()
            jobs.append(job.part(at, stop))
            outs.append(out[start:end])
            room -= end - start
            at = stop
    yield _Batch(jobs, outs)


class Metered(CudaEngine):
    """An engine on a `Meter`, with which nothing arrives on the host: what should have arrived is not compared."""

    def put_right(
        self, jobs: Sequence[EncodeJob], encoded: Sequence[EncodedBlock], out: memoryview, policy: EnginePolicy
    ) -> Sequence[EncodedBlock]:
        return encoded

    def _encoded_again(self, jobs: Any, run: EncodedRun, *_: Any, **__: Any) -> list[EncodedBlock]:
        return [*run]


class EngineWork:
    """One state under one codec: encoded into an arena of pinned memory, and decoded from there.

    Args:
        state: the state, on the device.
        codec: the writer's option.
        device: where it is done.
        batch_nbytes: how much the engine is handed at once.
        arena: host memory for what is encoded.
        policy: of the engine; two that work at once share its budget.
    """

    def __init__(
        self,
        state: State,
        codec: str,
        device: Device,
        batch_nbytes: int,
        arena: torch.Tensor,
        policy: EnginePolicy = POLICY,
    ) -> None:
        self.state = state
        self.meter = Meter(device)
        self._codec = codec
        self._nvcomp_version = str(device.nvcomp.__version__)
        self._arena = arena
        self._policy = policy
        # as a save: engines with a stream each, which share the budget
        share = replace(policy, device_memory_budget=policy.device_memory_budget // ENGINES_PER_DEVICE)
        self._engines = [
            CudaEngine(device.torch_device, share, backend=backend)
            for backend in with_siblings(device, ENGINES_PER_DEVICE)
        ]
        self._engine = CudaEngine(device.torch_device, policy, backend=device)
        self._metered = Metered(device.torch_device, policy, backend=self.meter)
        self._out = {name: torch.empty_like(tensor).fill_(0) for name, tensor in state.items()}
        runs = (_run(tensor, self._out[name], self._chain_for(tensor)) for name, tensor in state.items())
        self._batches = list(_batches(runs, batch_nbytes))
        self._encoded: list[Sequence[EncodedBlock]] = []

    def _chain_for(self, tensor: torch.Tensor) -> CodecChain:
        element = element_type(tensor.dtype)
        assert element is not None
        sample = spread_sample(tensor, sample_nbytes(tensor.nbytes))
        chain = parse_codec(self._codec).choose(element, sample, tensor.nbytes)
        if isinstance(chain.coder, Ans):
            return CodecChain(chain.array_to_bytes, replace(chain.coder, nvcomp_version=self._nvcomp_version))
        return chain

    def encode(self, *, metered: bool = False) -> int:
        """Encode everything; returns the encoded size."""
        engine = self._metered if metered else self._engine
        memory, position, encoded = self._arena.numpy().data, 0, []
        for batch in self._batches:
            done = engine.encode(batch.jobs, memory[position : position + batch.max_encoded_nbytes])
            position += encoded_nbytes(done)
            encoded.append(done)
        if not metered:  # else nothing arrived on the host
            self._encoded = encoded
        return position

    def encode_overlapped(self) -> None:
        """Encode everything, each batch to a place of its own, by as many threads as a save has.

        That is one more than engines: it compares what has arrived while the engines work for the others.
        """
        memory, position = self._arena.numpy().data, 0
        waiting: SimpleQueue[tuple[_Batch, memoryview] | None] = SimpleQueue()
        for batch in self._batches:
            waiting.put((batch, memory[position : position + batch.max_encoded_nbytes]))
            position += batch.max_encoded_nbytes
        free: LifoQueue[CudaEngine] = LifoQueue()
        for engine in self._engines:
            free.put(engine)

        def work() -> None:
            while (taken := waiting.get()) is not None:
                batch, room = taken
                engine = free.get()
                try:
                    encoded = engine.encode_checked(batch.jobs, room)
                finally:
                    free.put(engine)
                engine.put_right(batch.jobs, encoded, room, self._policy)

        threads = len(self._engines) + 1
        for _ in range(threads):
            waiting.put(None)
        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work) for _ in range(threads)]:
                done.result()

    def decode(self, *, metered: bool = False) -> None:
        """Decode what was encoded last, on one thread. Rows are looked at first, and laid out as if they were new."""
        engine, checks = self._metered if metered else self._engine, JobChecks()
        for batch, encoded in zip(self._batches, self._encoded, strict=True):
            works = [*batch.works(encoded)]
            runs = [work for work in works if isinstance(work, DecodeRun)]
            columns = checks.columns_of(runs) if len(runs) == len(works) else None
            if columns is not None:
                engine.decode_checked(works, verify="stored", columns=columns)
            else:
                engine.decode(works, verify="stored")

    def show_arena(self) -> None:
        """Before decoding on the device alone."""
        self.meter.show(self._arena)

    def assert_decoded(self) -> None:
        for name, tensor in self.state.items():
            assert torch.equal(self._out[name].view(torch.uint8), tensor.view(torch.uint8)), (self._codec, name)


def timed(work: EngineWork, repeats: int) -> Mapping[str, Spread]:
    """Seconds of encode and decode, by the engine and on the device alone."""
    device = work.meter.torch_device
    found: dict[str, list[float]] = {name: [] for name in ("encode", "decode", "device encode", "device decode")}
    for repeat in range(-1, repeats):
        for name, action in (("encode", work.encode), ("decode", work.decode)):
            synchronize(device)
            start = time.perf_counter()
            action()
            synchronize(device)
            spent = time.perf_counter() - start
            if name == "decode":
                work.show_arena()
            work.meter.seconds()
            action(metered=True)
            alone = work.meter.seconds()
            if repeat >= 0:
                found[name].append(spent)
                found[f"device {name}"].append(alone)
        if repeat < 0:
            work.assert_decoded()
    return {name: Spread(tuple(values)) for name, values in found.items()}


def codecs(report: Report, device: Device, names: Sequence[str] = CODECS) -> None:
    """Encode and decode rates."""
    settings = report.settings
    repeats = settings.repeats_or(7)
    state = build_state(settings.nbytes_or(1 << 30), settings.state, device=device.torch_device, tensor_nbytes=64 * MIB)
    kinds = {
        "bf16": {name: tensor for name, tensor in state.items() if component(name) in ("model", "grad")},
        "fp32": {name: tensor for name, tensor in state.items() if component(name) in ("exp_avg", "exp_avg_sq")},
        "all": state,
    }
    table = report.table(
        "codecs",
        f"{nbytes_of(state) / 1e6:.0f} MB of real state on the GPU, GB/s of it: median (lowest-highest) of {repeats}",
        codec=("codec", ""),
        state=("state", ""),
        batch_mib=("batch, MiB", "d"),
        ratio=("ratio", ".3f"),
        encode_rate=("encode, engine", ".1f"),
        decode_rate=("decode, engine", ".1f"),
        device_encode_rate=("encode, device", ".1f"),
        device_decode_rate=("decode, device", ".1f"),
    )
    arena = host_memory(nbytes_of(state) * 5 // 4 + 64 * MIB, device.torch_device)
    for codec in names:
        for batch_nbytes in BATCHES:
            for kind, part in kinds.items():
                settings.say(f"{codec}, {kind}, batches of {batch_nbytes >> 20} MiB")
                work = EngineWork(part, codec, device, batch_nbytes, arena)
                seconds = timed(work, repeats)
                nbytes = nbytes_of(part)
                table.add(
                    codec=codec,
                    state=kind,
                    batch_mib=batch_nbytes >> 20,
                    ratio=nbytes / work.encode(),
                    encode_rate=seconds["encode"].rate(nbytes / 1e9),
                    decode_rate=seconds["decode"].rate(nbytes / 1e9),
                    device_encode_rate=seconds["device encode"].rate(nbytes / 1e9),
                    device_decode_rate=seconds["device decode"].rate(nbytes / 1e9),
                )
    _check_codecs(report, table.rows, _ceilings(report, device, state, repeats))
    for action in ("encode", "decode"):
        series = {
            where: [
                (row["codec"], row[f"{prefix}{action}_rate"])
                for row in table.rows
                if row["state"] == "all" and row["batch_mib"] == BATCHES[-1] >> 20
            ]
            for where, prefix in (("engine", ""), ("device", "device_"))
        }
        report.plots.append(Plot(f"{action}, real composition", "", "GB/s", series))


def _ceilings(report: Report, device: Device, state: State, repeats: int) -> dict[str, float]:
    """Rates of nvCOMP's open coder alone, in bytes of whole floats, on the composition of the state."""
    table = report.table(
        "ceilings",
        f"nvCOMP's open coder alone on the exponent planes of that state, slices of {DEFAULT_SLICE_NBYTES >> 10} KiB",
        coder=("coder", ""),
        encode_rate=("encode, GB/s of state", ".1f"),
        decode_rate=("decode, GB/s of state", ".1f"),
    )
    coder, encode, decode = "Deflate 0", Spread((0.0,) * repeats), Spread((0.0,) * repeats)
    for dtype in (torch.bfloat16, torch.float32):
        raw = RawCoder(device, DEFAULT_SLICE_NBYTES, **EXPONENT_CODERS[coder])
        _, encode_seconds, decode_seconds = raw.measure(exponents(state, dtype), repeats)
        encode, decode = encode + Spread(tuple(encode_seconds)), decode + Spread(tuple(decode_seconds))
    gigabytes = nbytes_of(state) / 1e9
    table.add(coder=coder, encode_rate=encode.rate(gigabytes), decode_rate=decode.rate(gigabytes))
    return {cell: max(row[cell].median for row in table.rows) for cell in ("encode_rate", "decode_rate")}


def _check_codecs(report: Report, found: list[dict[str, Any]], ceilings: Mapping[str, float]) -> None:
    whole = [row for row in found if row["state"] == "all"]
    for action, target in (("encode", ENCODE_TARGET), ("decode", DECODE_TARGET)):
        best = max(row[f"device_{action}_rate"].median for row in whole if row["codec"] in OPEN_CODECS)
        bound = min(target, 0.9 * ceilings[f"{action}_rate"])
        report.at_least(f"open codec, {action} on the device, GB/s (or 90 % of the coder's ceiling)", best, bound)
    ans = [row["device_encode_rate"].median for row in whole if row["codec"] == "ans"]
    if ans:
        report.at_least("ANS, encode on the device, GB/s", max(ans), ANS_TARGET)


def staging(report: Report, device: Device, names: Sequence[str] = ("auto", "ans")) -> None:
    """Off the GPU into pinned memory: encoded, and as it is."""
    settings = report.settings
    repeats = settings.repeats_or(7)
    state = build_state(settings.nbytes_or(4 << 30), settings.state, device=device.torch_device, tensor_nbytes=64 * MIB)
    nbytes = nbytes_of(state)
    arena = host_memory(nbytes * 5 // 4 + 64 * MIB, device.torch_device)
    pinned = {name: host_memory(t.nbytes, device.torch_device) for name, t in state.items()}

    def copy() -> None:
        for name, tensor in state.items():
            pinned[name].copy_(tensor.view(torch.uint8).reshape(-1), non_blocking=True)
        synchronize(device.torch_device)

    settings.say(f"staging {nbytes / 1e9:.1f} GB, {repeats} times each")
    cases = {"plain pinned copy": Case(copy)}
    for label, work in _staging_work(state, names, device, arena):
        cases[label] = Case(work.encode_overlapped)
    seconds = alternate(cases, repeats=repeats)
    table = report.table(
        "staging",
        f"{nbytes / 1e9:.1f} GB of state from the GPU to pinned memory: median (lowest-highest) of {repeats}",
        how=("how", ""),
        seconds=("s", ".4f"),
        rate=("GB/s of state", ".1f"),
        speedup=("x plain copy", ".2f"),
    )
    plain = seconds["plain pinned copy"]
    for label, spent in seconds.items():
        table.add(how=label, seconds=spent, rate=spent.rate(nbytes / 1e9), speedup=paired(plain, spent))
    best = max(row["speedup"].median for row in table.rows if row["how"].startswith("auto"))
    report.at_least("staging, encoded by auto, speed over a plain pinned copy (aim: 1.15)", best, 1.0)
    report.plots.append(Plot("Staging", "", "GB/s", {"": [(row["how"], row["rate"]) for row in table.rows]}))


def _staging_work(
    state: State, names: Sequence[str], device: Device, arena: torch.Tensor
) -> Iterator[tuple[str, EngineWork]]:
    for codec in names:
        for batch_nbytes in BATCHES:
            yield f"{codec}, batches of {batch_nbytes >> 20} MiB", EngineWork(state, codec, device, batch_nbytes, arena)
