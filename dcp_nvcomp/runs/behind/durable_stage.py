"""What happens to a step on its way to the durable tier: upload, commit, and then steps go that nothing keeps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.runs.abandoned import Abandoned
from dcp_nvcomp.runs.events import Event, StepsRemoved
from dcp_nvcomp.runs.keep import Keep, KeepRule, SavedStep
from dcp_nvcomp.runs.kept import write_kept
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.runs.removal import REMOVING
from dcp_nvcomp.runs.step_save import StepSave
from dcp_nvcomp.runs.steps import RunSteps
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.runs.tiers.uploads import upload_files
from dcp_nvcomp.saving.commit import WrittenSave, commit_files
from dcp_nvcomp.saving.published import LastPublished

__all__ = ["DurableStage"]

logger = logging.getLogger(__name__)


class DurableStage:
    """The durable tier's part of a manager's work behind training.

    Args:
        ranks: the ranks.
        durable: the durable tier.
        fast: this node's fast tier, from which files are uploaded, if there is one.
        rule: what is kept.
        there: the steps of the durable tier; only the first rank's count.
        check_lease: raises if another manager has taken the run over; asked before the durable tier is changed.
        tell: called with each event.
    """

    def __init__(
        self,
        ranks: Ranks,
        durable: DurableTier,
        fast: FastTier | None,
        rule: Keep | KeepRule | None,
        there: RunSteps,
        *,
        check_lease: Callable[[], None],
        tell: Callable[[Event], None],
    ) -> None:
        self._ranks, self._durable, self._fast, self._rule = ranks, durable, fast, rule
        self._check_lease, self._tell = check_lease, tell
        self._rule_to_check: Keep | KeepRule | None = rule  # until something goes
        self._complete = {saved.step: saved for saved in there.complete}
        self._abandoned = {saved.step: saved for saved in there.abandoned}
        self._leftover: set[int] = set()  # what could not be removed

    def go_back(self, abandoned: Abandoned) -> None:
        """Leave saves behind.

        Args:
            abandoned: the saves; all others that are there are the run's.
        """
        known = {**self._abandoned, **self._complete}
        left = abandoned.saves.keys()
        self._abandoned = {step: known[step] for step in known.keys() & left if step not in abandoned.damaged}
        self._complete = {step: saved for step, saved in known.items() if step not in left}

    def upload(self, save: StepSave, written: WrittenSave, senders: Mapping[str, int]) -> None:
        """Upload the files of a step as they are, and commit it; all ranks call this.

        Args:
            save: the save.
            written: what to publish.
            senders: the rank that sends each file.
        """
        sent_nbytes = self._ranks.together(lambda: self._send(save.step, written, senders))
        self._ranks.on_one(lambda: self._commit(save.step, written))
        save.reached("durable", uploaded_nbytes=sent_nbytes)
        self.note(save)

    def _send(self, step: int, written: WrittenSave, senders: Mapping[str, int]) -> int:
        assert self._fast is not None
        own = [name for name, rank in senders.items() if rank == self._ranks.rank]
        return upload_files(self._fast.open(step), self._durable.open(step), own, written.files) if own else 0

    def _commit(self, step: int, written: WrittenSave) -> None:
        self._check_lease()
        filesystem = self._durable.open(step)
        filesystem.remove([REMOVING])
        commit_files(filesystem, written, LastPublished(), overwrite=True)

    def note(self, save: StepSave) -> None:
        """Note that a step is there."""
        self._complete[save.step] = SavedStep(save.step, time.time(), save.metrics)
        self._abandoned.pop(save.step, None)
        self._leftover.discard(save.step)

    def prune(self) -> None:
        """Remove what nothing keeps, on the first rank."""
        if not self._ranks.is_first:
            return
        try:
            self._check_lease()
            doomed = self._durable.doomed(self._rule, self._complete.values(), self._abandoned.values())
            if doomed.steps:
                self._warn_of_missing_metrics()
            write_kept(self._durable.open_own(), doomed.kept)
            removed = self._durable.remove({*doomed.steps, *self._leftover})
        except CheckpointError as error:
            logger.warning("Old steps could not be removed, and will be at the next save: %s", error)
            return
        except Exception as error:  # of a rule of the user's own
            logger.error("The rule that says what to keep raised %s: %s", type(error).__name__, error)
            return
        self._leftover = set(removed.failed)
        for step in (*removed.steps, *removed.failed):
            self._complete.pop(step, None)
            self._abandoned.pop(step, None)
        if removed.steps:
            self._tell(StepsRemoved(removed.steps, "durable"))

    def _warn_of_missing_metrics(self) -> None:
        rule, self._rule_to_check = self._rule_to_check, None
        for metric in rule.missing_metrics(list(self._complete.values())) if isinstance(rule, Keep) else ():
            logger.warning(
                "No step has the metric %r, by which keep= keeps the best ones: none is kept for it so far. Is that "
                "what metrics= of save calls it?",
                metric,
            )
