"""The sdist has all that an installation needs: what is installed from it has the compiled kernels and the data files.

The kernels are optional, so an installation without them would work, and be several times slower.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ci  # the package is built once
ROOT = Path(__file__).parents[2]
KERNELS: dict[str, tuple[str, ...]] = {
    "codecs/transforms/_planes": ("split_floats", "merge_floats", "pack_rest", "unpack_rest"),
    "codecs/transforms/_rowcol": ("predict_planes", "restore_planes"),
    "codecs/coders/_literals": ("encode_literals",),
}
if platform.machine() == "x86_64":  # it needs that processor's instruction for CRC32C
    KERNELS["codecs/_planes_literals"] = ("encode_rows", "decode_rows")
    KERNELS["codecs/transforms/_derived"] = ("split_rows", "merge_rows")
CUDA_SOURCES = [str(path.relative_to(ROOT / "dcp_nvcomp")) for path in (ROOT / "dcp_nvcomp").rglob("*.cu")]
DATA_FILES = (*(f"{kernel}.pyi" for kernel in KERNELS), "py.typed", *CUDA_SOURCES)
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_sdist(sys.argv[1]))"


def run(*arguments: str | Path, cwd: Path) -> str:
    done = subprocess.run(arguments, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed from an sdist of the sources alone: nothing that was built in place helps."""
    folder = tmp_path_factory.mktemp("sdist")
    source = folder / "source"
    built = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "dcp_nvcomp", source / "dcp_nvcomp", ignore=built)
    for name in ("setup.py", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    name = run(sys.executable, "-c", BUILD, folder, cwd=source).split()[-1]
    # offline: the build needs setuptools alone, and no dependency is installed
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index")
    run(*pip, "--no-build-isolation", "--target", folder / "target", folder / name, cwd=folder)
    return folder / "target" / "dcp_nvcomp"


def test_modules_and_data_files(installed: Path) -> None:
    sources = {str(path.relative_to(ROOT / "dcp_nvcomp")) for path in (ROOT / "dcp_nvcomp").rglob("*.py")}
    found = {str(path.relative_to(installed)) for path in installed.rglob("*") if path.is_file()}
    assert not {*sources, *DATA_FILES} - found


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
@pytest.mark.parametrize("kernel", KERNELS)
def test_compiled_kernels(installed: Path, kernel: str) -> None:
    """They are there and load, whatever else is installed here."""
    (library,) = (installed / kernel).parent.glob(f"{Path(kernel).name}.*.so")
    code = (
        "import sys; from importlib.util import module_from_spec, spec_from_file_location as at\n"
        "spec = at(sys.argv[1], sys.argv[2]); module = module_from_spec(spec); spec.loader.exec_module(module)\n"
        "print(*dir(module))"
    )
    names = run(sys.executable, "-I", "-c", code, Path(kernel).name, library, cwd=installed).split()
    assert set(KERNELS[kernel]) <= set(names)
