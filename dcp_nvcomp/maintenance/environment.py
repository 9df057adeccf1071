"""What runs here: versions, engines, compiled kernels, and why something does not."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason
from dcp_nvcomp.options import check_thread_count
from dcp_nvcomp.version import VERSION

_PACKAGES: Final = (
    *("torch", "numpy", "zstandard", "crc32c", "fsspec", "s3fs", "safetensors"),
    *("nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12", "cupy-cuda13x", "cupy-cuda12x"),
)
_KERNELS: Final = {
    "planes kernel": "dcp_nvcomp.codecs.transforms._planes",
    "rows and columns kernel": "dcp_nvcomp.codecs.transforms._rowcol",
    "masters kernel": "dcp_nvcomp.codecs.transforms._derived",
    "literals kernel": "dcp_nvcomp.codecs.coders._literals",
    "planes and literals kernel": "dcp_nvcomp.codecs._planes_literals",
}


@dataclass(frozen=True)
class Environment:
    """Result of `info`.

    Attributes:
        versions: of this package, of Python and of what it uses, by name; None for what is not installed.
        cpu: what the CPU engine has.
        cuda: `available`, or why it is not.
        kernels: of each compiled kernel `compiled`, or why it is missing. Without them saving and loading are slower.
    """

    versions: Mapping[str, str | None]
    cpu: str
    cuda: str
    kernels: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        return {"schema": 1, **asdict(self)}


def info() -> Environment:
    """Return what runs here, for a report of a problem, or to see why the GPU is not used.

    Examples:
        >>> import dcp_nvcomp
        >>> dcp_nvcomp.tools.info().versions["dcp-nvcomp"] == dcp_nvcomp.__version__
        True
    """
    versions = {
        "dcp-nvcomp": VERSION,
        "Python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in _PACKAGES},
    }
    threads = check_thread_count(None)
    reason = cuda_unavailable_reason()
    return Environment(
        versions,
        f"available: {threads} thread{'' if threads == 1 else 's'} on {os.cpu_count()} CPUs",
        "available" if reason is None else f"not available: {reason}",
        {name: _state(module) for name, module in _KERNELS.items()},
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _state(module: str) -> str:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"not compiled, so numpy and libzstd do its work, slower: {error}"
    return "compiled"
