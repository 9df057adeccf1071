"""The planner of our own save calls: uses a plan that all ranks kept or have computed, or plans with another planner.

`agree` flattens the state, looks for a kept plan, and asks the other ranks whether they have it; if not, each rank
computes the plans of all, where their states can be described. If all ranks could, the other steps use that plan, with
an empty local plan; if one could not, DCP plans on all. What else fails on one rank is raised in DCP's first step,
which tells all ranks. A plan is kept only at `finish_plan`, so that what fails before leaves nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcp_nvcomp.calls.ranks import Call, meet
from dcp_nvcomp.calls.values import PLAIN_TENSORS, Path, flatten, is_default_planner, unwrapped
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.format.metadata.paths import merged_paths, paths_to_store, split_paths
from dcp_nvcomp.saving.encode.objects import serialized
from dcp_nvcomp.saving.plans.agreement import KeptPlan, PlanKey, Proposal, agree, gather_parts
from dcp_nvcomp.saving.plans.array_plan import ArrayPlan
from dcp_nvcomp.saving.plans.balance import balanced
from dcp_nvcomp.saving.plans.differences import Comparison, OnDifference, expect_same_kinds
from dcp_nvcomp.saving.plans.global_plan import GlobalPlan, PlanOfItems
from dcp_nvcomp.saving.plans.layouts import Ints, IrregularError
from dcp_nvcomp.saving.plans.meshes import on_some_ranks
from dcp_nvcomp.saving.plans.shared_plan import plan_all
from dcp_nvcomp.saving.plans.structure import Described, Part, Structure, described, structure_of
from dcp_nvcomp.saving.process_state import process_state

logger = logging.getLogger(__name__)


class KeepingPlanner(SavePlanner):
    def __init__(
        self,
        planner: SavePlanner | None,
        *,
        may_keep: bool,
        failure: CheckpointError | None = None,
        on_difference: OnDifference = "warn",
        derived: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._derived = derived
        self._planner: SavePlanner | None = planner or DefaultSavePlanner()
        self._is_default = is_default_planner(self._planner, DefaultSavePlanner)
        self._may_keep = may_keep and self._is_default
        self._failure = failure
        self._flat_state: dict[str, Any] | None = None
        self._paths: Mapping[str, Path] | None = None
        self._structure: Structure | None = None
        self._described: Described | None = None
        self._key = PlanKey(())
        self._kept: KeptPlan | None = None
        self._is_new = False  # True if it was made for this save
        self._plan_id: str | None = None
        self._everyones: GlobalPlan | None = None
        self._on_difference = on_difference
        self._run: Callable[[Callable[[], Any]], Any] = _here
        self._pickled: dict[str, io.BytesIO | Exception] = {}
        self.comparison = Comparison((), on_difference)

    @property
    def is_kept(self) -> bool:
        return self._plan_id is not None

    @property
    def kept_items(self) -> Sequence[WriteItem] | None:
        """What this rank writes, as soon as the ranks have agreed on a kept plan; None if there is none."""
        return None if self._kept is None else self._kept.final.items

    @property
    def _inner(self) -> SavePlanner:
        assert self._planner is not None, "the state is staged, or the save has failed"
        return self._planner

    def release(self) -> None:
        self._planner = self._flat_state = self._paths = None
        self._run, self._pickled = _here, {}

    def pickles_by(self, run: Callable[[Callable[[], Any]], Any]) -> None:
        """Have objects pickled by what runs a function on another thread, and returns what it does."""
        self._run = run

    def pickle_now(self, state_dict: Mapping[str, Any]) -> None:
        """Pickle the objects of a state on this thread, which others may not wait for later."""
        if not self._is_default or self._failure is not None:
            return
        with suppress(ConfigurationError):  # the save itself raises it
            for fqn, value in flatten(state_dict).values.items():
                if isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
                    continue
                try:
                    self._pickled[fqn] = serialized(value, whole=True)
                except Exception as error:
                    self._pickled[fqn] = error

    def agree(self, state_dict: dict[str, Any], group: dist.ProcessGroup | None, call: Call) -> None:
        ranks = () if group is None else tuple(dist.get_process_group_ranks(group))
        self.comparison = Comparison(ranks, self._on_difference)
        if self._is_default and self._failure is None:
            self._flatten(state_dict, is_coordinator=not ranks or dist.get_rank() == ranks[0])
        state = self._flat_state
        if state is not None:
            _look(lambda: self.comparison.look(state))
        found = None
        if self._may_keep and self._flat_state is not None:
            found = self._describe(ranks)
        may_keep = self._structure is not None
        mine = Proposal.of(None if found is None else found.plan_id, self._described, may_keep=may_keep)
        agreement = agree(mine, group, call)
        self._plan_id = agreement.plan_id
        if agreement.use_kept:
            self._kept = found
        elif self._plan_id is not None and agreement.all_described:
            assert self._described is not None
            gathered = gather_parts(self._described, agreement.proposals, group)
            if gathered is not None:
                rank = 0 if group is None else dist.get_rank(group)
                computed = self._computed(*gathered, agreement.proposals, rank)
                if all(meet(group, call, computed is not None)):
                    self._kept, self._is_new = computed, True
        if self._kept is not None and state is not None:
            shards = self._kept.compared_shards
            _look(lambda: self.comparison.look_at_shards(state, shards))

    def _computed(
        self, parts: Sequence[Part | bytes], parts_of: Ints, proposals: Sequence[Proposal], rank: int
    ) -> KeptPlan | None:
        """Return the plan that this rank makes for all; None if DCP has to plan, or can say better what is wrong."""
        assert self._plan_id is not None and self._structure is not None and self._flat_state is not None
        try:
            unpacked = [part if isinstance(part, Part) else Part.unpacked(part) for part in parts]
            shared = plan_all(
                unpacked,
                parts_of,
                [proposal.places for proposal in proposals],
                members=[proposal.members for proposal in proposals],
                lowest_rank=self._key.dedup_save_to_lowest_rank,
                derived=self._derived,
            )
            everyones = None
            if rank == 0:
                order = list(self._flat_state if self._paths is None else self._paths)
                everyones = ArrayPlan(shared, order, has_paths=self._paths is not None)
            final, keys, shards = shared.save_plan(rank), shared.compared_keys(rank), shared.compared_shards(rank)
        except (IrregularError, ConfigurationError) as error:
            logger.debug("DCP plans this save: %s", error)
            return None
        except Exception:  # a fault of ours must not cost the save
            logger.exception("This rank could not compute the plan of a save, so DCP plans it")
            return None
        return KeptPlan(self._plan_id, self._key, self._structure, self._described, final, keys, shards, everyones)

    def _flatten(self, state_dict: dict[str, Any], *, is_coordinator: bool) -> None:
        """Take the state apart, and let a planner have it that finds it flat."""
        given = self._inner
        assert isinstance(given, DefaultSavePlanner)
        # of our own: the caller's may serve several saves, and may keep plans in DCP's cache, which ignores dtypes
        planner = DefaultSavePlanner(
            flatten_state_dict=False,
            flatten_sharded_tensors=given.flatten_sharded_tensors,
            dedup_save_to_lowest_rank=given.dedup_save_to_lowest_rank,
        )
        dicts: dict[str, Any] = {}
        try:
            if given.flatten_state_dict:
                flat = flatten(state_dict)
                state_dict, planner.mappings = flat.values, paths_to_store(flat.paths)
                self._paths = flat.paths
            # dicts are values now, empty ones for instance, and DCP would make text of their keys
            dicts = {fqn: value for fqn, value in state_dict.items() if isinstance(value, Mapping)}
            state_dict = {fqn: value for fqn, value in state_dict.items() if fqn not in dicts}
            planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
            planner.state_dict |= dicts
        except CheckpointError as error:  # DCP's first step raises it, and tells the other ranks
            self._failure = error
        except RecursionError:
            self._failure = ConfigurationError(
                "The state is nested too deeply, or contains itself, so it can't be saved: flatten it, or save parts "
                "of it."
            )
        else:
            planner.flatten_state_dict = given.flatten_state_dict  # its plans have the paths
            self._planner, self._flat_state = planner, planner.state_dict

    def _describe(self, ranks: tuple[int, ...]) -> KeptPlan | None:
        """Describe the state, and return the plan that is kept for such a one."""
        planner = self._inner
        assert isinstance(planner, DefaultSavePlanner)
        self._key = PlanKey(
            ranks,
            planner.flatten_state_dict,
            planner.flatten_sharded_tensors,
            planner.dedup_save_to_lowest_rank,
            tuple(self._derived.items()),
        )
        try:
            self._structure = structure_of(planner.state_dict, self._paths)
        except Exception:  # DCP's own steps meet it again, and tell the other ranks
            return None
        if self._structure is None:
            return None
        found = process_state().plans.find(self._key, self._structure)
        if found is not None:
            self._described = found.described
            return found
        with suppress(Exception):  # then DCP plans
            found_now = described(self._structure, planner.state_dict)
            if found_now is not None and all(part.digest for part in found_now.parts):  # which takes memory, too
                self._described = found_now
        return None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        if self._failure is not None:
            raise self._failure
        if self._kept is not None or self._flat_state is not None:  # with a kept plan it may be staged already
            return
        state_dict = unwrapped(state_dict)
        if "storage_meta" in inspect.signature(self._inner.set_up_planner).parameters:
            self._inner.set_up_planner(state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator)
        else:  # as planners were before there was such an argument; DCP still takes them
            self._inner.set_up_planner(state_dict, is_coordinator)  # type: ignore[arg-type]

    def create_local_plan(self) -> SavePlan:
        if self._kept is not None:
            return self.comparison.sent(SavePlan([]), self._kept.compared_keys)
        plan, state = self._inner.create_local_plan(), self._flat_state
        ranks = self.comparison.ranks
        if state is not None and len(ranks) > 1:
            _look(lambda: self.comparison.look_at_shards(state, on_some_ranks(plan, state, ranks)))
        return self.comparison.sent(plan, None)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self._kept is not None:
            assert self._kept.everyones is not None, "each rank is the coordinator of all its saves, or of none"
            kept = self._kept.everyones
            plans, _ = self.comparison.compared(
                all_plans, kept.compared_keys, kept.place_warning, kept.differing_shards
            )
            return self.comparison.told(plans), kept.metadata()
        if self._is_default:
            expect_same_kinds(all_plans, self.comparison.ranks)
        local_plans, keys = self.comparison.compared(all_plans, None, None if self._is_default else "")
        paths = [plan.planner_data or {} for plan in local_plans] if self._is_default else []
        if self._is_default:  # DCP would merge them too, and know nothing of keys
            local_plans = [dataclasses.replace(plan, planner_data={}) for plan in local_plans]
            assert isinstance(self._inner, DefaultSavePlanner)
            if not self._inner.dedup_save_to_lowest_rank:
                local_plans = balanced(local_plans, self._derived)
        plans, metadata = self._inner.create_global_plan(local_plans)
        if self._is_default and metadata.planner_data is not None:
            fqns = metadata.state_dict_metadata
            merged = merged_paths([split_paths(part, fqns) for part in paths], fqns)
            metadata = dataclasses.replace(metadata, planner_data=merged)
        if self.is_kept:
            self._everyones = PlanOfItems(
                plans, metadata, keys, self.comparison.place_warning, self.comparison.everyones_shards
            )
            metadata = self._everyones.metadata()
        return self.comparison.told(plans), metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        new_plan = self.comparison.received(new_plan)
        if self._kept is not None:
            if self._is_new:
                process_state().plans.keep(self._kept)
            return dataclasses.replace(self._kept.final, storage_data=new_plan.storage_data)
        plan = self._inner.finish_plan(new_plan)
        if self._plan_id is not None and self._structure is not None:
            own, shards = self.comparison.own_keys, self.comparison.own_shards
            process_state().plans.keep(
                KeptPlan(self._plan_id, self._key, self._structure, None, plan, own, shards, self._everyones)
            )
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | Any:
        if self._flat_state is not None and write_item.type == WriteItemType.TENSOR:
            found = self._flat_state.get(write_item.index.fqn)
            if type(found) in PLAIN_TENSORS:  # as the default planner finds it, in a tenth of the time
                return found
        if write_item.type != WriteItemType.BYTE_IO:
            return self._inner.resolve_data(write_item)
        if self._flat_state is None:
            return self._run(lambda: self._inner.resolve_data(write_item))
        fqn = write_item.index.fqn
        value = self._flat_state[fqn]
        try:
            # kept until the state is released: if a copy fails it is asked for again, when the value is another one
            pickled = self._pickled.get(fqn) or self._run(lambda: serialized(value, whole=True))
            if isinstance(pickled, Exception):
                raise pickled
        except ConfigurationError as error:  # of what lies in it
            error.fqn = fqn
            raise
        except Exception as error:  # pickle lets through whatever an object's own methods raise
            raise CheckpointError(
                f"This value can't be pickled, so it can't be saved: {type(error).__name__}: {error}", fqn=fqn
            ) from error
        return pickled


def _here(do: Callable[[], Any]) -> Any:
    return do()


def _look(look: Callable[[], None]) -> None:
    """Look at values: whatever their own methods raise, that must not cost the save."""
    try:
        look()
    except Exception as error:
        logger.warning("Values of ranks are not compared: %s: %s", type(error).__name__, error)
