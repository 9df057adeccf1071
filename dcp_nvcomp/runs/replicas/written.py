"""What was written in the fast tier: one save of all ranks, or one of each replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dcp_nvcomp.format.names import data_file_rank
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.saving.commit import WrittenSave


@dataclass(frozen=True)
class WrittenPart:
    """A save that is complete in itself.

    Attributes:
        written: what it consists of; its files are named by the places of their ranks in `ranks`.
        ranks: the ranks that made it.
        seconds: how long the slowest of them took.
    """

    written: WrittenSave
    ranks: tuple[int, ...]
    seconds: float

    def files_of(self, rank: int) -> dict[str, int]:
        """Return the files that a rank of the run wrote, and their sizes."""
        return {name: self.written.files[name] for name, writer in self.senders().items() if writer == rank}

    def senders(self) -> dict[str, int]:
        """Return the rank of the run that wrote each file."""
        places = {name: data_file_rank(name) for name in self.written.files}
        return {name: self.ranks[place] for name, place in places.items() if place is not None}


def written_by(
    ranks: Ranks, replicas: Sequence[Sequence[int]], written: WrittenSave | None, seconds: float
) -> list[WrittenPart]:
    """Tell all ranks what was written; all ranks call this."""
    if not replicas:
        return [WrittenPart(ranks.share(written), tuple(range(ranks.count)), seconds)]
    found, parts = ranks.gather((written, seconds)), []
    for replica in replicas:
        own = found[replica[0]][0]
        assert own is not None, "the first rank of a group publishes what it saves"
        parts.append(WrittenPart(own, tuple(replica), max(found[rank][1] for rank in replica)))
    return parts
