"""The protections of training runs."""

from __future__ import annotations

from tests.faults.mutations import Mutation

FAST_STAGE = "dcp_nvcomp/runs/behind/fast_stage.py"
REMOVAL = "dcp_nvcomp/runs/removal.py"
TRANSFER = "dcp_nvcomp/runs/tiers/transfer.py"
UPLOADS = "dcp_nvcomp/runs/tiers/uploads.py"
DURABLE = "dcp_nvcomp/runs/tiers/durable.py"

MUTATIONS = (
    Mutation(
        row="runs: of versions that are not whole on nodes the durable one is read",
        file="dcp_nvcomp/runs/restoring/candidates.py",
        old="(not one.is_complete_on_nodes, not one.is_durable)",
        new="(not one.is_complete_on_nodes, one.is_durable)",
        tests="tests/runs/replicas/test_traps.py -k durable_version",
    ),
    Mutation(
        row="runs: of replicas that differ all nodes read one version",
        file="dcp_nvcomp/runs/restoring/candidates.py",
        old="version.is_equal and self.is_equal",
        new="True",
        tests="tests/runs/replicas/test_traps.py -k differ",
    ),
    Mutation(
        row="runs: what replicas saved of a step is left behind together",
        file="dcp_nvcomp/runs/abandoned.py",
        old="replica_id in known",
        new="False",
        tests="tests/runs/replicas/test_traps.py -k away",
    ),
    Mutation(
        row="runs: a step is marked before it is removed",
        file=REMOVAL,
        old='    filesystem.publish(REMOVING, b"")\n',
        new="",
        tests="tests/runs/test_removal.py -k any_call",
    ),
    Mutation(
        row="runs: a save into a step that was being removed takes the mark away",
        file="dcp_nvcomp/runs/publishers.py",
        old="        filesystem.remove([REMOVING])  # of a removal that was cut short: what it left is replaced now\n",
        new="",
        tests="tests/runs/test_removal.py -k was_cut_short_stays",
    ),
    Mutation(
        row="runs: the newest step stays",
        file="dcp_nvcomp/runs/keep.py",
        old="    if steps and steps[-1].step not in found:\n",
        new="    if False:\n",
        tests="tests/runs/test_keep.py -k callable",
    ),
    Mutation(
        row="runs: pinned steps stay",
        file=DURABLE,
        old="for step in sorted(why) if step not in pinned}",
        new="for step in sorted(why)}",
        tests="tests/runs/test_removal_decisions.py -k dry_run",
    ),
    Mutation(
        row="runs: what is held is not removed",
        file=DURABLE,
        old="                if step in self._busy:\n",
        new="                if False:\n",
        tests="tests/runs/test_removal.py -k pinned_or_loaded",
    ),
    Mutation(
        row="runs: a piece that arrives wrong is noticed",
        file=TRANSFER,
        old="        if checksum(payload) != crc:\n",
        new="        if False:\n",
        tests="tests/runs/test_transfer.py -k wrong_piece",
    ),
    Mutation(
        row="runs: what can't be read at the sender is not taken for the file",
        file=TRANSFER,
        old="            crc = checksum(data[:-_CRC_NBYTES]) ^ 1  # the receiver must not take it for the file\n",
        new="            crc = checksum(data[:-_CRC_NBYTES])\n",
        tests="tests/runs/test_transfer.py -k cannot_be_read",
    ),
    Mutation(
        row="runs: a file that was cut short is uploaded again",
        file=UPLOADS,
        old="if there.get(name) != sizes[name]]",
        new="if name not in there]",
        tests="tests/runs/test_transfer.py -k cut_short",
    ),
    Mutation(
        row="runs: the fast tier is pruned only once copies are made",
        file=FAST_STAGE,
        old="            copied_nbytes = self._copy(save.step, own)\n",
        new="            self._prune(save.step)\n            copied_nbytes = self._copy(save.step, own)\n",
        tests="tests/runs/kills/test_found.py",
    ),
    Mutation(
        row="runs: what is on its way to the durable tier stays in the fast one",
        file=FAST_STAGE,
        old="self._complete[0], but=self._on_their_way.steps)",
        new="self._complete[0], but=())",
        tests="tests/runs/test_manager.py -k on_their_way",
    ),
    Mutation(
        row="runs: steps that were left behind are not restored",
        file="dcp_nvcomp/runs/restoring/run_restore.py",
        old="(not one.is_abandoned if step is None else one.step == step)",
        new="(True if step is None else one.step == step)",
        tests="tests/runs/test_going_back.py -k not_restored",
    ),
    Mutation(
        row="runs: a damaged copy is replaced by another one",
        file="dcp_nvcomp/runs/restoring/restore.py",
        old="            candidate = candidate.without(bad)\n",
        new="            return None, error\n",
        tests="tests/runs/test_tiers.py -k damaged_copy",
    ),
    Mutation(
        row="runs: a second manager is refused",
        file="dcp_nvcomp/runs/lease.py",
        old="            if held and not take_over:\n",
        new="            if False:\n",
        tests="tests/runs/test_lease.py -k second_manager",
    ),
    Mutation(
        row="runs: generators are set after all that draws",
        file="dcp_nvcomp/runs/state/training_state.py",
        old="        self._loader.state_dict()\n",
        new="",
        tests="tests/runs/state/test_training_state.py -k bit_identical",
    ),
    Mutation(
        row="runs: a restored place is not forgotten by an iterator that is dropped",
        file="dcp_nvcomp/runs/state/sampler.py",
        old="        if not self._is_placed:\n",
        new="        if True:\n",
        tests="tests/runs/state/test_sampler.py",
    ),
    Mutation(
        row="runs: metadata is read whole before a step counts",
        file="dcp_nvcomp/maintenance/completeness.py",
        old='            return _summary_alone(filesystem, f"{below}{name}", sizes), f"{name}: {error.message}"\n',
        new='            return _summary_alone(filesystem, f"{below}{name}", sizes), ""\n',
        tests="tests/runs/test_complete.py -k pushes_nothing_out",
    ),
    Mutation(
        row="runs: a step without one of its files does not count",
        file="dcp_nvcomp/maintenance/completeness.py",
        old='sizes.get(f"{below}{name}")\n',
        new='sizes.get(f"{below}{name}", file.nbytes if file else 1 << 62)\n',
        tests="tests/runs/test_complete.py -k pushes_nothing_out",
    ),
    Mutation(
        row="runs: a step is the one that its name says",
        file="dcp_nvcomp/maintenance/run_listing.py",
        old="        if saved is not None and promised is not None and saved != promised:\n",
        new="        if False:\n",
        tests="tests/runs/test_complete.py -k renamed_step_is_not",
    ),
    Mutation(
        row="runs: a step of the fast tier is the one that its name says",
        file="dcp_nvcomp/runs/tiers/fast.py",
        old="            if summary.step != step or summary.save_id != root.save_id:\n",
        new="            if False:\n",
        tests="tests/runs/test_complete.py -k renamed_step_of_the_fast",
    ),
    Mutation(
        row="runs: what was changed since it was seen complete is opened again",
        file="dcp_nvcomp/maintenance/seen.py",
        old="self._identities.get(folder) == identity",
        new="folder in self._identities",
        tests="tests/runs/test_complete.py -k opened_again",
    ),
    Mutation(
        row="runs: the newest step is opened before others go",
        file=DURABLE,
        old="            if not doomed.why or self._is_complete(complete[-1].step):\n",
        new="            if True:\n",
        tests="tests/runs/test_removal_decisions.py -k newest_is_opened",
    ),
    Mutation(
        row="runs: a durable copy that is not whole does not count as uploaded",
        file="dcp_nvcomp/runs/restoring/candidates.py",
        old="any(one.is_durable and not one.is_damaged for one in self.versions)",
        new="self.has_durable",
        tests="tests/runs/test_complete.py -k uploaded_again",
    ),
    Mutation(
        row="runs: steps only grow",
        file="dcp_nvcomp/runs/manager.py",
        old="            self._refuse_older(step)\n",
        new="",
        tests="tests/runs/test_going_back.py -k only_grow",
    ),
    Mutation(
        row="runs: a step whose clock was ahead makes no other old",
        file="dcp_nvcomp/runs/keep.py",
        old="                if steps[-1].seconds_since(step) < self._newer_than_seconds:\n",
        new="                if max(s.saved_seconds for s in steps) - step.saved_seconds < self._newer_than_seconds:\n",
        tests="tests/runs/test_clocks.py",
    ),
    Mutation(
        row="runs: of two saves of a step the one under the later lease is the later",
        file="dcp_nvcomp/runs/restoring/candidates.py",
        old="    return one.step, one.lease, one.run_seconds",
        new="    return one.step, 0, one.run_seconds",
        tests="tests/runs/test_clocks.py -k leases",
    ),
    Mutation(
        row="runs: a copy has an id of its own",
        file="dcp_nvcomp/runs/identity.py",
        old="                return there.file_nbytes(mark) is None\n",
        new="                return False\n",
        tests="tests/runs/test_run_identity.py -k copy_has",
    ),
    Mutation(
        row="runs: a run that is reached by another path is no copy",
        file="dcp_nvcomp/runs/identity.py",
        old="                return there.file_nbytes(mark) is None\n",
        new="                return True\n",
        tests="tests/runs/test_run_identity.py -k another_path",
    ),
)
