"""One read of `.metadata` for all ranks of a load: the first reads it, the others get its bytes.

Only of a save of this package, whose data files have names of their own: a rank that finds another checkpoint at this
place, as on disks that nodes do not share, then finds none of them. Where it can't be read, and for checkpoints of
stock DCP, each rank reads for itself, and reports what it meets there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.calls.ranks import global_ranks, together
from dcp_nvcomp.loading.reader import NvcompReader

logger = logging.getLogger(__name__)


@contextmanager
def shared_metadata(reader: NvcompReader, group: dist.ProcessGroup | None, *, all_alike: bool) -> Iterator[None]:
    """Have a reader use the metadata that all ranks share, for one load.

    `all_alike` says whether all ranks read the same file; the same on all of them.
    """
    if group is None or not all_alike or dist.get_world_size(group) == 1:
        yield
        return
    reader.given_metadata = _received(reader, group)
    try:
        yield
    finally:
        reader.given_metadata = None


def _received(reader: NvcompReader, group: dist.ProcessGroup) -> Metadata | None:
    root, sent = None, list[bytes | None]([None])
    if dist.get_rank(group) == 0:
        try:
            root = reader.read_root()
        except Exception as error:  # the load meets it again, and reports it
            logger.debug("`.metadata` is not shared: %s", error)
        if root is not None and root.own_save_id is not None:
            sent = [root.data]
    with together(group):
        dist.broadcast_object_list(sent, src=global_ranks(group)[0], group=group)
    if sent[0] is None:
        return None
    if root is not None:
        return root.metadata
    try:
        return reader.parsed(sent[0])
    except Exception as error:  # likewise
        logger.debug("The shared `.metadata` is not used: %s", error)
        return None
