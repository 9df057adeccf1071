"""What happens to a step on its way to the durable tier: upload, commit, and then steps go that nothing keeps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence

from dcp_nvcomp.errors import CheckpointError
from dcp_nvcomp.runs.events import StepsRemoved
from dcp_nvcomp.runs.keep import Keep, KeepRule, SavedStep
from dcp_nvcomp.runs.options import RunContext
from dcp_nvcomp.runs.own_files import REMOVING, Abandoned, write_kept
from dcp_nvcomp.runs.ranks import Ranks
from dcp_nvcomp.runs.step_save import StepSave
from dcp_nvcomp.runs.steps import RunSteps
from dcp_nvcomp.runs.tiers.durable import BEGUN
from dcp_nvcomp.runs.tiers.transfer import upload_files
from dcp_nvcomp.saving.commit import LastPublished, WrittenSave, commit_files

logger = logging.getLogger(__name__)


class DurableStage:
    """The durable tier's part of a manager's work in the background."""

    def __init__(self, ranks: Ranks, run: RunContext, there: RunSteps) -> None:
        self._ranks, self._durable, self._fast, self._rule = ranks, run.durable, run.fast, run.keep
        self._check_lease, self._emit = run.check_lease, run.emit
        self._rule_to_check = run.keep  # until something goes
        self._complete = {saved.step for saved in there.complete}
        self._abandoned = {saved.step for saved in there.abandoned}
        self._new: set[int] = set()  # not opened since they were saved

    def go_back(self, abandoned: Abandoned) -> None:
        known, left = self._abandoned | self._complete, abandoned.saves.keys()
        self._abandoned = (known & left) - abandoned.damaged
        self._complete = known - left

    def upload(self, save: StepSave, written: WrittenSave, senders: Mapping[str, int]) -> None:
        """Upload the files of a step as they are, and commit it; all ranks call this."""
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
        self._complete.add(save.step)
        self._abandoned.discard(save.step)
        self._new.add(save.step)

    def prune(self) -> None:
        """Remove what nothing keeps, on the first rank."""
        if not self._ranks.is_first:
            return
        try:
            self._check_lease()
            if self._rule is None:  # nothing can go, so nothing has to be listed
                self._write_kept()
            else:
                self._list_and_remove(self._rule)
        except CheckpointError as error:
            logger.warning("Old steps could not be removed, and will be at the next save: %s", error)
        except Exception as error:  # of a rule of the user's own
            logger.error("The rule that says what to keep raised %s: %s", type(error).__name__, error)

    def _write_kept(self) -> None:
        kept = {**dict.fromkeys(self._abandoned, ("abandoned",)), **dict.fromkeys(self._complete, ("all",))}
        write_kept(self._durable.open_own(), kept)
        with contextlib.suppress(CheckpointError):  # only lists take longer then
            for step in self._new:
                self._durable.problem_of(step)
        self._new.clear()
        self._durable.write_seen()

    def _list_and_remove(self, rule: Keep | KeepRule) -> None:
        """List the steps, as others may have removed or harmed some, and remove those that a rule does not keep."""
        found = self._durable.list()
        doomed = self._durable.decide(rule, found)
        if doomed.why:
            self._warn_of_missing_metrics(found.complete)
        self._durable.write_seen()
        write_kept(self._durable.open_own(), doomed.kept)
        removed = self._durable.remove({**dict.fromkeys(found.removing, BEGUN), **doomed.why})
        if removed.steps:
            self._emit(StepsRemoved(removed.steps, "durable"))

    def _warn_of_missing_metrics(self, complete: Sequence[SavedStep]) -> None:
        rule, self._rule_to_check = self._rule_to_check, None
        for metric in rule.missing_metrics(complete) if isinstance(rule, Keep) else ():
            logger.warning(
                "No step has the metric %r, by which keep= keeps the best ones: none is kept for it so far. Is that "
                "what metrics= of save calls it?",
                metric,
            )
