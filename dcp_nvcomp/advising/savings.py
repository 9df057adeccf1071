"""What a month of checkpoints costs: the cost model of NVIDIA's post on compressing checkpoints with nvCOMP (2026).

GB are the post's: binary, for sizes, rates and prices. `PUBLISHED` are the post's codecs, `MODELS` its jobs. `MEASURED`
are ratios of a real state (benchmarks/results/ratio.json) and rates of whole saves to memory by two CPU cores a rank
(cpu.json beside it).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.errors import ConfigurationError


@dataclass(frozen=True)
class Job:
    """A training job and what it pays."""

    name: str  # of the model
    gpus: int  # all of them wait during a save
    checkpoint_gb: float
    is_moe: bool = False  # a mixture of experts, which Zstd compresses a little better
    interval_minutes: float = 30.0
    days: float = 30.0  # of a month
    gpu_hour_price: float = 4.40
    storage_gb_per_second: float = 5.0  # what the storage takes of the whole job
    storage_price: float = 0.14  # of a GB and month
    kept: int = 96  # checkpoints

    @property
    def saves(self) -> float:
        return self.days * 24 * 60 / self.interval_minutes


@dataclass(frozen=True)
class Codec:
    """What a codec does with a checkpoint."""

    name: str
    ratio: float  # of a dense model
    gb_per_second: float
    per_gpu: bool = False  # whether each GPU adds to the rate; if not, it is of the whole job, as the post has it
    moe_ratio: float | None = None  # of a mixture of experts, if it differs

    def ratio_of(self, job: Job) -> float:
        return self.moe_ratio if job.is_moe and self.moe_ratio is not None else self.ratio


@dataclass(frozen=True)
class Costs:
    """What a month of checkpoints costs."""

    wait_seconds: float  # of a save
    wait_hours: float  # of all saves of a month
    idle_cost: float  # of the GPUs that wait
    stored_gb: float  # of a checkpoint
    storage_cost: float  # of those that are kept


@dataclass(frozen=True)
class Savings:
    """A job with a codec beside the same job without one."""

    job: Job
    codec: Codec
    plain: Costs
    compressed: Costs

    @property
    def idle_savings(self) -> float:
        """What waiting costs less, a month."""
        return self.plain.idle_cost - self.compressed.idle_cost

    @property
    def storage_savings(self) -> float:
        """What storing costs less, a month."""
        return self.plain.storage_cost - self.compressed.storage_cost

    @property
    def total(self) -> float:
        """Both together; negative if compression costs more than it saves."""
        return self.idle_savings + self.storage_savings

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.job.name,
            "gpus": self.job.gpus,
            "codec": self.codec.name,
            "ratio": self.codec.ratio_of(self.job),
            "checkpoint_gb": self.job.checkpoint_gb,
            "stored_gb": self.compressed.stored_gb,
            "plain_wait_seconds": self.plain.wait_seconds,
            "wait_seconds": self.compressed.wait_seconds,
            "plain_idle_cost": self.plain.idle_cost,
            "idle_savings": self.idle_savings,
            "storage_savings": self.storage_savings,
            "savings": self.total,
        }


def savings(job: Job, codec: Codec) -> Savings:
    """Return what a codec saves a job in a month."""
    ratio, rate = codec.ratio_of(job), codec.gb_per_second * (job.gpus if codec.per_gpu else 1)
    for name, value in (
        ("gpus", job.gpus), ("checkpoint_gb", job.checkpoint_gb), ("interval_minutes", job.interval_minutes),
        ("storage_gb_per_second", job.storage_gb_per_second), ("ratio", ratio), ("gb_per_second", rate),
    ):  # fmt: skip
        if not value > 0:
            raise ConfigurationError(f"{name}={value!r} must be positive.")
    return Savings(job, codec, _costs(job, 1.0, 0.0), _costs(job, ratio, job.checkpoint_gb / rate))


def _costs(job: Job, ratio: float, encode_seconds: float) -> Costs:
    stored = job.checkpoint_gb / ratio
    wait = max(encode_seconds, stored / job.storage_gb_per_second)
    hours = wait * job.saves / 3600
    return Costs(wait, hours, hours * job.gpus * job.gpu_hour_price, stored, stored * job.kept * job.storage_price)


def draw_savings(rows: Sequence[Savings], path: str | os.PathLike[str]) -> None:
    """Write a picture: bars by job, dollars a month."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("A picture needs matplotlib: pip install 'dcp-nvcomp[plot]'.") from error
    jobs = list(dict.fromkeys(f"{row.job.name}\n{row.job.gpus} GPUs" for row in rows))
    codecs = list(dict.fromkeys(row.codec.name for row in rows))
    figure = Figure(figsize=(1.5 * len(jobs) + 4, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(codecs)
    for number, codec in enumerate(codecs):
        totals = [row.total for row in rows if row.codec.name == codec]  # in the order of the jobs
        places = [at - 0.4 + (number + 0.5) * width for at in range(len(jobs))]
        bars = axes.bar(places, totals, width * 0.95, label=codec)
        axes.bar_label(bars, list(map(_dollars, totals)), fontsize=7, rotation=90, padding=3)
    axes.axhline(0, color="#555555", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=100)  # jobs differ by a factor of a thousand, and a codec may cost
    axes.margins(y=0.25)
    axes.set_xticks(range(len(jobs)), jobs, fontsize=8)
    axes.yaxis.set_major_formatter(lambda value, _: _dollars(value))
    axes.set_ylabel("savings a month (logarithmic)")
    axes.set_title("What compressed checkpoints save", fontsize=10)
    axes.legend(fontsize=7, loc="upper left")
    try:
        figure.savefig(path, dpi=130)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"The picture {os.fspath(path)!r} can't be written: {error}") from error


def _dollars(value: float) -> str:
    sign, size = "-" if value < 0 else "", abs(value)
    if size >= 1e6:
        return f"{sign}${size / 1e6:.3g}M"
    return f"{sign}${size / 1e3:.3g}k" if size >= 1e3 else f"{sign}${size:.0f}"


PUBLISHED = (
    Codec("nvCOMP Zstd (published)", 1.14, 16.0, moe_ratio=1.15),
    Codec("nvCOMP gANS (published)", 1.18, 200.0, moe_ratio=1.18),
)
MEASURED = (
    Codec("DCP's zstd extension, 2 CPU cores a GPU", 1.142, 0.82, per_gpu=True),
    Codec("dcp_nvcomp auto, 2 CPU cores a GPU", 1.334, 1.72, per_gpu=True),
)
MODELS = (
    Job("Llama 3 8B", 8, 89),
    Job("Llama 3 70B", 8, 782),
    Job("Llama 3 70B", 64, 782),
    Job("Llama 3 405B", 128, 4529),
    Job("Mixtral 8x22B", 64, 1575, is_moe=True),
    Job("DeepSeek-V3 671B", 256, 7490, is_moe=True),
)
