"""What an operator does with a run: remove the steps that nothing keeps, pin one, list why the others are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_nvcomp.errors import CheckpointNotFoundError, ConfigurationError
from dcp_nvcomp.format.recognition import refused
from dcp_nvcomp.maintenance.opening import checked_storage_options, opened
from dcp_nvcomp.options import check_path
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.runs.own_files import pin, pinned_steps, read_kept, unpin
from dcp_nvcomp.runs.retention import Keep, KeepRule, SavedStep
from dcp_nvcomp.runs.steps import StepNames
from dcp_nvcomp.runs.tiers.durable import BEGUN, DurableTier


@dataclass(frozen=True)
class Pruning:
    """Result of `prune_run`.

    Attributes:
        path: the run.
        dry_run: True if nothing was removed.
        removed: the steps that were removed, or would be.
        kept: why each of the others is kept.
        failed: why steps could not be removed, by step; call again.
        why: why each of the removed steps went, or would.
    """

    path: str
    dry_run: bool
    removed: tuple[SavedStep, ...]
    kept: Mapping[int, tuple[str, ...]]
    failed: Mapping[int, str]
    why: Mapping[int, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of the removed steps together."""
        return sum(saved.nbytes for saved in self.removed)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added; `schema` changes if one must go."""
        return {
            "schema": 1,
            "run": self.path,
            "dry_run": self.dry_run,
            "nbytes": self.nbytes,
            "removed": [
                {"step": saved.step, "nbytes": saved.nbytes, "reason": self.why.get(saved.step, "")}
                for saved in self.removed
            ],
            "kept": [{"step": step, "reasons": list(reasons)} for step, reasons in sorted(self.kept.items())],
            "failed": [{"step": step, "error": error} for step, error in sorted(self.failed.items())],
        }


def prune_run(
    path: str | os.PathLike[str],
    keep: Keep | KeepRule,
    *,
    dry_run: bool = False,
    step_template: str = "step-{step}",
    storage_options: Mapping[str, Any] | None = None,
) -> Pruning:
    """Remove the steps of a run that a rule does not keep; never the newest complete one, nor what is pinned.

    The newest step is opened before others go, and so is each that was not seen complete before. What is left of
    removals that were cut short goes too. It may run beside a job that saves to the run, and a step that the job has
    saved again since it was listed stays. It may not run beside a job that restores an older step from the run, or is
    saving a step again that no rule keeps, unless that is pinned.

    Args:
        path: path or URL of the run.
        keep: says which steps are kept.
        dry_run: only report what would be removed.
        step_template: name of a step's directory.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Returns:
        What was removed, and why the rest is kept.

    Raises:
        ConfigurationError: an option is unknown or can't work, or steps would go while none has a
            metric by which the best are kept.
        CheckpointNotFoundError: the run has no complete step, and nothing that a removal left.
        StorageError: the storage fails.

    Examples:
        >>> import tempfile, torch, dcp_nvcomp
        >>> run = tempfile.mkdtemp()
        >>> for step in (1, 2, 3):
        ...     _ = dcp_nvcomp.save({"w": torch.zeros(3)}, f"{run}/step-{step}", no_dist=True)
        >>> [saved.step for saved in dcp_nvcomp.runs.prune_run(run, dcp_nvcomp.Keep(last=1)).removed]
        [1, 2]
    """
    durable = _durable(path, step_template, storage_options)
    found = durable.list()
    if not found.complete and not found.removing:
        with opened(path, storage_options) as filesystem:
            other = refused(filesystem, "the directory of a run", but=["run"])
        raise other or CheckpointNotFoundError(
            "There is no complete step in this run.", path=without_secrets(durable.root)
        )
    doomed = durable.decide(keep, found)
    missing = keep.missing_metrics(found.complete) if doomed.steps and isinstance(keep, Keep) else ()
    if missing:
        there = ", ".join(sorted({name for saved in found.complete for name in saved.metrics})) or "none"
        raise ConfigurationError(
            f"No step has the metric {missing[0]!r}, by which the best were to be kept; nothing was removed. Metrics "
            f"that steps have: {there}.",
            path=without_secrets(durable.root),
        )
    by_step = {saved.step: saved for saved in (*found.complete, *found.abandoned)}
    failed: dict[int, str] = {}
    kept: Mapping[int, tuple[str, ...]] = doomed.kept
    why = {**dict.fromkeys(found.removing, BEGUN), **doomed.why}
    if dry_run:
        gone = tuple(sorted(why.keys() - pinned_steps(durable.open_own())))
    else:
        durable.write_seen()
        removed = durable.remove(why, {step: saved.save_id for step, saved in by_step.items()})
        gone, failed = removed.steps, {step: str(error) for step, error in removed.failed.items()}
        since = dict.fromkeys(why.keys() - set(gone) - failed.keys(), ("pinned, shared or saved again meanwhile",))
        kept = {**doomed.kept, **since}
    return Pruning(
        without_secrets(durable.root),
        dry_run,
        tuple(by_step.get(step, SavedStep(step, 0.0)) for step in gone),
        kept,
        failed,
        {step: why[step] for step in gone},
    )


def pin_step(
    path: str | os.PathLike[str],
    step: int,
    *,
    step_template: str = "step-{step}",
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Keep a step, whatever a manager's rule says, until it is unpinned.

    Args:
        path: path or URL of the run.
        step: the step.
        step_template: name of a step's directory.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Raises:
        ConfigurationError: an option is unknown or can't work.
        CheckpointNotFoundError: there is no complete checkpoint of this step.
        StorageError: the storage fails.
    """
    durable = _durable(path, step_template, storage_options)
    pin(durable.open_own(), durable.open(step), step, lambda: durable.problem_of(step))


def unpin_step(path: str | os.PathLike[str], step: int, *, storage_options: Mapping[str, Any] | None = None) -> None:
    """Let a pinned step go again; one that is not pinned is fine.

    Args:
        path: path or URL of the run.
        step: the step.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.

    Raises:
        ConfigurationError: an option is unknown or can't work.
        StorageError: the storage fails.
    """
    unpin(_durable(path, StepNames().template, storage_options).open_own(), step)


def reasons_of(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> dict[int, tuple[str, ...]]:
    """Return why steps of a run are kept: as its manager last decided, and what is pinned."""
    own = _durable(path, StepNames().template, storage_options).open_own()
    found = read_kept(own)
    for step in pinned_steps(own):
        found[step] = (*(reason for reason in found.get(step, ()) if reason != "pinned"), "pinned")
    return found


def _durable(
    path: str | os.PathLike[str], step_template: str, storage_options: Mapping[str, Any] | None
) -> DurableTier:
    return DurableTier(check_path(path), StepNames(step_template), checked_storage_options(storage_options))
