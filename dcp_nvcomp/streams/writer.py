"""Write a stream: what torch.save writes is found again by its address, with its dtype and shape.

torch.save writes the memory of tensors as it is. So it need not be copied: a thread takes the tensors through the same
pipeline as for any other data file, while torch.save says what else is in the stream, and in which order.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_nvcomp.engines.tensors import element_type, is_transparent
from dcp_nvcomp.format.names import STREAM_KEY
from dcp_nvcomp.saving.lone_file import write_file
from dcp_nvcomp.streams.pieces import LENGTH_NBYTES, LITERALS, Piece

# Fewer bytes are literals: they are read with the list of pieces.
_SMALL_NBYTES = 64 << 10
_CHECK_SECONDS = 1.0


class _Memory(NamedTuple):
    """All of the memory that a tensor is in, as a tensor."""

    start: int  # its address
    tensor: torch.Tensor
    key: str


class StreamWriter:
    """Write a stream of bytes into a compressed file, which appears when the stream is closed without an error.

    Args:
        path: of the file: a local path or any fsspec URL.
        data: tensors in dicts, lists and tuples, whose memory will be written. They must not change before the stream
            is closed.
        **writer_options: of `NvcompWriter`, and of the storage.
    """

    def __init__(self, path: str | os.PathLike[str], data: Any = None, **writer_options: Any) -> None:
        self._last: SimpleQueue[bytes | None] = SimpleQueue()
        by_start: dict[int, _Memory] = {}
        for memory in _memories(data):
            known = by_start.get(memory.start)
            if known is None or known.tensor.dim() < memory.tensor.dim():
                by_start[memory.start] = memory
        self._memories = [by_start[start] for start in sorted(by_start)]
        self._starts = [memory.start for memory in self._memories]
        tensors = dict[str, torch.Tensor]()
        for memory in self._memories:
            key, count = memory.key, 1
            while key in tensors or key == STREAM_KEY:
                count, key = count + 1, f"{memory.key}#{count + 1}"
            tensors[key] = memory.tensor
        self._records = list(tensors)
        self._pieces, self._literals, self._nbytes = list[Piece](), bytearray(), 0
        self._is_closed = False
        self._written: Future[None] = Future()
        # the file is written beside torch.save, which may compute CRCs of its own
        save = partial(write_file, path, tensors, STREAM_KEY, partial(_taken, self._last), **writer_options)
        threading.Thread(target=_run, args=(save, self._written), name="dcp-stream").start()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Append bytes; those of `data` are read where they are."""
        if self._is_closed:
            raise ValueError("The stream is closed.")
        view = memoryview(data).cast("B")
        begin = at = _address_of(view)
        end = begin + len(view)
        for number in range(max(bisect_right(self._starts, begin) - 1, 0), bisect_left(self._starts, end)):
            memory = self._memories[number]
            start, stop = max(memory.start, at), min(memory.start + memory.tensor.nbytes, end)
            if start < stop:
                self._append_literals(view[at - begin : start - begin])
                self._append(number, start - memory.start, stop - start)
                at = stop
        self._append_literals(view[at - begin :])
        return len(view)

    def _append_literals(self, view: memoryview) -> None:
        if view:
            self._append(LITERALS, len(self._literals), len(view))
            self._literals += view

    def _append(self, number: int, offset: int, nbytes: int) -> None:
        last = self._pieces[-1] if self._pieces else None
        if last is None or (number, offset) != (last.number, last.offset + self._nbytes - last.start):
            self._pieces.append(Piece(self._nbytes, number, offset))
        self._nbytes += nbytes

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Wait until the file is written.

        Raises:
            StorageError: it can't be.
        """
        if not self._is_closed:
            described = {"nbytes": self._nbytes, "records": self._records, "pieces": self._pieces}
            text = json.dumps(described).encode()
            self._end(len(text).to_bytes(LENGTH_NBYTES, "little") + text + self._literals)
        self._written.result()

    def abort(self) -> None:
        """Leave no file, if the stream was not closed."""
        self._end(None)

    def _end(self, last: bytes | None) -> None:
        """Wait for the thread, through interrupts too: it reads the caller's memory."""
        self._is_closed = True
        self._last.put(last)
        interrupt: BaseException | None = None
        while not self._written.done():  # an interrupted join leaves a thread marked as ended (Python 3.11)
            try:
                wait([self._written])
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def __enter__(self) -> StreamWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        self._last.put(None)


def _run(save: Callable[[], None], written: Future[None]) -> None:
    try:
        save()
        written.set_result(None)
    except BaseException as error:
        written.set_exception(error)


def _taken(last: SimpleQueue[bytes | None]) -> bytes:
    while threading.main_thread().is_alive():  # or a stream that is never closed would keep the interpreter alive
        with contextlib.suppress(Empty):
            found = last.get(timeout=_CHECK_SECONDS)
            if found is not None:
                return found
            break
    raise CancelledError("The stream was not closed.")


def _memories(data: Any) -> Iterator[_Memory]:
    """Yield what the tensors in containers are in, with a key for each."""
    stack: list[tuple[Any, str]] = [(data, "")]
    seen = set[int]()  # containers may contain themselves
    while stack:
        value, key = stack.pop()
        inner: Iterable[tuple[object, Any]] = ()
        if isinstance(value, torch.Tensor):
            if isinstance(value, DTensor):
                stack.append((value.to_local(), key))
            elif is_traceable_wrapper_subclass(value):
                inner = [(name, getattr(value, name)) for name in value.__tensor_flatten__()[0]]
            elif _is_in_host_memory(value) and value.untyped_storage().nbytes() >= _SMALL_NBYTES:
                memory = _whole_memory(value.detach())
                yield _Memory(memory.data_ptr(), memory, key or "tensor")
        elif isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            inner = value.items() if isinstance(value, Mapping) else enumerate(value)
        stack += [(one, f"{key}.{name}" if key else str(name)) for name, one in inner]


def _is_in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_nested


def _whole_memory(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    is_whole = tensor.is_contiguous() and tensor.nbytes == storage.nbytes()
    if is_whole and is_transparent(tensor) and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    is_known = element_type(tensor.dtype) is not None and storage.nbytes() % tensor.dtype.itemsize == 0
    return torch.empty(0, dtype=tensor.dtype if is_known else torch.uint8, device="cpu").set_(storage)


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0


def tensor_of(view: memoryview, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return bytes as a tensor in their memory, which must stay there; also of bytes that may not be written."""
    if not view:
        return torch.empty(0, dtype=dtype)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * len(view)).from_address(_address_of(view)))
    return torch.from_numpy(array).view(dtype)
