"""Removes a step so that it is never half visible, and finishes removals that were cut short.

1  publish the mark `.removing` in the step's directory; whoever pins the step looks for it after the pin is there, so
   one of the two is seen: if the step is pinned, the mark goes again
2  remove `.metadata`, and those of single ranks: from here on there is no checkpoint
3  remove the copies of the metadata, then the data files and unfinished uploads
4  remove the mark, and the directory where storage has directories

Whoever finds the mark goes on with 2. A save into the same directory removes the mark before it publishes, or the next
start would take the new checkpoint for one that was being removed.
"""

from __future__ import annotations

from collections.abc import Callable

from dcp_nvcomp.format.names import METADATA_NAME, is_stock_data_file, own_file, rank_of_metadata_name
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.temporary import published_name

REMOVING = ".removing"
EQUAL = ".equal"  # beside what a replica has saved: other replicas have saved the same


def is_being_removed(filesystem: Filesystem) -> bool:
    """Return True if the removal of a step was begun and not finished."""
    return filesystem.file_nbytes(REMOVING) is not None


def remove_step(filesystem: Filesystem, is_wanted: Callable[[], bool] = lambda: False) -> bool:
    """Remove a checkpoint and what saves left beside it; other files stay, and then the directory does too."""
    filesystem.refuse_link()
    names = filesystem.list_names()
    uploads = filesystem.list_uploads()
    if not names and not uploads:
        filesystem.remove_directory()
        return True
    filesystem.publish(REMOVING, b"")
    if is_wanted():
        filesystem.remove([REMOVING])
        return False
    roots = [name for name in names if name == METADATA_NAME or rank_of_metadata_name(name) is not None]
    filesystem.remove(sorted(roots, key=lambda name: name != METADATA_NAME))
    own = {name: found.kind for name in names if (found := own_file(name)) is not None}
    filesystem.remove(sorted(name for name, kind in own.items() if kind == "metadata"))
    filesystem.remove(sorted(name for name, kind in own.items() if kind != "metadata"))
    filesystem.remove(sorted(name for name in names if is_stock_data_file(name)))
    marks = [name for name in names if name == EQUAL or published_name(name) in (EQUAL, REMOVING)]  # some cut short
    filesystem.remove(sorted(marks))
    filesystem.abort_uploads(uploads)
    filesystem.remove([REMOVING])
    filesystem.remove_directory()
    return True
