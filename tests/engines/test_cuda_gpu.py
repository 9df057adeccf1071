"""The CUDA engine on a GPU: kernels, nvCOMP and streams against the reference and the CPU engine."""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from dcp_nvcomp.codecs import Ans, Bytes, CodecChain, Deflate, Planes, Zstd
from dcp_nvcomp.codecs.base import checksum
from dcp_nvcomp.codecs.transforms import PLANE_NAMES
from dcp_nvcomp.engines.cuda.batches import block_table, copy_table
from dcp_nvcomp.engines.cuda.device import CudaDevice
from dcp_nvcomp.engines.cuda.engine import CudaEngine, DecodeJob, EncodeJob, EnginePolicy
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason, nvcomp_version
from dcp_nvcomp.errors import CorruptDataError
from tests.codecs import planes_reference

from . import cases
from .cases import SIGNS, cpu_encode, decoded, encode, floats, tensor, weights

REASON = cuda_unavailable_reason()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}"),
    pytest.mark.usefixtures("nothing_falls_back"),
]

BUDGET = 256 << 20
LITERALS_ONLY = Zstd(literals_only=True)
CODERS = [
    Zstd(),
    LITERALS_ONLY,
    Zstd(64 << 10, literals_only=True),
    Deflate(),
    Deflate(literals_only=True),
    Deflate(64 << 10),
]


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    return CudaDevice(torch.device("cuda"))


@pytest.fixture(scope="module")
def engine(device: CudaDevice) -> CudaEngine:
    return CudaEngine(device.torch_device, EnginePolicy(BUDGET), backend=device)


on_gpu, job = partial(tensor, device="cuda"), partial(cases.job, device="cuda")


def same(tensor: torch.Tensor, block: np.ndarray) -> bool:
    return tensor.cpu().numpy().tobytes() == block.tobytes()


