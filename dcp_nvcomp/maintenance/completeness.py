"""Whether a checkpoint is complete: one answer for lists, rules, restores, pins and uploads.

    `.metadata` parses -> its summary is of the same save -> its data files are there, as long as they must be

A checkpoint of stock DCP is one by what its metadata holds, not by a summary that is missing. That the name of a run's
directory says the step that was saved is checked where names are known (run_listing.py, runs/tiers/fast.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.format.metadata.roots import Root, is_missing, read_root
from dcp_nvcomp.format.metadata.stored import StockItem
from dcp_nvcomp.format.metadata.summary import SUMMARY_NBYTES, Summary, summary_at_end
from dcp_nvcomp.storage.base import Filesystem

__all__ = ["look_into"]


def look_into(
    filesystem: Filesystem, folder: str, roots: Iterable[str], sizes: Mapping[str, int]
) -> tuple[Summary | None, str]:
    """Read the metadata of a checkpoint, and compare it with what is there.

    Args:
        filesystem: a directory at or above the checkpoint.
        folder: the checkpoint below it; empty for the directory itself.
        roots: names of its `.metadata`, or of those of single ranks.
        sizes: of the files that are there, by path below the filesystem's directory.

    Returns:
        Its summary, if it has one; and why it is not complete, empty if it is.
    """
    below = f"{folder}/" if folder else ""
    summary = None
    for name in roots:
        try:
            root = read_root(filesystem, f"{below}{name}")
        except CheckpointError as error:
            if is_missing(error):
                return None, f"{name} was removed meanwhile."
            return _summary_alone(filesystem, f"{below}{name}", sizes), f"{name}: {error.message}"
        summary = summary_at_end(root.data[-SUMMARY_NBYTES:])
        problem = _disagreement(root, summary) or _lacking(root, below, sizes)
        if problem:
            return summary, problem
    return summary, ""


def _summary_alone(filesystem: Filesystem, name: str, sizes: Mapping[str, int]) -> Summary | None:
    """Return the summary of metadata that can't be read otherwise."""
    nbytes = sizes.get(name, 0)
    try:
        return summary_at_end(filesystem.read(name, max(nbytes - SUMMARY_NBYTES, 0), nbytes))
    except CheckpointError:
        return None


def _disagreement(root: Root, summary: Summary | None) -> str:
    if summary is None or summary.save_id == root.save_id:
        return ""
    return f"The summary in its metadata is of save {summary.save_id}, and the rest of save {root.save_id}."


def _lacking(root: Root, below: str, sizes: Mapping[str, int]) -> str:
    """Return what is wrong with the data files; empty if nothing is."""
    least = _least_sizes(root)
    for name, file in root.files().items():
        nbytes = sizes.get(f"{below}{name}")
        if nbytes is None:
            return f"The data file {name} is missing."
        if file is not None and nbytes != file.nbytes:
            return f"The data file {name} has {nbytes} bytes, and the metadata says {file.nbytes}."
        if nbytes < least.get(name, 0):
            return f"The data file {name} has {nbytes} bytes, and what it should hold takes {least[name]}."
    return ""


def _least_sizes(root: Root) -> dict[str, int]:
    """Return how long the data files of stock DCP are at least."""
    found: dict[str, int] = {}
    for item in (root.metadata.storage_data or {}).values():
        if isinstance(item, StockItem):
            found[item.relative_path] = max(found.get(item.relative_path, 0), item.offset + item.length)
    return found
