"""What must be restorable of a run, by its files alone: written from docs/format.md, without the code of runs.

A step is complete on nodes if one of them has its `.metadata`, and they together every data file that this names. It is
complete in the durable tier if all of that is in its directory there, and its removal was not begun.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path

MARK = ".removing"


def step_of(folder: Path) -> int:
    """Return the step of a directory."""
    return int(folder.name.removeprefix("step-"))


def folders_of(place: Path) -> dict[int, Path]:
    """Return the directories of steps below a place that hold anything."""
    return {step_of(folder): folder for folder in place.glob("step-*") if any(folder.iterdir())}


def named_files(metadata: Path) -> dict[str, int]:
    """Return the data files that a `.metadata` names, and their sizes."""
    stored = pickle.loads(metadata.read_bytes()).storage_data.values()
    return {name: nbytes for (name, nbytes, *_), _ in stored}


def _files_in(folder: Path) -> set[tuple[str, int]]:
    return {(file.name, file.stat().st_size) for file in folder.glob("*.distcp")}


def complete_on_nodes(nodes: Iterable[Path]) -> set[int]:
    """Return the steps that are complete on nodes."""
    found = set()
    by_node = [folders_of(node) for node in nodes]
    for step in {step for folders in by_node for step in folders}:
        folders = [of_node[step] for of_node in by_node if step in of_node]
        there = {file for folder in folders for file in _files_in(folder)}
        roots = [folder / ".metadata" for folder in folders if (folder / ".metadata").exists()]
        if any(named_files(root).items() <= there for root in roots):
            found.add(step)
    return found


def complete_in(run: Path) -> set[int]:
    """Return the steps that are complete in the durable tier."""
    return {
        step
        for step, folder in folders_of(run).items()
        if (folder / ".metadata").exists()
        and not (folder / MARK).exists()
        and named_files(folder / ".metadata").items() <= _files_in(folder)
    }


def last(count: int, steps: Iterable[int]) -> set[int]:
    """Return the newest steps, which is what the tests' rules keep."""
    return set(sorted(steps)[-count:])


def orphans(places: Iterable[Path]) -> int:
    """Return how many data files there are that no `.metadata` beside them names."""
    count = 0
    for place in places:
        for folder in folders_of(place).values():
            root = folder / ".metadata"
            named = named_files(root) if root.exists() else {}
            count += sum(file.name not in named for file in folder.glob("*.distcp"))
    return count
