"""Finds out if the CUDA engine can run here and, if not, what is missing. The only importer of nvCOMP and CuPy.

Both are imported inside functions: this package works without them, and with them but without a driver.
"""

from __future__ import annotations

import importlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dcp_nvcomp.errors import CodecUnavailableError

# nvCOMP 6 brought batches made of one buffer, and another ANS bitstream; the next major version may change either.
NVCOMP_MAJOR = "6"

Loader = Callable[[], Any]

_WARNINGS_LOCK = threading.Lock()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Ignore warnings, which would be errors under `-W error`; other threads' too, as Python has only one setting.

    The lock keeps threads that do this at the same time from restoring each other's setting.
    """
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def load_nvcomp() -> Any:
    """Import nvCOMP's Python module."""
    return _load("nvidia.nvcomp")


def load_cupy() -> Any:
    """Import CuPy."""
    return _load("cupy")


def _load(name: str) -> Any:
    """Import a module; what it warns of, such as its own use of something deprecated, does not keep it from running."""
    with _without_warnings():
        return importlib.import_module(name)


def cuda_unavailable_reason() -> str | None:
    """Return the reason why the CUDA engine can't run here."""
    built_for = getattr(torch.version, "cuda", None)
    return find_reason(built_for, _device_count() if built_for else 0, load_nvcomp, load_cupy)


def _device_count() -> int:
    if not hasattr(torch, "cuda"):
        return 0
    with _without_warnings():  # torch warns of a driver that is too old; here that is a reason
        return torch.cuda.device_count() if torch.cuda.is_available() else 0


def find_reason(built_for: str | None, device_count: int, nvcomp_loader: Loader, cupy_loader: Loader) -> str | None:
    """`cuda_unavailable_reason` for a given machine."""
    if built_for is None:
        return "this PyTorch is built without CUDA: install a CUDA build of torch on a machine with an NVIDIA GPU"
    if device_count == 0:
        return "there is no CUDA device: no NVIDIA GPU, none visible, or no driver that fits this PyTorch"
    extra = f"cu{built_for.split('.')[0]}"
    advice = f"pip install 'dcp-nvcomp[{extra}]'"
    reason, nvcomp = _try_import(f"nvidia-nvcomp-{extra}", nvcomp_loader, advice)
    if reason is None:
        version = str(nvcomp.__version__)
        if version.split(".")[0] != NVCOMP_MAJOR:
            return f"nvCOMP {version} is installed, but version {NVCOMP_MAJOR} is needed: {advice}"
        reason, _ = _try_import(f"cupy-cuda{extra[2:]}x", cupy_loader, advice)
    return reason


def _try_import(package: str, loader: Loader, advice: str) -> tuple[str | None, Any]:
    try:
        return None, loader()
    except ModuleNotFoundError:
        return f"package {package} is not installed: {advice}", None
    except Exception as error:  # a library that does not load, in whatever way its binding reports it
        return f"package {package} is installed but does not load ({type(error).__name__}: {error}): {advice}", None


def nvcomp_version() -> str:
    """Return the version of nvCOMP that is installed, such as `6.0.0`."""
    try:
        return str(load_nvcomp().__version__)
    except ImportError as error:
        raise CodecUnavailableError("nvCOMP is not installed: pip install 'dcp-nvcomp[cu13]' (or [cu12]).") from error
