"""Where a soak saves: a disk or a bucket; and how files there are looked at and broken, behind the product's back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import fsspec


@dataclass(frozen=True)
class Place:
    """A directory for many checkpoints."""

    url: str  # a path, or an fsspec URL
    # what writers and readers get to reach it; perhaps through a proxy that breaks things
    options: dict[str, Any] = field(default_factory=dict)
    plain_options: dict[str, Any] = field(default_factory=dict)  # how to reach it directly
    faulty: bool = False  # whether `options` lead through such a proxy; on a disk, whether system calls fail at random

    def plain(self) -> Place:
        """The same place without faults."""
        return Place(self.url, self.plain_options, self.plain_options)


def _open(place: Place, path: str) -> tuple[Any, str]:
    fs, root = fsspec.url_to_fs(f"{place.url}/{path}", use_listings_cache=False, **place.plain_options)
    return fs, root.rstrip("/")


def list_files(place: Place, path: str) -> list[str]:
    """Sorted names of the files of a checkpoint."""
    fs, root = _open(place, path)
    try:
        return sorted(name.rpartition("/")[2] for name in fs.ls(root, detail=False))
    except FileNotFoundError:
        return []


def read_file(place: Place, path: str, name: str) -> bytes:
    """A file's bytes."""
    fs, root = _open(place, path)
    data: bytes = fs.cat_file(f"{root}/{name}")
    return data


def write_file(place: Place, path: str, name: str, data: bytes) -> None:
    """Put a file's bytes back, or others in their place."""
    fs, root = _open(place, path)
    fs.pipe_file(f"{root}/{name}", data)


def break_file(place: Place, path: str, name: str, seed: int) -> tuple[str, bytes]:
    """Harm a file."""
    draw, data = random.Random(seed), read_file(place, path, name)
    how = draw.choice(["flip", "flip", "flip", "truncate", "remove", "grow", "zeros"])
    at = draw.randrange(len(data))
    if how == "remove":
        fs, root = _open(place, path)
        fs.rm_file(f"{root}/{name}")
    elif how == "flip":
        write_file(place, path, name, data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
    elif how == "truncate":
        write_file(place, path, name, data[:at])
    elif how == "grow":
        write_file(place, path, name, data + draw.randbytes(draw.randint(1, 100)))
    else:
        harmed = data[:at] + bytes(min(512, len(data) - at)) + data[at + 512 :]
        if harmed == data:
            harmed = data[:-1] + bytes([data[-1] ^ 1])
        write_file(place, path, name, harmed)
    return f"{how} at {at} of {len(data)}", data
