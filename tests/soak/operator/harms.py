"""What people do to files: each harm is done to one step, or to what a run keeps for itself."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from .look import Look, folders_of

# what was done, or None where that can't be done
Harm = Callable[[random.Random, Look, Path], str | None]
HARMS: dict[str, Harm] = {}

_Of = Callable[[random.Random, Look, Path, Path], str | None]


def _step(draw: random.Random, place: Path) -> Path | None:
    """Return the directory of a step, more often than not of the newest."""
    folders = folders_of(place)
    if not folders:
        return None
    return folders[max(folders)] if draw.random() < 0.6 else draw.choice(list(folders.values()))


def _data_file(draw: random.Random, place: Path) -> Path | None:
    step = _step(draw, place)
    files = [] if step is None else sorted(step.glob("*.distcp"))
    return draw.choice(files) if files else None


def _harm(kind: str, of: Callable[[random.Random, Path], Path | None] = _step) -> Callable[[_Of], _Of]:
    """Make a harm to one step, or to one of its files, out of a function that is given its path too."""

    def decorate(harm: _Of) -> _Of:
        def harmed(draw: random.Random, look: Look, place: Path) -> str | None:
            path = of(draw, place)
            return None if path is None else harm(draw, look, place, path)

        HARMS[kind] = harmed
        return harm

    return decorate


@_harm("file cut", _data_file)
def _truncate_file(draw: random.Random, look: Look, place: Path, path: Path) -> str | None:
    if not path.stat().st_size:
        return None
    nbytes = draw.randrange(path.stat().st_size)
    os.truncate(path, nbytes)
    return f"{path} cut to {nbytes} bytes"


@_harm("file removed", _data_file)
def _remove_file(draw: random.Random, look: Look, place: Path, path: Path) -> str | None:
    path.unlink()
    return f"{path} removed"


@_harm("byte changed", _data_file)
def _flip_byte(draw: random.Random, look: Look, place: Path, path: Path) -> str | None:
    if not path.stat().st_size:
        return None
    data = bytearray(path.read_bytes())
    look.good.setdefault(path.name, zlib.crc32(data))
    at = draw.randrange(len(data))
    data[at] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"{path} changed at {at}"


@_harm("metadata halved")
def _halve_metadata(draw: random.Random, look: Look, place: Path, step: Path) -> str | None:
    path = step / ".metadata"
    if not path.exists():
        return None
    os.truncate(path, path.stat().st_size // 2)
    return f"{path} halved"


@_harm("foreign file")
def _add_file(draw: random.Random, look: Look, place: Path, step: Path) -> str | None:
    name = draw.choice(["notes.txt", ".nfs0000", "__9_9.distcp", "core", ".metadata.bak", "sub/results.csv"])
    path = step / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(draw.randbytes(100))
    return f"{path} added"


def _later(draw: random.Random, place: Path, step: Path) -> Path:
    return step.with_name(f"step-{max(folders_of(place)) + draw.choice([1, 5, 10])}")


@_harm("step moved")
def _move_step(draw: random.Random, look: Look, place: Path, step: Path) -> str | None:
    later = _later(draw, place, step)
    step.rename(later)
    return f"{step} moved to {later.name}"


@_harm("step renamed")
def _rename_step(draw: random.Random, look: Look, place: Path, step: Path) -> str | None:
    """To what is no step's name."""
    away = step.with_name(f"{step.name}{draw.choice(['.old', '-keep', '.bak'])}")
    if away.exists():
        return None
    step.rename(away)
    return f"{step} renamed to {away.name}"


@_harm("step half copied")
def _half_copy(draw: random.Random, look: Look, place: Path, step: Path) -> str | None:
    """Begin to copy a step under the name of a later one, and be cut off."""
    later = _later(draw, place, step)
    later.mkdir()
    files = sorted(path for path in step.iterdir() if path.is_file())
    for path in draw.sample(files, draw.randint(0, len(files))):
        data = path.read_bytes()
        is_cut = path.name == ".metadata" or draw.random() < 0.5
        (later / path.name).write_bytes(data[: len(data) // 2] if is_cut else data)
    return f"{step} half copied to {later.name}"


@_harm("step removed")
def _remove_step(draw: random.Random, look: Look, place: Path, step: Path) -> str | None:
    shutil.rmtree(step)
    return f"{step} removed"


@_harm("garbage", lambda draw, place: place / ".run" if (place / ".run").is_dir() else None)
def _garbage(draw: random.Random, look: Look, place: Path, own: Path) -> str | None:
    """Put garbage beside what the run keeps for itself."""
    name = draw.choice(["kept", "notes", "pin-x", "pin-7", "lease-x", ".lease-000001.tmp", "abandoned.tmp", "probe"])
    (own / name).write_bytes(draw.randbytes(draw.choice([0, 1, 1000])))
    return f"garbage in {own / name}"
