"""What a month of checkpoints costs: the cost model of NVIDIA's post on compressing checkpoints with nvCOMP (2026).

    wait      = max(checkpoint / codec rate, checkpoint / ratio / storage rate), as both overlap, in seconds a save
    idle cost = wait * saves a month * GPUs * price of a GPU second
    storage   = checkpoint / ratio * checkpoints kept * price of a GB and month
    savings   = what the first two cost without compression, less what they cost with it

Every GPU waits while any checkpoint is written, so a synchronous save is meant. GB are the post's: binary, as its model
sizes are, and the same unit for sizes, rates and prices.

`PUBLISHED` are the post's codecs, and `MODELS` its jobs. The ratios of `MEASURED` are those of a real state in
benchmarks/results/ratio.json, and their rates those in cpu.json beside it: of whole saves to memory by two CPU cores,
which each GPU's rank is taken to have. Of this package nothing was measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dcp_nvcomp.errors import ConfigurationError

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Job:
    """A training job and what it pays.

    Attributes:
        name: of the model, for tables.
        gpus: how many wait during a save.
        checkpoint_gb: size of a checkpoint in GB.
        is_moe: True for a mixture of experts, which Zstd compresses a little better.
        interval_minutes: time between two checkpoints.
        days: of a month.
        gpu_hour_price: price of a GPU hour.
        storage_gb_per_second: what the storage takes of the whole job.
        storage_price: price of a GB and month.
        kept: how many checkpoints are kept.
    """

    name: str
    gpus: int
    checkpoint_gb: float
    is_moe: bool = False
    interval_minutes: float = 30.0
    days: float = 30.0
    gpu_hour_price: float = 4.40
    storage_gb_per_second: float = 5.0
    storage_price: float = 0.14
    kept: int = 96

    @property
    def saves(self) -> float:
        """Number of saves a month."""
        return self.days * 24 * 60 / self.interval_minutes


@dataclass(frozen=True)
class Codec:
    """What a codec does with a checkpoint.

    Attributes:
        name: for tables.
        ratio: uncompressed over stored size, of a dense model.
        gb_per_second: what it encodes; for each GPU if `per_gpu`, else for the whole job, as the post has it.
        per_gpu: whether each GPU adds to the rate.
        moe_ratio: of a mixture of experts; None if it is the same.
    """

    name: str
    ratio: float
    gb_per_second: float
    per_gpu: bool = False
    moe_ratio: float | None = None

    def ratio_of(self, job: Job) -> float:
        """Return the ratio of a job's checkpoints."""
        return self.moe_ratio if job.is_moe and self.moe_ratio is not None else self.ratio

    def rate_of(self, job: Job) -> float:
        """Return the rate of a job in GB a second."""
        return self.gb_per_second * (job.gpus if self.per_gpu else 1)


@dataclass(frozen=True)
class Costs:
    """What a month of checkpoints costs.

    Attributes:
        wait_seconds: time of a save.
        wait_hours: time of all saves of a month.
        idle_cost: price of the GPUs that wait.
        stored_gb: size of a checkpoint in the storage.
        storage_cost: price of those that are kept.
    """

    wait_seconds: float
    wait_hours: float
    idle_cost: float
    stored_gb: float
    storage_cost: float


@dataclass(frozen=True)
class Savings:
    """A job with a codec beside the same job without one.

    Attributes:
        job: the job.
        codec: the codec.
        plain: costs without compression.
        compressed: costs with it.
    """

    job: Job
    codec: Codec
    plain: Costs
    compressed: Costs

    @property
    def idle_savings(self) -> float:
        """What waits less, a month."""
        return self.plain.idle_cost - self.compressed.idle_cost

    @property
    def storage_savings(self) -> float:
        """What is stored less, a month."""
        return self.plain.storage_cost - self.compressed.storage_cost

    @property
    def total(self) -> float:
        """Both together; negative if compression costs more than it saves."""
        return self.idle_savings + self.storage_savings

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
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
    ratio, rate = codec.ratio_of(job), codec.rate_of(job)
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
    hours = wait * job.saves / _SECONDS_PER_HOUR
    return Costs(wait, hours, hours * job.gpus * job.gpu_hour_price, stored, stored * job.kept * job.storage_price)


PUBLISHED = (
    Codec("nvCOMP Zstd (published)", 1.14, 16.0, moe_ratio=1.15),
    Codec("nvCOMP gANS (published)", 1.18, 200.0, moe_ratio=1.18),
)
MEASURED = (
    Codec("DCP's zstd extension, 2 CPU cores a GPU", 1.142, 0.68, per_gpu=True),
    Codec("dcp_nvcomp auto, 2 CPU cores a GPU", 1.300, 1.31, per_gpu=True),
)
MODELS = (
    Job("Llama 3 8B", 8, 89),
    Job("Llama 3 70B", 8, 782),
    Job("Llama 3 70B", 64, 782),
    Job("Llama 3 405B", 128, 4529),
    Job("Mixtral 8x22B", 64, 1575, is_moe=True),
    Job("DeepSeek-V3 671B", 256, 7490, is_moe=True),
)


def table_of(jobs: Sequence[Job], codecs: Sequence[Codec]) -> list[Savings]:
    """Return what each codec saves each job."""
    return [savings(job, codec) for job in jobs for codec in codecs]
