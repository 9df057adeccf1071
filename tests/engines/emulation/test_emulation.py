"""The emulation finds what it is for, in kernels that are made for it, and nothing in those that are right."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import starmap

import numpy as np
import pytest

from tests.effort import THOROUGH

from ..kernels_on_cpu import emulated_launch
from .build import RacesBuild, build_library, compiler
from .memory import SharedMemory
from .races import RaceError, Races

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

THREADS, GRID = 64, 6  # more thread blocks than run at the same time
ORDERS = (0, 1, 2, 3) if THOROUGH else (2,)

BEGIN = """
typedef unsigned int u32;
typedef unsigned char u8;
#define EVERY 0xFFFFFFFF
#define GRID 6
#define NUMBER (blockIdx.x * 64 + threadIdx.x)
"""

# Each makes `out` count from 0.
KERNELS = {
    "through_block": """
        __shared__ u32 values[64];
        values[threadIdx.x] = NUMBER;
        __syncthreads();
        out[NUMBER] = values[63 - threadIdx.x] ^ 63;
    """,
    "through_warp": """
        __shared__ u32 values[64];
        values[threadIdx.x] = NUMBER;
        __syncwarp();
        out[NUMBER] = values[threadIdx.x ^ 31] ^ 31;
    """,
    # a round may write while others still read what was written in the round before
    "many_rounds": """
        __shared__ u32 values[2][64];
        u32 mine = NUMBER;
        for (u32 round = 0; round < 6; ++round) {
            values[round % 2][threadIdx.x] = mine;
            __syncthreads();
            mine = values[round % 2][threadIdx.x ^ 1];
        }
        out[NUMBER] = mine;
    """,
    "exchanged": """
        const u32 lane = threadIdx.x % 32;
        u32 mine = __shfl_sync(EVERY, NUMBER, lane ^ 5);
        mine = __shfl_xor_sync(EVERY, mine, 5);
        u32 sum = 1;
        for (u32 distance = 1; distance < 32; distance *= 2) {
            const u32 below = __shfl_up_sync(EVERY, sum, distance);
            if (lane >= distance) sum += below;
        }
        const unsigned long long wide = __shfl_down_sync(EVERY, (unsigned long long)lane << 40, 1);
        const bool right = sum == lane + 1 && wide >> 40 == (lane < 31 ? lane + 1 : lane) &&
                           __ballot_sync(EVERY, lane % 2) == 0xAAAAAAAA;
        out[NUMBER] = __any_sync(EVERY, lane == 7) && !__all_sync(EVERY, lane == 7) && right ? mine : 0;
    """,
    "counted": """
        const int odd = __syncthreads_count(threadIdx.x % 2), few = __syncthreads_count(threadIdx.x < 5);
        const bool right = odd == 32 && few == 5 && __syncthreads_or(threadIdx.x == 40) && !__syncthreads_or(0);
        out[NUMBER] = right ? NUMBER : 0;
    """,
    "added": """
        __shared__ u32 sum;
        if (threadIdx.x == 0) sum = 0;
        __syncthreads();
        atomicAdd(&sum, 1u);
        __syncthreads();
        atomicMax(&out[NUMBER], sum == 64 ? NUMBER : 0);
    """,
    # of one word, each thread block writes bytes of its own
    "neighbours": """
        for (u32 at = blockIdx.x; at < 4 * GRID * 64; at += GRID)
            if (at % 64 == threadIdx.x) ((u8 *)out)[at] = (u8)(at / 4 >> at % 4 * 8);
    """,
}

# What is wrong, in which kernel, what stands there instead of what.
RACES = {
    "no_block_barrier": ("through_block", "__syncthreads();", ""),
    "barrier_of_a_warp": ("through_block", "__syncthreads();", "__syncwarp();"),
    "no_warp_barrier": ("through_warp", "__syncwarp();", ""),
    "shuffle_for_barrier": ("through_warp", "__syncwarp();", "(void)__shfl_sync(EVERY, NUMBER, 0);"),
    "ballot_for_barrier": ("through_warp", "__syncwarp();", "(void)__ballot_sync(EVERY, 1);"),
    "atomic_for_barrier": ("through_warp", "__syncwarp();", "atomicAdd(&out[GRID * 64], 1u);"),
    "not_in_turns": ("many_rounds", "values[round % 2]", "values[0]"),
    "plain_add": ("added", "atomicAdd(&sum, 1u);", "++sum;"),
    "plain_read": ("added", "__syncthreads();\n        atomicMax", "atomicMax"),
    "two_blocks": ("neighbours", "at += GRID)", "at += GRID - 1)"),
    # they never run at the same time
    "far_blocks": ("neighbours", "at = blockIdx.x;", "at = blockIdx.x % (GRID - 1);"),
    "whole_words": ("neighbours", "((u8 *)out)[at] = (u8)(at / 4 >> at % 4 * 8)", "out[at / 4] = at / 4"),
}


def kernel(name: str, body: str) -> str:
    return f'extern "C" __global__ void __launch_bounds__(64) {name}(u32 *out) {{{body}}}\n'


def with_race(name: str) -> str:
    original, old, new = RACES[name]
    assert old in KERNELS[original]
    return kernel(name, KERNELS[original].replace(old, new))


BROKEN = r"""
typedef unsigned int u32;
extern "C" __global__ void __launch_bounds__(64) only_some_come(u32 *out) {
    if (threadIdx.x != 40) __syncthreads();
    out[0] = 0;
}
extern "C" __global__ void __launch_bounds__(64) two_places(u32 *out) {
    if (threadIdx.x < 32) __syncthreads();
    else
        __syncthreads();
    out[0] = 0;
}
extern "C" __global__ void __launch_bounds__(64) a_lane_left(u32 *out) {
    if (threadIdx.x == 3) return;
    out[0] = __ballot_sync(0xFFFFFFFF, 1);
}
extern "C" __global__ void __launch_bounds__(64) half_a_warp(u32 *out) {
    out[0] = __ballot_sync(0xFFFF, 1);
}
"""
MESSAGES = {
    "only_some_come": "kernels.cu:4, where others never come",
    "two_places": "kernels.cu:8: other threads wait at kernels.cu:10",
    "a_lane_left": "kernels.cu:15, where others never come",
    "half_a_warp": "only whole warps",
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    kernels = [*starmap(kernel, KERNELS.items()), *map(with_race, RACES)]
    return RacesBuild(tmp_path_factory.mktemp("races")).program("made", BEGIN + "".join(kernels), ())


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(1 << 20)
    yield memory
    memory.close()


@pytest.fixture(scope="module")
def broken_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_library(tmp_path_factory.mktemp("broken"), BROKEN, ())


def test_no_false_alarm(program: list[str], memory: SharedMemory) -> None:
    with Races(program, memory) as races:
        for seed in ORDERS:
            for name in KERNELS:
                out = memory.empty(4 * GRID * THREADS)
                races.launch(name, GRID, (out.ctypes.data,), threads=THREADS, seed=seed)
                assert out.view(np.uint32).tolist() == list(range(GRID * THREADS)), (name, seed)


@pytest.mark.ci
@pytest.mark.parametrize("seed", ORDERS[-2:])
@pytest.mark.parametrize("name", RACES)
def test_race(program: list[str], memory: SharedMemory, name: str, seed: int) -> None:
    grid = GRID if RACES[name][0] == "neighbours" else 1
    out = memory.empty(4 * GRID * THREADS + 4)
    with Races(program, memory) as races, pytest.raises(RaceError, match="data race"):
        races.launch(name, grid, (out.ctypes.data,), threads=THREADS, seed=seed)


@pytest.mark.parametrize("kernel", MESSAGES)
def test_waiting_in_vain(broken_library: ctypes.CDLL, kernel: str) -> None:
    out = np.zeros(THREADS, np.uint32)
    with pytest.raises(AssertionError, match=MESSAGES[kernel]):
        emulated_launch(broken_library, THREADS)(kernel, 1, (out.ctypes.data,))
