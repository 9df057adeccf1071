"""What a save tells: sizes by codec and dtype, seconds by stage, files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["RankTotals", "SaveStats", "Totals", "summarize"]

STAGES = ("plan", "encode", "write", "commit")


@dataclass(frozen=True)
class Totals:
    """Sums over some records.

    Attributes:
        records: how many shards and bytes items.
        uncompressed_nbytes: their size in memory.
        encoded_nbytes: their size in data files, footers not counted.
    """

    records: int = 0
    uncompressed_nbytes: int = 0
    encoded_nbytes: int = 0

    @property
    def ratio(self) -> float:
        """Uncompressed over encoded size; 1.0 where there is nothing."""
        return self.uncompressed_nbytes / self.encoded_nbytes if self.encoded_nbytes else 1.0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.records + other.records,
            self.uncompressed_nbytes + other.uncompressed_nbytes,
            self.encoded_nbytes + other.encoded_nbytes,
        )


@dataclass
class RankTotals:
    """What one rank measured; travels to the coordinator with its write results.

    Attributes:
        by: totals by codec and dtype.
        seconds: time in each stage. Of stages in which several threads work, the time of the busiest.
        files: names and sizes of the data files.
    """

    by: dict[tuple[str, str], Totals] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)

    def add(self, codec: str, dtype: str, totals: Totals) -> None:
        """Count some records of one codec and dtype."""
        self.by[codec, dtype] = self.by.get((codec, dtype), Totals()) + totals


@dataclass(frozen=True)
class SaveStats:
    """What a save did. On the coordinator it speaks of all ranks, on the others of their own part.

    Attributes:
        checkpoint_id: where the checkpoint is.
        save_id: its id.
        by_codec: totals by codec name, such as `planes-zstd`.
        by_dtype: totals by dtype name, such as `bfloat16`.
        seconds: time in `plan`, `encode`, `write` and `commit`, of the slowest rank; encode and write overlap.
        total_seconds: time from the start of planning to the commit, on this rank.
        file_nbytes: size of each data file by name.
    """

    checkpoint_id: str
    save_id: str
    by_codec: dict[str, Totals]
    by_dtype: dict[str, Totals]
    seconds: dict[str, float]
    total_seconds: float
    file_nbytes: dict[str, int]

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the data files."""
        return tuple(self.file_nbytes)

    @property
    def totals(self) -> Totals:
        """Sums over everything saved."""
        return sum(self.by_codec.values(), Totals())

    @property
    def uncompressed_nbytes(self) -> int:
        """Size of the state in memory."""
        return self.totals.uncompressed_nbytes

    @property
    def encoded_nbytes(self) -> int:
        """Size of the data files, their footers included."""
        return sum(self.file_nbytes.values())

    @property
    def ratio(self) -> float:
        """Uncompressed over encoded size; 1.0 where there is nothing."""
        return self.uncompressed_nbytes / self.encoded_nbytes if self.uncompressed_nbytes else 1.0

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {self.seconds.get(stage, 0.0):.2f} s" for stage in STAGES)
        return (
            f"saved {self.uncompressed_nbytes / 1e9:.3f} GB as {self.encoded_nbytes / 1e9:.3f} GB "
            f"(ratio {self.ratio:.3f}) in {self.total_seconds:.2f} s ({stages}) to {self.checkpoint_id}"
        )


def summarize(checkpoint_id: str, save_id: str, ranks: Iterable[RankTotals], total_seconds: float) -> SaveStats:
    """The stats of a save from those of its ranks."""
    by_codec: dict[str, Totals] = {}
    by_dtype: dict[str, Totals] = {}
    seconds: dict[str, float] = {}
    files: dict[str, int] = {}
    for rank in ranks:
        for (codec, dtype), totals in rank.by.items():
            by_codec[codec] = by_codec.get(codec, Totals()) + totals
            by_dtype[dtype] = by_dtype.get(dtype, Totals()) + totals
        for stage, spent in rank.seconds.items():
            seconds[stage] = max(seconds.get(stage, 0.0), spent)
        files.update(rank.files)
    return SaveStats(checkpoint_id, save_id, by_codec, by_dtype, seconds, total_seconds, files)
