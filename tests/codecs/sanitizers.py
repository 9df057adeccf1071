"""Kernels from their sources, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

__all__ = ["compile_sanitized", "run_sanitized"]

COMPILER = shutil.which("gcc")
CODECS = Path(__file__).parents[2] / "dcp_nvcomp" / "codecs"
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

IMPORT = """
import pathlib, pickle, sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location(pathlib.Path(sys.argv[1]).stem, sys.argv[1])
kernels = module_from_spec(spec)
spec.loader.exec_module(kernels)
"""


def compile_sanitized(folder: Path, source: str) -> Path:
    """Compile a module, without warnings, and return its file; skip the test where there is no gcc."""
    if COMPILER is None:
        pytest.skip("there is no gcc")
    path = (folder / Path(source).name).with_suffix(".so")
    include = sysconfig.get_paths()["include"]
    options = ("-g", "-O2", "-shared", "-fPIC", f"-I{include}", *WARNINGS, *SANITIZERS)
    done = subprocess.run([COMPILER, *options, CODECS / source, "-o", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


def run_sanitized(source: str, library: Path, *arguments: Path) -> None:
    """Run Python code with the module `kernels` of that file, and `arguments` as `sys.argv[2:]`."""
    assert COMPILER is not None
    runtime = subprocess.run([COMPILER, "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    # Python does not free everything at its end; stacks of malloc would be of its own allocator otherwise
    options = {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc", "LD_PRELOAD": runtime.stdout.strip()}
    command = [sys.executable, "-c", IMPORT + source, library, *arguments]
    done = subprocess.run(command, env={**os.environ, **options}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
