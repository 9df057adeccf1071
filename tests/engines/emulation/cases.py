"""All kernels with small work for each, in which every branch is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dcp_nvcomp.engines.cuda.device import KERNEL_OPTIONS, Launch
from dcp_nvcomp.engines.cuda.hashing import HASH_OPTIONS, HASH_SOURCES
from dcp_nvcomp.engines.cuda.literals import LITERALS_OPTIONS, LITERALS_SOURCES

from .block_cases import check_blocks
from .hash_cases import check_hashes
from .literal_cases import check_literals
from .memory import SharedMemory

__all__ = ["MODULES", "Module"]


@dataclass(frozen=True)
class Module:
    """Kernels that are compiled together.

    Attributes:
        name: of them.
        sources: files of kernels/.
        options: NVRTC's.
        check: runs them in shared memory, and raises `WrongResultError`.
    """

    name: str
    sources: tuple[str, ...]
    options: tuple[str, ...]
    check: Callable[[SharedMemory, Launch], None]


MODULES: Final = (
    Module("blocks", ("blocks.cu",), KERNEL_OPTIONS, check_blocks),
    Module("literals", LITERALS_SOURCES, LITERALS_OPTIONS, check_literals),
    Module("hash", HASH_SOURCES, HASH_OPTIONS, check_hashes),
)