def row(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("signs", SIGNS)
def test_kernels_do_what_the_reference_does(device: CudaDevice, width: int, signs: str) -> None:
    for misaligned in (0, 1, 2, 4, 8):
        for count in (1, 9, 1000, (1 << 19) + 13):
            check_kernels(device, width, signs, misaligned, count)


def check_kernels(device: CudaDevice, width: int, signs: str, misaligned: int, count: int) -> None:
    codec, block = Planes(width), on_gpu(floats(width, count, signs, count), misaligned)
    flags, expected = planes_reference.split(block, codec, pack=True)
    planes = {name: torch.full_like(plane, 0xA5) for name, plane in expected.items()}
    addresses = np.array([[planes[n].data_ptr() if n in planes else 0 for n in PLANE_NAMES]], np.int64)
    merged, copied = on_gpu(np.zeros(block.numel(), np.uint8), misaligned), on_gpu(np.ones(block.numel() + 9, np.uint8))
    results = torch.zeros((3, 1), dtype=torch.int32, device="cuda")
    with device.session([block]):
        table = block_table(row(block.data_ptr()), row(block.numel()), row(width), row(1), addresses)
        device.kernels.inspect(table, results[0], results[1])
        device.kernels.split(table, results[1], results[2])
        back = block_table(row(merged.data_ptr()), row(block.numel()), row(width), row(flags), addresses)
        device.kernels.merge(back)
        device.kernels.copy(copy_table(row(merged.data_ptr()), row(copied.data_ptr()), row(block.numel()), row(9)))
    assert int(results[0].cpu().numpy().view(np.uint32)[0]) == checksum(block.cpu().numpy())
    assert int(results[2]) == flags
    for name, plane in expected.items():
        assert torch.equal(planes[name], plane), name
    assert torch.equal(merged, block)
    assert torch.equal(copied[: block.numel()], block)
    assert not copied[block.numel() :].any()


# ---- both ways -------------------------------------------------------------------------------------------------------


def chain_of(width: int, coder: Zstd | Deflate | Ans | None, *coded: str) -> CodecChain:
    return CodecChain(Planes(width, coded), coder) if width else CodecChain(Bytes(), coder)


CHAINS = [
    *(chain_of(width, coder, "exponent") for width in (2, 4, 8) for coder in CODERS),
    *(chain_of(0, coder) for coder in CODERS),
    chain_of(4, Zstd(), "low", "rest", "exponent"),
    chain_of(2, None),
    chain_of(0, None),
]


def blocks_for(chain: CodecChain) -> list[np.ndarray]:
    width = chain.array_to_bytes.float_nbytes if isinstance(chain.array_to_bytes, Planes) else 2
    return [
        weights(width, (1 << 20) // width),
        weights(width, 70_001, signs="positive", seed=1),
        weights(width, 33, signs="negative", seed=2),
        np.random.default_rng(3).integers(0, 256, 5000 * width, np.uint8),
        np.zeros(300_000 // width * width, np.uint8),
        weights(width, 1, seed=4),
    ]


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: str(chain.to_json()))
@pytest.mark.parametrize("misaligned", [0, 2])
def test_the_cpu_engine_reads_it_and_it_reads_the_cpu_engine(
    engine: CudaEngine, chain: CodecChain, misaligned: int
) -> None:
    blocks = blocks_for(chain)
    encoded = encode(engine, [on_gpu(block, misaligned) for block in blocks], chain)
    assert [decoded(one, chain) for one in encoded] == [block.tobytes() for block in blocks]
    if chain.coder is not None:  # trained floats shrink: slices are not just stored
        assert encoded[0].data.nbytes < 0.95 * blocks[0].size
    by_cpu = [cpu_encode(block, chain) for block in blocks]
    jobs = [job(one, chain, misaligned) for one in [*encoded, *by_cpu]]
    engine.decode(jobs, verify="full")
    assert all(same(done.out, block) for done, block in zip(jobs, blocks * 2, strict=True))


@pytest.mark.parametrize(("data_type", "width"), [("|u1", 1), ("|i1", 1), ("|f1", 1), ("<f2", 2), ("<f4", 4)])
@pytest.mark.parametrize("slice_nbytes", [64 << 10, 1 << 20, 16 << 20])
def test_ans(engine: CudaEngine, data_type: str, width: int, slice_nbytes: int) -> None:
    chain = CodecChain(Bytes(), Ans(slice_nbytes, data_type, nvcomp_version()))
    blocks = [weights(max(width, 2), 5 << 19), weights(2, 70_003), np.zeros(1023, np.uint8)]
    encoded = encode(engine, [on_gpu(block) for block in blocks], chain)
    assert encoded[0].data.nbytes < 0.97 * blocks[0].size
    jobs = [job(one, chain) for one in encoded]
    engine.decode(jobs, verify="full")
    assert all(same(done.out, block) for done, block in zip(jobs, blocks, strict=True))


def test_thousands_of_small_blocks(engine: CudaEngine) -> None:
    chain = CodecChain(Planes(2), LITERALS_ONLY)
    blocks = [weights(2, 200 + seed % 50, seed=seed) for seed in range(3000)]
    encoded = encode(engine, [on_gpu(block) for block in blocks], chain)
    jobs = [job(one, chain) for one in encoded]
    engine.decode(jobs, verify="full")
    assert all(same(done.out, block) for done, block in zip(jobs, blocks, strict=True))


def test_blocks_of_different_chains_go_together(engine: CudaEngine) -> None:
    made = [(chain, block) for chain in CHAINS for block in blocks_for(chain)]
    jobs = [EncodeJob((on_gpu(block),), chain) for chain, block in made]
    nbytes = sum(job.chain.max_encoded_nbytes(job.nbytes) for job in jobs)
    encoded = engine.encode(jobs, torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data)
    for (chain, block), one in zip(made, encoded, strict=True):
        assert decoded(one, chain) == block.tobytes()
    back = [job(one, chain) for (chain, _), one in zip(made, encoded, strict=True)]
    engine.decode(back, verify="full")
    assert all(same(done.out, block) for (_, block), done in zip(made, back, strict=True))


def test_blocks_that_are_no_run_of_memory(engine: CudaEngine) -> None:
    chain = CodecChain(Planes(4), LITERALS_ONLY)
    wide = torch.randn(700, 300, device="cuda")
    parts = (torch.randn(70_000, device="cuda"), wide[:3].t(), torch.randn((), device="cuda"))
    jobs = [EncodeJob((wide.t(),), chain), EncodeJob(parts, chain)]
    encoded = engine.encode(jobs, memoryview(bytearray(sum(chain.max_encoded_nbytes(one.nbytes) for one in jobs))))
    expected = [wide.t().contiguous().reshape(-1), torch.cat([part.contiguous().reshape(-1) for part in parts])]
    assert [decoded(one, chain) for one in encoded] == [whole.cpu().numpy().tobytes() for whole in expected]


def test_engines_of_several_threads(device: CudaDevice) -> None:
    """Their streams are their own, and nvCOMP's memory is counted for each."""
    chain, blocks = CodecChain(Planes(2), Deflate()), [weights(2, 1 << 19, seed=seed) for seed in range(40)]
    tensors = [on_gpu(block) for block in blocks]

    def work(_: int) -> None:
        engine = CudaEngine(device.torch_device, EnginePolicy(32 << 20))
        for _ in range(4):
            encoded = encode(engine, tensors, chain)
            jobs = [job(one, chain) for one in encoded]
            engine.decode(jobs, verify="full")
            assert all(same(done.out, block) for done, block in zip(jobs, blocks, strict=True))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))


