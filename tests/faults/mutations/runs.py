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
        old="if step not in pinned)",
        new="if step >= 0)",
        tests="tests/runs/test_going_back.py -k rule_keeps",
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
        old="        copied_nbytes = self._copy(save.step, own)\n",
        new="        self._prune(save.step)\n        copied_nbytes = self._copy(save.step, own)\n",
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
        row="runs: a lease that has run out is watched",
        file="dcp_nvcomp/runs/lease.py",
        old="        if now != first:\n",
        new="        if False:\n",
        tests="tests/runs/test_lease.py -k clock_that_jumps",
    ),
    Mutation(
        row="runs: what is no lease takes no run away",
        file="dcp_nvcomp/runs/lease.py",
        old="            if holder is not None and holder.id != self._holder.id:\n",
        new="            if holder is None or holder.id != self._holder.id:\n",
        tests="tests/runs/test_lease.py -k takes_no_run_away",
    ),
    Mutation(
        row="runs: a fast tier of another user is refused",
        file="dcp_nvcomp/runs/tiers/fast.py",
        old="        own_directory(self.root)\n",
        new="",
        tests="tests/runs/test_trust.py -k refused",
    ),
    Mutation(
        row="runs: a step of another user counts as not there",
        file="dcp_nvcomp/runs/tiers/fast.py",
        old="        return fault is None\n",
        new="        return True\n",
        tests="tests/runs/test_trust.py -k another_user_counts",
    ),
    Mutation(
        row="runs: nothing is removed through a link",
        file="dcp_nvcomp/runs/removal.py",
        old="    filesystem.refuse_link()\n",
        new="",
        tests="tests/runs/test_trust.py -k removed_through",
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
        row="runs: a step that is newer than the durable tier is not removed to make room",
        file="dcp_nvcomp/runs/tiers/room.py",
        old="if step <= self._durable_step and",
        new="if",
        tests="tests/runs/test_out_of_order.py -k trouble_between_jobs",
    ),
    Mutation(
        row="runs: a due save that the fast tier lost is made up for",
        file="dcp_nvcomp/runs/agreement.py",
        old="failed, self.lost = agreed",
        new="failed, _ = agreed",
        tests="tests/runs/test_out_of_order.py -k made_up_for",
    ),
    Mutation(
        row="runs: a last save waits until the fast tier has it",
        file="dcp_nvcomp/runs/manager.py",
        old="if due and (is_last or not self._asynchronous):",
        new="if due and not self._asynchronous:",
        tests="tests/runs/test_out_of_order.py -k made_up_for",
    ),
    Mutation(
        row="runs: what a peer can't send is read from elsewhere",
        file="dcp_nvcomp/runs/restoring/fetch.py",
        old="        self.unread = tuple(outcomes[self._ranks.rank].unread)\n",
        new="",
        tests="tests/runs/test_out_of_order.py -k peers_copy",
    ),
    Mutation(
        row="runs: a signal during a save counts from the next call on",
        file="dcp_nvcomp/runs/agreement.py",
        old="self._follow([0, *known])",
        new="self._follow([_, *known])",
        tests="tests/runs/test_traps.py -k signal_during",
    ),
)
