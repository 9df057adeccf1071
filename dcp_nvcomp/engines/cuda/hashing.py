"""Hashes of tensors where they are: pieces of 1 MiB on the GPU, and their digests, 16 bytes each, on the host.

The kernel's first hash of a device is compared with the host's; where it differs, or the kernel can't run, tensors are
copied to the host to be hashed (engines/content_hash.py says what a hash is).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dcp_nvcomp.engines.content_hash import PIECE_NBYTES, ContentHash
from dcp_nvcomp.engines.cuda.batches import THREADS
from dcp_nvcomp.engines.cuda.device import Launch, kernel_source, lent_stream, of_torch
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason, load_cupy

logger = logging.getLogger(__name__)

HASH_SOURCES: Final = ("hash.cu",)
HASH_OPTIONS: Final = ("-std=c++17", f"-DTHREADS={THREADS}")
HASH_NAMES: Final = ("hash_pieces",)
# Shorter pieces have another hash; as XXH3 has it.
_LEAST_NBYTES: Final = 241
_PIECES_OF_BLOCK: Final = THREADS // 32
_TRIED_NBYTES: Final = 2 * PIECE_NBYTES + 777


def digests_on_device(tensor: Tensor, launch: Launch) -> bytes:
    """Return the digests of the pieces of a contiguous tensor, on the device that `launch` starts kernels on.

    Args:
        tensor: of more than 0 bytes, at an address that is a multiple of 8.
        launch: starts a kernel after what the current stream has queued, and before what it queues next.
    """
    data = tensor.reshape(-1).view(torch.uint8)
    nbytes = data.numel()
    last_nbytes = nbytes % PIECE_NBYTES
    here_nbytes = nbytes - last_nbytes if 0 < last_nbytes < _LEAST_NBYTES else nbytes
    count = -(-here_nbytes // PIECE_NBYTES)
    halves = torch.empty(2 * count, dtype=torch.int64, device=data.device)
    if count:
        addresses = (data.data_ptr(), here_nbytes, PIECE_NBYTES, halves.data_ptr())
        launch("hash_pieces", -(-count // _PIECES_OF_BLOCK), addresses)
    # canonical: the high half first, the highest byte first
    found = halves.cpu().numpy().view(np.uint64).reshape(-1, 2)[:, ::-1].astype(">u8").tobytes()
    if here_nbytes < nbytes:
        found += ContentHash.digest_of_piece(data[here_nbytes:].cpu().numpy().data)
    return found


class DeviceHashes:
    """Hashes of tensors on GPUs, by kernels that are compiled when they are first needed. Any thread may use it."""

    def __init__(
        self, launch_on: Callable[[torch.device], Launch] | None = None, kinds: Sequence[str] = ("cuda",)
    ) -> None:
        self._launch_on, self._kinds = launch_on or _compiled, kinds
        self._launches: dict[torch.device, Launch | None] = {}
        self._lock = threading.Lock()

    def hash_of(self, tensor: Tensor) -> str | None:
        """Return the hash of a tensor's elements; None if it has to be taken on the host."""
        if tensor.device.type not in self._kinds or not tensor.is_contiguous() or tensor.data_ptr() % 8:
            return None
        if not tensor.numel():
            return None
        launch = self._launch(tensor.device)
        if launch is None:
            return None
        try:
            return ContentHash.of_digests(digests_on_device(tensor, launch))
        except Exception as error:
            self._give_up(tensor.device, f"{type(error).__name__}: {error}")
            return None

    def _launch(self, device: torch.device) -> Launch | None:
        with self._lock:
            if device not in self._launches:
                self._launches[device] = None
                try:
                    launch = self._launch_on(device)
                    self._check(device, launch)
                except Exception as error:
                    self._give_up(device, f"{type(error).__name__}: {error}")
                else:
                    self._launches[device] = launch
            return self._launches[device]

    def _check(self, device: torch.device, launch: Launch) -> None:
        tried = np.random.default_rng(0).integers(0, 256, _TRIED_NBYTES, np.uint8)
        expected = ContentHash()
        expected.update(tried.data)
        found = digests_on_device(torch.from_numpy(tried).to(device), launch)
        if ContentHash.of_digests(found) != expected.hexdigest():
            raise RuntimeError("it computes another hash than the host")

    def _give_up(self, device: torch.device, why: str) -> None:
        self._launches[device] = None
        logger.warning("Tensors on %s are copied to the host to be hashed: %s", device, why)


def _compiled(device: torch.device) -> Launch:
    reason = cuda_unavailable_reason()
    if reason is not None:
        raise RuntimeError(reason)
    cupy: Any = load_cupy()
    with torch.cuda.device(device):
        module = cupy.RawModule(code=kernel_source(*HASH_SOURCES), options=HASH_OPTIONS)
        functions = {name: module.get_function(name) for name in HASH_NAMES}
        # one of CuPy's own: since CuPy 14 its wrapper of other streams is deprecated
        own = lent_stream(cupy, torch.cuda.current_device())
    stream = of_torch(own, device)

    def launch(name: str, blocks: int, arguments: tuple[int, ...]) -> None:
        with torch.cuda.device(device):
            callers = torch.cuda.current_stream(device)
            stream.wait_stream(callers)
            with own:
                functions[name]((blocks,), (THREADS,), tuple(np.uint64(argument) for argument in arguments))
            callers.wait_stream(stream)

    return launch