@pytest.mark.hostile
@pytest.mark.parametrize("coder", [Zstd(64 << 10), Deflate(64 << 10)], ids=["Zstd", "Deflate"])
@pytest.mark.parametrize("length", [1, 1000, (64 << 10) - 1])
def test_a_slice_that_decodes_to_something_else(engine: CudaEngine, coder: Zstd | Deflate, length: int) -> None:
    """Its length is told to nvCOMP beforehand. A slice of another one, with a CRC that is right, must show."""
    chain, block = CodecChain(Bytes(), coder), np.zeros(4 * (64 << 10), np.uint8)
    good = cpu_encode(block, chain)
    frame = bytes(coder.encoder()(memoryview(bytes(length))))
    first = -(-good.row.slice_nbytes[0] // 16) * 16
    data = memoryview(frame.ljust(-(-len(frame) // 16) * 16, b"\0") + bytes(good.data[first:]))
    row = good.row._replace(slice_nbytes=(len(frame), *good.row.slice_nbytes[1:]), encoded_crc=checksum(data))
    bad = DecodeJob(data, row, chain, on_gpu(np.zeros_like(block)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # nvCOMP may fail, and the CPU engine say what is wrong
        with pytest.raises(CorruptDataError):
            engine.decode([bad], verify="stored")


def test_a_flipped_byte(engine: CudaEngine) -> None:
    chain = CodecChain(Planes(4), LITERALS_ONLY)
    (encoded,) = encode(engine, [on_gpu(weights(4, 1 << 18))], chain)
    encoded.data[-20] ^= 1
    with pytest.raises(CorruptDataError, match="CRC"):
        engine.decode([job(encoded, chain)], verify="stored")


def exponents(count: int, symbols: int, first: int, seed: int) -> np.ndarray:
    """Bytes such as the CPU engine's own encoder of literals takes: few values, some of them frequent."""
    shares = 1.3 ** -np.arange(symbols, dtype=np.float64)
    random = np.random.default_rng(seed)
    return (first + random.choice(symbols, count, p=shares / shares.sum())).astype(np.uint8)


LITERALS = {
    "one block": exponents(128 << 10, 30, 95, 1),
    "all listed symbols": exponents(128 << 10, 129, 0, 2),
    "two symbols": exponents(128 << 10, 2, 127, 3),
    "several blocks": exponents(1 << 20, 30, 95, 4),
    "runs first and last": np.concatenate(
        [np.full(128 << 10, 7, np.uint8), exponents(128 << 10, 20, 90, 5), np.full(128 << 10, 0, np.uint8)]
    ),
    "symbols above 128": exponents(128 << 10, 100, 150, 7),
    "noise first": np.concatenate(
        [np.random.default_rng(8).integers(0, 256, 128 << 10).astype(np.uint8), exponents(128 << 10, 20, 90, 9)]
    ),
    "a run alone": np.full(128 << 10, 200, np.uint8),
    **{f"last stream shorter by {gap}": exponents(100_000 - gap, 20, 100, 6) for gap in (1, 2, 3)},
}


@pytest.mark.parametrize("slice_nbytes", [128 << 10, 256 << 10, 1 << 20])
@pytest.mark.parametrize("name", LITERALS)
def test_frames_of_the_cpu_engines_own_encoder(engine: CudaEngine, name: str, slice_nbytes: int) -> None:
    """Each form that `_literals.c` writes."""
    chain, block = CodecChain(Bytes(), Zstd(slice_nbytes, literals_only=True)), LITERALS[name]
    encoded = cpu_encode(block, chain)
    assert len(encoded.data) < block.nbytes
    decode = job(encoded, chain)
    engine.decode([decode], verify="full")
    assert same(decode.out, block)


# ---- streams and memory ----------------------------------------------------------------------------------------------

LONG = 400_000_000  # clock cycles, some tenths of a second


def test_encoding_waits_for_what_the_caller_has_under_way(engine: CudaEngine) -> None:
    chain, block = CodecChain(Planes(4), LITERALS_ONLY), weights(4, 1 << 18)
    source, target = on_gpu(block), torch.zeros(block.size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        target.copy_(source)
        (encoded,) = encode(engine, [target], chain)
    assert decoded(encoded, chain) == block.tobytes()


def test_decoding_waits_too_and_is_complete_when_it_returns(engine: CudaEngine) -> None:
    chain, block = CodecChain(Planes(4), LITERALS_ONLY), weights(4, 1 << 18)
    (encoded,) = encode(engine, [on_gpu(block)], chain)
    done = job(encoded, chain)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        done.out.zero_()  # must not come after the decoded bytes
        engine.decode([done], verify="stored")
    with torch.cuda.stream(torch.cuda.Stream()):  # no stream needs to wait any more
        assert same(done.out, block)


def test_a_batch_keeps_to_the_budget(device: CudaDevice) -> None:
    budget = 64 << 20
    engine = CudaEngine(device.torch_device, EnginePolicy(budget), backend=device)
    literals = Deflate(literals_only=True)
    for chain in (chain_of(2, LITERALS_ONLY, "exponent"), chain_of(4, literals, "exponent"), chain_of(0, None)):
        blocks = [on_gpu(weights(4, 1 << 18, seed=seed)) for seed in range(200)]
        encode(engine, blocks[:20], chain)  # nvCOMP's own memory becomes known
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        encoded = encode(engine, blocks, chain)
        assert torch.cuda.max_memory_allocated() - before <= 1.15 * budget, chain
        jobs = [job(one, chain) for one in encoded]
        engine.decode(jobs[:20], verify="stored")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.decode(jobs, verify="full")
        assert torch.cuda.max_memory_allocated() - before <= 1.15 * budget, chain
        assert all(torch.equal(done.out, block) for done, block in zip(jobs, blocks, strict=True))


def test_without_memory_the_cpu_engine_takes_over(device: CudaDevice) -> None:
    chain = CodecChain(Planes(4), LITERALS_ONLY)
    blocks = [weights(4, 1 << 18, seed=seed) for seed in range(8)]
    tensors = [on_gpu(block) for block in blocks]
    engine = CudaEngine(device.torch_device, EnginePolicy(BUDGET), backend=device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device.torch_device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
    try:
        with pytest.warns(RuntimeWarning, match="CPU engine") as caught:
            encoded = encode(engine, tensors, chain)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        engine.memory.release()
        engine.memory.retry()  # the other tests' engine has the same
    assert len(caught) == 1
    assert [decoded(one, chain) for one in encoded] == [block.tobytes() for block in blocks]


def test_ordinary_host_memory_and_read_only_bytes(engine: CudaEngine) -> None:
    chain, block = CodecChain(Planes(2), LITERALS_ONLY), weights(2, 1 << 19)
    out = memoryview(bytearray(chain.max_encoded_nbytes(block.size)))
    (encoded,) = engine.encode([EncodeJob((on_gpu(block),), chain)], out)
    done = DecodeJob(memoryview(bytes(encoded.data)), encoded.row, chain, on_gpu(np.zeros_like(block)))
    engine.decode([done], verify="full")
    assert same(done.out, block)
