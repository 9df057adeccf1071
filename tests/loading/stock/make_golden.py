"""Writes tests/loading/stock/golden: small checkpoints of stock DCP, as each torch release writes them.

    python -m tests.loading.stock.make_golden RELEASES [VERSION ...]

RELEASES is a directory with one subdirectory for each release, named by its version ("2.9.0"), into which that
release's wheel was unpacked; of it, only `torch/distributed/checkpoint/metadata.py` and `filesystem.py` are used. (The
wheels for macOS are the small ones: `pip download --no-deps --only-binary=:all: --python-version 3.11 --platform
macosx_14_0_arm64 torch==2.15.0`, then `unzip`.) The installed torch writes its own version without it.

Each checkpoint is written in a process of its own, in which those two modules of the release stand in for the
installed ones; everything else, `torch.save` too, is the installed torch's. See golden/README.md.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14", "2.15")
KINDS = ("plain", "zstd")


def golden_state() -> dict[str, Any]:
    """Return the state dict that every golden checkpoint holds."""
    import torch

    return {
        "model": {
            "weight": torch.arange(24, dtype=torch.float32).reshape(4, 6) / 7,
            "bias": torch.arange(6, dtype=torch.bfloat16) - 2,
            "steps": torch.tensor(1000),
            "empty": torch.zeros(0, 3),
            "layers": [torch.full((2, 2), -0.0, dtype=torch.float64), torch.tensor([True, False])],
        },
        "schedule": {"last_lr": [0.1, 0.2], "epoch": 3},
        "name": "golden",
    }


class _FromRelease(MetaPathFinder):
    """Finds two modules of torch in another release."""

    def __init__(self, release: Path) -> None:
        self._release = release

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        names = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
        if fullname not in names:
            return None
        source = self._release.joinpath(*fullname.split(".")).with_suffix(".py")
        return importlib.util.spec_from_file_location(fullname, source)


def _write(kind: str, target: str, release: str) -> None:
    if release:
        sys.meta_path.insert(0, _FromRelease(Path(release)))
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import filesystem, metadata
    from torch.distributed.checkpoint._extension import ZStandard

    assert not release or (metadata.__file__.startswith(release) and filesystem.__file__.startswith(release))
    extensions = [ZStandard()] if kind == "zstd" else None
    warnings.simplefilter("ignore")
    state = golden_state()
    os.chdir(Path(target).parent)  # so that the path in .metadata is a short one
    dcp.save(state, storage_writer=filesystem.FileSystemWriter(Path(target).name, _extensions=extensions), no_dist=True)


def _main() -> None:
    releases = Path(sys.argv[1]).absolute()
    for version in sys.argv[2:] or VERSIONS:
        import torch

        installed = torch.__version__.startswith(version + ".")
        release = "" if installed else str(next(releases.glob(f"{version}.*")))
        for kind in KINDS:
            target = GOLDEN / f"{version}-{kind}"
            shutil.rmtree(target, ignore_errors=True)
            code = f"from tests.loading.stock.make_golden import _write; _write({kind!r}, {str(target)!r}, {release!r})"
            subprocess.run([sys.executable, "-c", code], check=True)
            print(target.name, "with", release or "the installed torch")


if __name__ == "__main__":
    _main()
