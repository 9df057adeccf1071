"""Hashes of tensors where they are: the kernel on a CPU, and on a GPU, against the host's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dcp_nvcomp.engines.content_hash import PIECE_NBYTES, ContentHash
from dcp_nvcomp.engines.cuda.device import Launch, kernel_source
from dcp_nvcomp.engines.cuda.hashing import HASH_OPTIONS, HASH_SOURCES, DeviceHashes
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from dcp_nvcomp.saving.process_state import process_state
from dcp_nvcomp.saving.references import hash_of

from .emulation.build import build_library, compiler
from .kernels_on_cpu import emulated_launch

REASON = cuda_unavailable_reason()
NBYTES = (8, 64, 240, 241, 248, 1 << 16, PIECE_NBYTES - 8, PIECE_NBYTES, PIECE_NBYTES + 8, PIECE_NBYTES + 240)


def _bytes(nbytes: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8))


def _expected(data: torch.Tensor) -> str:
    content = ContentHash()
    content.update(data.numpy().data)
    return content.hexdigest()


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    if compiler() is None:
        pytest.skip("there is no C++ compiler")
    library = build_library(tmp_path_factory.mktemp("hash"), kernel_source(*HASH_SOURCES), HASH_OPTIONS)
    return emulated_launch(library, order=0)


def _hashes(launch_on: Callable[[torch.device], Launch]) -> DeviceHashes:
    return DeviceHashes(launch_on, kinds=("cpu",))


@pytest.mark.parametrize("nbytes", NBYTES)
def test_the_kernel_computes_the_hash_of_the_host(launch: Launch, nbytes: int) -> None:
    data = _bytes(nbytes)
    assert _hashes(lambda device: launch).hash_of(data) == _expected(data)


def test_pieces_of_several_thread_blocks(launch: Launch) -> None:
    data = _bytes(9 * PIECE_NBYTES + 1000)
    assert _hashes(lambda device: launch).hash_of(data.view(torch.float32)) == _expected(data)


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(4, 5).t(), torch.zeros(100, dtype=torch.uint8)[4:], torch.zeros(0), torch.zeros(9, device="meta")],
    ids=["not contiguous", "at an odd address", "empty", "elsewhere"],
)
def test_what_is_left_to_the_host(launch: Launch, tensor: torch.Tensor) -> None:
    assert _hashes(lambda device: launch).hash_of(tensor) is None


def _raises(*_: Any) -> Any:
    raise RuntimeError("no kernel image")


def _wrong(launch: Launch) -> Launch:
    def changed(name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        launch(name, blocks, (arguments[0], arguments[1] - 8, *arguments[2:]))

    return changed


def test_a_device_that_can_not_or_does_it_wrongly_is_given_up(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    for launch_on, says in (
        (_raises, "no kernel image"),
        (lambda device: _wrong(launch), "another hash than the host"),
    ):
        caplog.clear()
        hashes = _hashes(launch_on)
        with caplog.at_level(logging.WARNING):
            assert hashes.hash_of(_bytes(1000)) is None and hashes.hash_of(_bytes(2000)) is None
        (record,) = caplog.records
        assert says in record.getMessage() and "copied to the host" in record.getMessage()


def test_a_launch_that_fails_later(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def second_fails(name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        calls.append(blocks)
        if len(calls) > 1:
            raise RuntimeError("an illegal address")
        launch(name, blocks, arguments)

    hashes = _hashes(lambda device: second_fails)
    with caplog.at_level(logging.WARNING):
        assert hashes.hash_of(_bytes(1000)) is None and hashes.hash_of(_bytes(1000)) is None
    assert len(calls) == 2 and "an illegal address" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(REASON is not None, reason=f"needs an NVIDIA GPU: {REASON}")
def test_on_a_gpu() -> None:
    hashes = process_state().device_hashes
    for nbytes in (*NBYTES, 50 * PIECE_NBYTES + 500):
        data = _bytes(nbytes)
        assert hashes.hash_of(data.to("cuda")) == _expected(data)
        assert hash_of(data.to("cuda")) == _expected(data)
    assert hashes.hash_of(_bytes(800).to("cuda").view(10, 80).t()) is None
    assert hash_of(_bytes(800).to("cuda").view(10, 80).t()) == hash_of(_bytes(800).view(10, 80).t())
