"""CUDA streams of an asynchronous save: it reads what the caller's work on a device has come to, and no later work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class CallersStreams:
    """What the caller has queued on the devices of a state by now. To be made on the caller's thread."""

    def __init__(self, state_dict: Mapping[str, Any]) -> None:
        self._current: int | None = None
        self._events: dict[torch.device, torch.cuda.Event] = {}
        if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        self._current = torch.cuda.current_device()
        for device in _cuda_devices(state_dict) | {torch.device("cuda", self._current)}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events[device] = event

    @contextmanager
    def followed(self) -> Iterator[None]:
        """On another thread: make streams current that wait for what the caller had queued."""
        with ExitStack() as stack:
            if self._current is not None:
                torch.cuda.set_device(self._current)
            for device, event in self._events.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_event(event)
                stack.enter_context(torch.cuda.stream(stream))
            if self._current is not None:  # the last stream's device became the current one
                stack.enter_context(torch.cuda.device(self._current))
            yield


def _cuda_devices(value: Any) -> set[torch.device]:
    """Return the CUDA devices of the tensors in a state."""
    if isinstance(value, torch.Tensor):
        return {value.device} if value.device.type == "cuda" else set()
    found: set[torch.device] = set()
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return found
    for one in value:
        found |= _cuda_devices(one)
    return found
