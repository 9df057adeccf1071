"""What people do to files: each harm is done to one step, or to what a run keeps for itself."""

from __future__ import annotations

import os
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

from .look import Look, folders_of

__all__ = ["HARMS", "Harm"]

# what was done, or None where that can't be done
Harm = Callable[[random.Random, Look, Path], str | None]


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


def truncate_file(draw: random.Random, look: Look, place: Path) -> str | None:
    """Cut a data file short."""
    path = _data_file(draw, place)
    if path is None or not path.stat().st_size:
        return None
    nbytes = draw.randrange(path.stat().st_size)
    os.truncate(path, nbytes)
    return f"{path} cut to {nbytes} bytes"


def remove_file(draw: random.Random, look: Look, place: Path) -> str | None:
    """Remove a data file."""
    path = _data_file(draw, place)
    if path is None:
        return None
    path.unlink()
    return f"{path} removed"


def flip_byte(draw: random.Random, look: Look, place: Path) -> str | None:
    """Change a byte of a data file."""
    path = _data_file(draw, place)
    if path is None or not path.stat().st_size:
        return None
    data = bytearray(path.read_bytes())
    look.good.setdefault(path.name, zlib.crc32(data))
    at = draw.randrange(len(data))
    data[at] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"{path} changed at {at}"


def halve_metadata(draw: random.Random, look: Look, place: Path) -> str | None:
    """Cut a `.metadata` in half."""
    step = _step(draw, place)
    path = None if step is None else step / ".metadata"
    if path is None or not path.exists():
        return None
    os.truncate(path, path.stat().st_size // 2)
    return f"{path} halved"


def add_file(draw: random.Random, look: Look, place: Path) -> str | None:
    """Put a foreign file into a step."""
    step = _step(draw, place)
    if step is None:
        return None
    name = draw.choice(["notes.txt", ".nfs0000", "__9_9.distcp", "core", ".metadata.bak", "sub/results.csv"])
    path = step / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(draw.randbytes(100))
    return f"{path} added"


def move_step(draw: random.Random, look: Look, place: Path) -> str | None:
    """Give a step the name of a later one."""
    step = _step(draw, place)
    if step is None:
        return None
    later = step.with_name(f"step-{max(folders_of(place)) + draw.choice([1, 5, 10])}")
    step.rename(later)
    return f"{step} moved to {later.name}"


def rename_step(draw: random.Random, look: Look, place: Path) -> str | None:
    """Rename a step to what is no step's name."""
    step = _step(draw, place)
    if step is None:
        return None
    away = step.with_name(f"{step.name}{draw.choice(['.old', '-keep', '.bak'])}")
    if away.exists():
        return None
    step.rename(away)
    return f"{step} renamed to {away.name}"


def half_copy(draw: random.Random, look: Look, place: Path) -> str | None:
    """Begin to copy a step under the name of a later one, and be cut off."""
    step = _step(draw, place)
    if step is None:
        return None
    later = step.with_name(f"step-{max(folders_of(place)) + draw.choice([1, 5, 10])}")
    later.mkdir()
    files = sorted(path for path in step.iterdir() if path.is_file())
    for path in draw.sample(files, draw.randint(0, len(files))):
        data = path.read_bytes()
        is_cut = path.name == ".metadata" or draw.random() < 0.5
        (later / path.name).write_bytes(data[: len(data) // 2] if is_cut else data)
    return f"{step} half copied to {later.name}"


def remove_step(draw: random.Random, look: Look, place: Path) -> str | None:
    """Remove a step as `rm -r` does."""
    step = _step(draw, place)
    if step is None:
        return None
    shutil.rmtree(step)
    return f"{step} removed"


def garbage(draw: random.Random, look: Look, place: Path) -> str | None:
    """Put garbage beside what the run keeps for itself."""
    own = place / ".run"
    if not own.is_dir():
        return None
    name = draw.choice(["kept", "notes", "pin-x", "pin-7", "lease-x", ".lease-000001.tmp", "abandoned.tmp", "probe"])
    (own / name).write_bytes(draw.randbytes(draw.choice([0, 1, 1000])))
    return f"garbage in {own / name}"


HARMS: dict[str, Harm] = {
    "file cut": truncate_file,
    "file removed": remove_file,
    "byte changed": flip_byte,
    "metadata halved": halve_metadata,
    "foreign file": add_file,
    "step moved": move_step,
    "step renamed": rename_step,
    "step half copied": half_copy,
    "step removed": remove_step,
    "garbage": garbage,
}
