"""What a process has seen of one GPU: whether it can be used, and how it failed.

One bad block is no reason to leave a GPU, three failures in a row are: then its blocks go to all CPU threads, for the
rest of this save or load. A failed self-test counts for the process.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

from dcp_nvcomp.codecs.base import CodecChain, Coder
from dcp_nvcomp.engines.cuda.coders import Workspace
from dcp_nvcomp.engines.notices import warn

LITERALS: Final = "literals"  # the kernels of literals.py; nvCOMP's coders go by the coder's name

FAILURES_IN_A_ROW: Final = 3


class DeviceHealth:
    """The state of one device, shared by all its engines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken: str | None = None
        self.is_tested = False
        self.refused: dict[str, str] = {}  # what failed the self-test, and how
        self.workspaces: dict[tuple[str, str], Workspace] = {}  # of nvCOMP's coders, as seen: see coders.py
        self.wrong_blocks = 0
        self._lock = threading.Lock()
        self._failures = 0
        self._last = ""
        self._warned: set[str] = set()

    @property
    def unusable(self) -> str | None:
        """The reason why the CPU takes everything for now; None if there is none."""
        if self.broken is not None:
            return self.broken
        if self._failures >= FAILURES_IN_A_ROW:
            return f"it failed {FAILURES_IN_A_ROW} times in a row, last: {self._last}"
        return None

    def refuse(self, name: str, error: Exception) -> None:
        """Leave a coder alone from now on."""
        self.refused[name] = f"{type(error).__name__}: {error}"

    def refusal(self, coder: Coder, names: Sequence[str]) -> str | None:
        """Return why a coder is not run here; None if one of these may run it."""
        found = [self.refused.get(name) for name in names]
        return None if None in found else f"{coder.name} failed its self-test ({found[0]})"

    def left_out(self, chain: CodecChain, refusal: str) -> None:
        """Warn that the CPU takes the blocks of a chain, once for each coder."""
        assert chain.coder is not None
        self._warn(
            f"{chain.coder.name} left out",
            f"Blocks of {self.name} that are coded with {chain.coder.name} are handled by the slower CPU engine: "
            f"{refusal}. engine='cpu' silences this. Please report it, with the versions of nvCOMP and of the driver.",
        )

    def begin(self) -> None:
        """Forget failures in a row: another save or load begins, and there may be memory again."""
        with self._lock:
            self._failures = 0

    def give_up(self, reason: str) -> None:
        """Leave this save or load to the CPU: there is no memory, say, which there may be for the next one."""
        with self._lock:
            self._failures, self._last = FAILURES_IN_A_ROW, reason

    def succeeded(self) -> None:
        """A batch came out right."""
        with self._lock:
            if self.unusable is None:
                self._failures = 0

    def failed(self, reason: str) -> None:
        """A block alone could not be encoded or decoded; the CPU takes it."""
        with self._lock:
            self._failures += 1
            self._last = reason
        self._warn(
            "failed",
            f"The GPU failed on a block ({self.name}: {reason}); the CPU engine does its work, and that of every other "
            "block that fails. To keep the work on the GPU, lower device_memory_budget or free GPU memory.",
        )

    def was_wrong(self, count: int, what: str) -> None:
        """Some blocks came out wrong, and the CPU engine made them right."""
        with self._lock:
            self.wrong_blocks += count
            self._failures += 1
            self._last = f"blocks were {what} to wrong bytes"
        self._warn(
            what,
            f"The GPU {what} blocks to wrong bytes ({self.name}: {count} in one batch). The CPU engine has done them "
            "again, so nothing is lost. Please report this, with the versions of nvCOMP and of the driver.",
        )

    def fell_back(self, reason: str) -> None:
        """Warn that the CPU takes everything, unless there was a warning before."""
        if self._warned:
            return
        self._warn(
            "broken",
            f"Tensors on {self.name} are handled by the slower CPU engine: {reason}. engine='cpu' silences this.",
        )

    def _warn(self, kind: str, message: str) -> None:
        with self._lock:
            if kind in self._warned:
                return
            self._warned.add(kind)
        warn(message, stacklevel=5)
