"""What the CUDA engine says of a machine that lacks something."""

from __future__ import annotations

import importlib.util
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcp_nvcomp.engines.cuda.engine import CudaEngine, EnginePolicy
from dcp_nvcomp.engines.cuda.support import cuda_unavailable_reason, find_reason, load_cupy, nvcomp_version
from dcp_nvcomp.errors import CodecUnavailableError


class Installed:
    def __init__(self, version: str) -> None:
        self.__version__ = version


def missing() -> Installed:
    raise ModuleNotFoundError("No module named 'nvidia'")


def broken() -> Installed:
    raise OSError("libnvcomp.so.6: cannot open shared object file")


def test_reasons() -> None:
    def six() -> Installed:
        return Installed("6.0.0")

    assert find_reason("13.0", 1, six, six) is None
    assert "built without CUDA" in str(find_reason(None, 0, six, six))
    assert "no CUDA device" in str(find_reason("13.0", 0, six, six))
    assert "pip install 'dcp-nvcomp[cu13]'" in str(find_reason("13.0", 1, missing, six))
    assert "nvidia-nvcomp-cu12 is not installed" in str(find_reason("12.8", 1, missing, six))
    assert "cupy-cuda12x is not installed" in str(find_reason("12.8", 1, six, missing))
    assert "does not load (OSError: libnvcomp" in str(find_reason("13.0", 1, broken, six))
    assert "nvCOMP 5.1.0 is installed, but version 6" in str(find_reason("13.0", 1, lambda: Installed("5.1.0"), six))


@pytest.fixture
def cupy_that_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that warns, slowly, while it is imported; CuPy does so of what it finds or misses on a machine."""
    code = "import time, warnings\ntime.sleep(0.2)\nwarnings.warn('CUDA path could not be detected', UserWarning)\n"
    (tmp_path / "cupy.py").write_text(code + "__version__ = '13.6.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    yield
    sys.modules.pop("cupy", None)


def test_a_warning_while_importing_is_no_reason(cupy_that_warns: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_reason("13.0", 1, lambda: Installed("6.0.0"), load_cupy) is None
    assert sys.modules["cupy"].__version__ == "13.6.0"


def test_threads_that_import_at_once_leave_warnings_as_they_were(cupy_that_warns: None) -> None:
    before = list(warnings.filters)
    threads = [threading.Thread(target=load_cupy) for _ in range(4)]
    for thread in threads:
        thread.start()
        thread.join(0.05)  # the first one is in the middle of it when the next begins
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


def test_here() -> None:
    reason = cuda_unavailable_reason()
    if torch.version.cuda is None:
        assert reason is not None and "built without CUDA" in reason
    if reason is not None:
        with pytest.raises(CodecUnavailableError, match="can't run here"):
            CudaEngine(torch.device("cuda"), EnginePolicy(1))


def test_nvcomp_version() -> None:
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.nvcomp") is None:
        with pytest.raises(CodecUnavailableError, match="pip install"):
            nvcomp_version()
    else:
        assert nvcomp_version().split(".")[0].isdigit()
