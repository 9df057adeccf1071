"""Statistics of a load."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class LoadStats:
    """Statistics of one rank's part of a load.

    Attributes:
        checkpoint_id: where the checkpoint is; without a password, if its URL has one.
        items: how many tensors, parts of tensors and objects were loaded.
        nbytes: size of the tensors that were filled, in memory; of a checkpoint of stock DCP 0.
        fetched_nbytes: what was read of data files, without footers; of a checkpoint of stock DCP 0.
        seconds: time for reading, decoding and placing.
        rank: the rank.
        stage_seconds: time in `fetch` and `decode`, of the busiest thread; both overlap, and of a checkpoint of stock
            DCP there are none.
    """

    checkpoint_id: str
    items: int
    nbytes: int
    fetched_nbytes: int
    seconds: float
    rank: int = 0
    stage_seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        return {"schema": 1, **asdict(self)}

    def __str__(self) -> str:
        rate = self.nbytes / self.seconds / 1e6 if self.seconds else 0.0
        return (
            f"loaded {self.nbytes / 1e6:.2f} MB in {self.items} items in {self.seconds:.2f} s ({rate:.0f} MB/s), of "
            f"which {self.fetched_nbytes / 1e6:.2f} MB were read, from {self.checkpoint_id}"
        )
