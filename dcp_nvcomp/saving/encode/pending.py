"""Records that wait to be encoded and written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.format.blocks import BlockGrid
from dcp_nvcomp.format.record import KIND_PACK, Record
from dcp_nvcomp.saving.encode.sources import ChainChoice, GivenChain, Source


class Member(NamedTuple):
    """One write item of a record: `.metadata` will name its place.

    Attributes:
        item_index: DCP's index of the item.
        record: the item's own record. That of an item in a pack lacks `pack`, which follows when it is written.
        nbytes: its uncompressed size.
    """

    item_index: MetadataIndex
    record: Record
    nbytes: int


@dataclass(frozen=True, slots=True)
class PendingRecord:
    """A record with blocks, ready to be encoded. Its elements are in a `Source`, which may be dropped earlier.

    Attributes:
        record: the record, but for `first_block`, and without its codec chain if that is still to be chosen.
        dtype: dtype name for stats (`bytes` for Python objects).
        members: the items in it: one, or those of a pack.
        later: finds the chain of a record without one.
    """

    record: Record
    dtype: str
    members: tuple[Member, ...]
    later: ChainChoice | None = None

    @property
    def grid(self) -> BlockGrid:
        """Its blocks."""
        assert self.record.grid is not None
        return self.record.grid

    @property
    def choice(self) -> ChainChoice:
        """The choice of its codec chain."""
        if self.later is not None:
            return self.later
        assert self.record.chain is not None
        return GivenChain(self.record.chain)

    @property
    def chain(self) -> CodecChain:
        """Its codec chain, which is settled once its first block is encoded."""
        return self.choice.chain

    @property
    def nbytes(self) -> int:
        """Its uncompressed size."""
        return self.record.uncompressed_nbytes

    @property
    def is_pack(self) -> bool:
        """True if the members have footer records of their own."""
        return self.record.kind == KIND_PACK


Ready = tuple[PendingRecord, Source]
