"""Save statistics: sizes by codec and dtype, seconds by stage, data files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from dcp_nvcomp.calls.tables import Column, Shown, Table, left
from dcp_nvcomp.format.metadata.summary import Summary
from dcp_nvcomp.redaction import printable
from dcp_nvcomp.saving.plans.global_plan import key_count
from dcp_nvcomp.version import VERSION

_ATTRIBUTE = "dcp_nvcomp_save_stats"
STAGES = ("plan", "encode", "write", "commit")
TOP_LEVEL = "top level"
OTHER_COMPONENTS = "others"
SHARED = "shared"  # where others have the name of a codec: what is in files of other checkpoints
_MOST_COMPONENTS = 64


@dataclass(frozen=True)
class Totals:
    """Sums over some records.

    Attributes:
        records: number of shards and bytes items.
        uncompressed_nbytes: their size in memory.
        encoded_nbytes: size of their encoded blocks, without the headers, footers and gaps of the data files.
    """

    records: int = 0
    uncompressed_nbytes: int = 0
    encoded_nbytes: int = 0

    @property
    def ratio(self) -> float:
        """`uncompressed_nbytes` over `encoded_nbytes`; 1.0 if nothing was saved."""
        return self.uncompressed_nbytes / self.encoded_nbytes if self.encoded_nbytes else 1.0

    def cells(self) -> tuple[str, str, str]:
        """Return both sizes and the ratio as a table shows them."""
        from rich.filesize import decimal  # a GPU host that only saves need not have it

        ratio = f"{self.ratio:.3f}" if self.encoded_nbytes or not self.uncompressed_nbytes else "-"  # all is shared
        return decimal(self.uncompressed_nbytes), decimal(self.encoded_nbytes), ratio

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.records + other.records,
            self.uncompressed_nbytes + other.uncompressed_nbytes,
            self.encoded_nbytes + other.encoded_nbytes,
        )


@dataclass
class RankTotals:
    """Measurements of one rank, which travel to the coordinator with its write results."""

    rank: int | None = None  # None for measurements that are of no rank's part
    by: dict[tuple[str, str, str], Totals] = field(default_factory=dict)  # component, codec and dtype
    seconds: dict[str, float] = field(default_factory=dict)  # of the busiest thread of each stage
    files: dict[str, int] = field(default_factory=dict)
    recoded_blocks: int = 0
    stall_seconds: float = 0.0
    staged_nbytes: int = 0

    def add(self, by: Mapping[tuple[str, str, str], Totals]) -> None:
        """Count some records; beyond 64 of them, components are counted together."""
        known = {component for component, _, _ in self.by}
        for (component, codec, dtype), totals in by.items():
            if component not in known and component != TOP_LEVEL and len(known) >= _MOST_COMPONENTS:
                component = OTHER_COMPONENTS
            known.add(component)
            key = component, codec, dtype
            self.by[key] = self.by.get(key, Totals()) + totals


def component_of(fqn: str) -> str:
    """Return the component that a key belongs to: its first part, such as `model`; `top level` if it has one only."""
    first, dot, _ = fqn.partition(".")
    return first if dot else TOP_LEVEL


@dataclass(frozen=True)
class RankStats:
    """Measurements of one rank's part of a save.

    Attributes:
        rank: the rank.
        seconds: time in `plan`, `encode` and `write`; encode and write overlap.
        uncompressed_nbytes: size in memory of what it saved.
        encoded_nbytes: size of its encoded blocks.
        stall_seconds: how long `async_save` kept it waiting.
    """

    rank: int
    seconds: dict[str, float]
    uncompressed_nbytes: int
    encoded_nbytes: int
    stall_seconds: float = 0.0


@dataclass(frozen=True, repr=False)
class SaveStats(Shown):
    """Statistics of one save, of all its ranks; `writer.last_save` has only its own but on the coordinator.

    Attributes:
        checkpoint_id: where the checkpoint is; without a password, if its URL has one.
        save_id: its id.
        by_codec: totals by codec name, such as `planes-zstd`.
        by_dtype: totals by dtype name, such as `bfloat16`.
        seconds: time in `plan`, `encode`, `write` and `commit`, of the slowest rank; encode and write overlap.
        total_seconds: time from the start of planning to the commit, on this rank.
        file_nbytes: size of each data file by name.
        recoded_blocks: how many blocks a GPU encoded to wrong bytes. This was noticed, and the CPU engine encoded them
            again: the checkpoint is right, but the GPU, its driver or nvCOMP is not.
        stall_seconds: how long `async_save` kept its caller waiting, of the slowest rank; 0.0 for other saves.
        staged_nbytes: what an asynchronous save held in host memory at most, if nothing of it was written meanwhile.
        by_component: totals by component and codec; a component is the first part of keys, such as `model`, and
            `top level` are the keys of one part.
        ranks: measurements of each rank, by rank.

    Examples:
        >>> import tempfile, torch, torch.distributed.checkpoint as dcp
        >>> from dcp_nvcomp import NvcompWriter, SaveStats
        >>> writer = NvcompWriter(tempfile.mkdtemp())
        >>> metadata = dcp.save({"w": torch.arange(1000)}, storage_writer=writer, no_dist=True)
        >>> writer.last_save.uncompressed_nbytes
        8000
        >>> SaveStats.of(metadata) == writer.last_save
        True
    """

    checkpoint_id: str
    save_id: str
    by_codec: dict[str, Totals]
    by_dtype: dict[str, Totals]
    seconds: dict[str, float]
    total_seconds: float
    file_nbytes: dict[str, int]
    recoded_blocks: int = 0
    stall_seconds: float = 0.0
    staged_nbytes: int = 0
    by_component: dict[str, dict[str, Totals]] = field(default_factory=dict)
    ranks: tuple[RankStats, ...] = ()

    @staticmethod
    def of(metadata: Metadata) -> SaveStats | None:
        """Return the statistics of the save that returned `metadata`.

        `dcp.save` and the future of `dcp.async_save` give it to every rank, from the process checkpointer too, whose
        child process keeps `writer.last_save` to itself.

        Args:
            metadata: what `dcp.save` or the future returned.

        Returns:
            The statistics of all ranks (with `use_collectives=False`, of this one); None for the metadata of another
            writer, and for metadata that was read from a checkpoint.
        """
        return getattr(metadata.storage_meta, _ATTRIBUTE, None)

    def attach_to(self, metadata: Metadata) -> None:
        """Let `SaveStats.of(metadata)` find these statistics. Only after the commit: `.metadata` must not hold them."""
        # in storage_meta, which every save replaces: planners may cache `metadata` itself and save it again
        setattr(metadata.storage_meta, _ATTRIBUTE, self)

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
        """Size of the encoded blocks, without the headers, footers and gaps of the data files."""
        return self.totals.encoded_nbytes

    @property
    def stored_nbytes(self) -> int:
        """Size of the data files."""
        return sum(self.file_nbytes.values())

    @property
    def shared_nbytes(self) -> int:
        """Size in memory of what was not written, because a checkpoint beside this one has it."""
        return self.by_codec.get(SHARED, Totals()).uncompressed_nbytes

    @property
    def ratio(self) -> float:
        """The size in memory of what was written over `stored_nbytes`; 1.0 if nothing was."""
        nbytes = self.uncompressed_nbytes - self.shared_nbytes
        return nbytes / self.stored_nbytes if nbytes and self.stored_nbytes else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        values = asdict(self)
        sums = ("uncompressed_nbytes", "shared_nbytes", "encoded_nbytes", "stored_nbytes", "ratio")
        return {
            "schema": 1,
            "checkpoint": values.pop("checkpoint_id"),
            "files": values.pop("file_nbytes"),
            **values,
            **{name: getattr(self, name) for name in sums},
            "ranks": list(values["ranks"]),
        }

    def summary(self, ranks: int, metadata: Metadata) -> Summary:
        """Return what `.metadata` keeps of it."""
        return Summary(
            self.save_id,
            time.time(),
            ranks,
            key_count(metadata),
            self.uncompressed_nbytes,
            self.stored_nbytes,
            VERSION,
        )

    def __repr__(self) -> str:
        return f"<SaveStats: {self}>"

    def shown(self) -> Iterator[str | Table]:
        """Return what a notebook displays: the line that `print` writes, and the sums by codec."""
        yield str(self)
        yield table_of_totals("codec", self.by_codec)

    def __str__(self) -> str:
        from rich.filesize import decimal

        stages = ", ".join(f"{stage} {self.seconds.get(stage, 0.0):.2f} s" for stage in STAGES)
        shared = f" beside {decimal(self.shared_nbytes)} that it shares" if self.shared_nbytes else ""
        return printable(
            f"saved {decimal(self.uncompressed_nbytes - self.shared_nbytes)} as {decimal(self.stored_nbytes)} "
            f"(ratio {self.ratio:.3f}){shared} in {self.total_seconds:.2f} s ({stages}) to {self.checkpoint_id}"
        )


def table_of_totals(title: str, by: Mapping[str, Totals]) -> Table:
    """Return a table of sums by name."""
    columns = [left(title), Column("shards", 2), Column("before", 1), Column("after"), Column("ratio")]
    return Table(columns, [(name, str(totals.records), *totals.cells()) for name, totals in by.items()])


def summarize(checkpoint_id: str, save_id: str, ranks: Sequence[RankTotals], total_seconds: float) -> SaveStats:
    by_codec: dict[str, Totals] = {}
    by_dtype: dict[str, Totals] = {}
    seconds: dict[str, float] = {}
    files: dict[str, int] = {}
    by_component: dict[str, dict[str, Totals]] = {}
    for rank in ranks:
        for (component, codec, dtype), totals in rank.by.items():
            of_component = by_component.setdefault(component, {})
            for sums, name in ((of_component, codec), (by_codec, codec), (by_dtype, dtype)):
                sums[name] = sums.get(name, Totals()) + totals
        for stage, spent in rank.seconds.items():
            seconds[stage] = max(seconds.get(stage, 0.0), spent)
        files.update(rank.files)
    return SaveStats(
        checkpoint_id,
        save_id,
        by_codec,
        by_dtype,
        seconds,
        total_seconds,
        files,
        recoded_blocks=sum(rank.recoded_blocks for rank in ranks),
        stall_seconds=max((rank.stall_seconds for rank in ranks), default=0.0),
        staged_nbytes=sum(rank.staged_nbytes for rank in ranks),
        by_component=by_component,
        ranks=tuple(sorted((_rank_stats(rank) for rank in ranks if rank.rank is not None), key=lambda one: one.rank)),
    )


def _rank_stats(totals: RankTotals) -> RankStats:
    assert totals.rank is not None
    every = sum(totals.by.values(), Totals())
    return RankStats(
        totals.rank, dict(totals.seconds), every.uncompressed_nbytes, every.encoded_nbytes, totals.stall_seconds
    )
