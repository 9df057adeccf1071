"""What is there of a run by its files alone, written from docs/format.md, without the code of runs."""

from __future__ import annotations

import json
import pickle
import zlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

MARK = ".removing"
_SUMMARY, _CRC_DIGITS = b"DCPNVsum", 8


@dataclass(frozen=True)
class Root:
    """A `.metadata` that can be read."""

    step: int  # the step of the directory that it is in
    tag: int  # of the save, which the ranks report; -1 without one
    save_id: str
    run_seconds: float  # how long the run had been under way, which does not depend on clocks
    files: Mapping[str, int]  # the data files that it names, and their sizes


@dataclass(frozen=True)
class Seen:
    """A save that some `.metadata` is there of."""

    root: Root
    is_whole: bool  # True if all files are there and good
    is_there: bool  # True if all files are there, with their sizes


@dataclass
class Look:
    """Looks at directories."""

    # checksums of data files that were harmed without a change of their size, by name; all names are unique
    good: dict[str, int] = field(default_factory=dict)

    def durable(self, run: Path) -> dict[int, Seen]:
        """Return what the durable tier has, by step."""
        found = {}
        for step, folder in folders_of(run).items():
            root = None if (folder / MARK).exists() else root_of(folder)
            if root is not None:
                found[step] = self._seen(root, [folder])
        return found

    def on_nodes(self, nodes: Iterable[Path]) -> list[Seen]:
        """Return what nodes have together."""
        by_step: dict[int, list[Path]] = {}
        for node in nodes:
            for step, folder in folders_of(node).items():
                by_step.setdefault(step, []).append(folder)
        roots = {
            root.save_id: (root, folders)
            for folders in by_step.values()
            for folder in folders
            if not (folder / MARK).exists() and (root := root_of(folder)) is not None
        }
        return [self._seen(root, folders) for root, folders in roots.values()]

    def sharing(self, run: Path, steps: Set[int]) -> set[int]:
        """Return the steps of the durable tier that have files of some of these."""
        beside = tuple(f"../step-{step}/" for step in steps)
        roots = {step: root_of(folder) for step, folder in folders_of(run).items()}
        return {step for step, root in roots.items() if root and any(name.startswith(beside) for name in root.files)}

    def _seen(self, root: Root, folders: Iterable[Path]) -> Seen:
        there: dict[str, bool] = {}
        for folder in folders:
            for name, nbytes in root.files.items():
                path = folder / name
                if path.is_file() and path.stat().st_size == nbytes:
                    there[name] = there.get(name, False) or self._is_good(path)
        return Seen(root, all(map(there.get, root.files)), root.files.keys() <= there.keys())

    def _is_good(self, path: Path) -> bool:
        return path.name not in self.good or zlib.crc32(path.read_bytes()) == self.good[path.name]


def folders_of(place: Path) -> dict[int, Path]:
    """Return the directories of steps by their number."""
    if not place.is_dir():
        return {}
    names = ((folder, folder.name.removeprefix("step-")) for folder in place.glob("step-*") if folder.is_dir())
    return {int(rest): folder for folder, rest in names if rest.isdecimal() and str(int(rest)) == rest}


def _file_of(name: str, nbytes: int, footer_nbytes: int, footer_crc: int, *beside: str) -> tuple[str, int]:
    """Return the path of a data file from the directory, which is beside it for one that is shared, and its size."""
    return ("/".join(["..", *beside[:1], name]) if beside else name), nbytes


def root_of(folder: Path) -> Root | None:
    """Return the `.metadata` of a directory; None if there is none, or it can't be read or is of another step."""
    step = int(folder.name.removeprefix("step-"))
    try:
        data = (folder / ".metadata").read_bytes()
        metadata = pickle.loads(data)
        text = data[data.rindex(_SUMMARY) + len(_SUMMARY) + _CRC_DIGITS :].decode("ascii", "replace")
        summary, _ = json.JSONDecoder().raw_decode(text)
        files = dict(_file_of(*file) for file, _ in metadata.storage_data.values())
    except (OSError, ValueError, EOFError, AttributeError, pickle.UnpicklingError):
        return None
    if summary.get("step") != step:
        return None
    tag = int(summary.get("metrics", {}).get("tag", -1))
    return Root(step, tag, summary["save_id"], summary["run_seconds"], files)
