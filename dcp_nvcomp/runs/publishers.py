"""How the saves of a run are published: with their step and metrics, at once or on each node first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.format.metadata.summary import LEASE, REPLICA, RUN_SECONDS, Summary
from dcp_nvcomp.format.names import METADATA_NAME
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.runs.removal import REMOVING
from dcp_nvcomp.runs.tiers.fast import TO_UPLOAD
from dcp_nvcomp.saving.commit import FinishedSave, WrittenSave, commit_checkpoint, data_files, to_publish
from dcp_nvcomp.storage.base import Filesystem

_WORST_SUMMARY = Summary(
    *("0" * 32, 1.0e10 / 3, 10**7, 10**9, 10**18, 10**18, "0" * 32),
    more={TO_UPLOAD: True, REPLICA: "0" * 32, RUN_SECONDS: 1.0e10 / 3, LEASE: 10**12},
)


def check_metrics(step: int, metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return the metrics of a step as plain numbers."""
    found = {}
    for name, value in (metrics or {}).items():
        try:
            number = float(value.detach() if isinstance(value, torch.Tensor) else value)
        except (TypeError, ValueError, RuntimeError) as error:  # the last for a tensor of several elements
            raise ConfigurationError(f"metrics[{name!r}]={value!r} is not a number.") from error
        if not isinstance(name, str):
            raise ConfigurationError(f"The names of metrics are text, and {name!r} is not.")
        found[name] = number
    if dataclasses.replace(_WORST_SUMMARY, step=step, metrics=found).to_text() is None:
        raise ConfigurationError(f"metrics={list(found)!r} are too many for a checkpoint's summary of 4 KB.")
    return found


@dataclass
class StepPublisher:
    """Publishes a save as a step, by the plain commit."""

    step: int
    metrics: Mapping[str, float]
    check_lease: Callable[[], None] = lambda: None
    more: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, filesystem: Filesystem, save: FinishedSave) -> None:
        """Publish a save; raises what `commit_checkpoint` does, and RunInUseError if another manager has the run."""
        self.check_lease()
        filesystem.remove([REMOVING])  # of a removal that was cut short: what it left is replaced now
        commit_checkpoint(filesystem, self.named(save))

    def named(self, save: FinishedSave) -> FinishedSave:
        """Return the save with step, metrics and the rest in its summary."""
        more = {**save.summary.more, **self.more}
        summary = dataclasses.replace(save.summary, step=self.step, metrics=dict(self.metrics), more=more)
        return dataclasses.replace(save, summary=summary)


@dataclass
class NodePublisher(StepPublisher):
    """Publishes a save on the coordinator's node, and holds what the other nodes publish.

    The coordinator sees its own node's files only. That all ranks have written theirs is what it was told before it
    publishes, as in every save.

    Attributes:
        written: what to publish on each node; None until it was published here.
    """

    durable_path: str = ""
    upload: bool = False
    replica_id: str = ""
    written: WrittenSave | None = field(default=None)

    def __call__(self, filesystem: Filesystem, save: FinishedSave) -> None:
        """Publish a save on this node."""
        named = self.named(save)
        more = {**named.summary.more}
        if self.upload:
            more[TO_UPLOAD] = True
        if self.replica_id:
            more[REPLICA] = self.replica_id
        named = dataclasses.replace(named, summary=dataclasses.replace(named.summary, more=more))
        assert named.metadata.storage_meta is not None
        named.metadata.storage_meta.checkpoint_id = without_secrets(self.durable_path)
        data = to_publish(named.metadata, filesystem.location(METADATA_NAME), named.summary)
        filesystem.remove([REMOVING])
        filesystem.publish(METADATA_NAME, data)
        self.written = WrittenSave(data, save.save_id, data_files(save.metadata), ())
