"""Loads on several ranks: plans stay where they are made, and what no rank has a place for is warned of once."""

from __future__ import annotations

import importlib
import os
import pickle
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.utils import _DistWrapper

from dcp_nvcomp import NvcompReader, errors, load, save
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.checkpoints import save as save_one
from tests.checkpoints import save_stock
from tests.states import State, assert_same, blank

from .jobs import sharded
from .launch import RankPool


class _Wire:
    """Measures what a rank sends to the coordinator, and what comes back to each."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.returned: list[int] = []
        gather, scatter = _DistWrapper.gather_object, _DistWrapper.scatter_object

        def gather_object(wrapper: Any, sent: Any) -> Any:
            self.sent.append(len(pickle.dumps(sent)))
            return gather(wrapper, sent)

        def scatter_object(wrapper: Any, objects: Any) -> Any:
            if objects is not None:
                self.returned += [len(pickle.dumps(one)) for one in objects]
            return scatter(wrapper, objects)

        self.measuring = patch.multiple(_DistWrapper, gather_object=gather_object, scatter_object=scatter_object)


def _shards(state: State) -> State:
    return {key: value.to_local() for key, value in state.items()}


def _many(path: Path) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(1)
    full = {f"layers.{number}.weight": torch.randn(8, 4, generator=generator) for number in range(300)}
    state = {"model": sharded(full), "step": 3}
    save(state, path)
    into, wire = {"model": sharded(blank(full)), "step": 0}, _Wire()
    with wire.measuring:
        load(into, path)
    assert into["step"] == 3
    assert_same(_shards(into["model"]), _shards(state["model"]))
    return wire.sent, wire.returned


def test_plans_do_not_travel(ranks: RankPool, tmp_path: Path) -> None:
    for sent, returned in ranks.run(_many, tmp_path):
        assert sent and max(sent) <= 1000
        assert max(returned, default=0) <= 1000


class _Own(DefaultLoadPlanner):
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        assert all(plan.items for plan in global_plan), "it may change the plans of all ranks"
        return super().create_global_plan(global_plan)


def _own_planner(path: Path) -> None:
    full = {"w": torch.arange(32.0).reshape(8, 4)}
    save(sharded(full), path)
    into = sharded(blank(full))
    load(into, path, planner=_Own())
    assert_same(_shards(into), _shards(sharded(full)))


def test_plans_of_another_planner_do(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_own_planner, tmp_path, world_size=2)


def _stages(path: Path) -> tuple[list[str], State]:
    """Load the layers of one rank each, as stages of a pipeline have them."""
    rank, full = dist.get_rank(), {f"w{number}": torch.full((3,), float(number)) for number in range(5)}
    save({"model": full, "other": {"x": 1}}, path)
    own = {f"w{rank}": torch.zeros(3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load({"model": own}, path)
    return [str(one.message) for one in caught if one.category is UserWarning], own


def test_what_another_rank_has_a_place_for_is_not_left(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(_stages, tmp_path)
    for rank, (_, own) in enumerate(told):
        assert_same(own, {f"w{rank}": torch.full((3,), float(rank))})
    (message,) = told[0][0]
    assert "1 saved value(s) were not loaded" in message and "'model.w4'" in message
    assert not any(messages for messages, _ in told[1:])


def _complete_stages(path: Path) -> list[str]:
    full = {f"w{number}": torch.full((3,), float(number)) for number in range(dist.get_world_size())}
    save({"model": full}, path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load({"model": {f"w{dist.get_rank()}": torch.zeros(3)}}, path)
    return [str(one.message) for one in caught if one.category is UserWarning]


def test_all_stages_together_leave_nothing(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(_complete_stages, tmp_path) == [[]] * 4


def _reads(path: Path, other: Path) -> list[str]:
    """Load several times; return each file named metadata that this rank read."""
    save({"w": torch.ones(4), "object": {"a": 1}}, path)
    save({"w": torch.full((4,), 2.0)}, other)
    found, read_all = [], PosixFilesystem.read_all

    def reading(filesystem: PosixFilesystem, name: str, **options: Any) -> bytes:
        found.append(f"{Path(filesystem.path).name}/{name}")
        return read_all(filesystem, name, **options)

    reader = NvcompReader(path)
    with patch.object(PosixFilesystem, "read_all", reading):
        for place, value in ((path, 1.0), (other, 2.0), (path, 1.0)):  # with one reader
            into = {"w": torch.zeros(4)}
            load(into, place, storage_reader=reader)
            assert_same(into, {"w": torch.full((4,), value)})
    return found


def test_one_rank_reads_the_metadata(ranks: RankPool, tmp_path: Path) -> None:
    first, *others = ranks.run(_reads, tmp_path / "a", tmp_path / "b")
    assert first == ["a/.metadata", "b/.metadata", "a/.metadata"]
    assert others == [[]] * 3


def _load_from(url: str, options: dict[str, Any]) -> None:
    into = {"w": torch.zeros(4)}
    load(into, url, **options)
    assert_same(into, {"w": torch.ones(4)})


def test_metadata_is_fetched_once_a_job(
    ranks: RankPool, s3_store: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moto.s3.responses import S3Response

    get, fetched = S3Response.get_object, list[str]()

    def counted(response: Any) -> Any:
        fetched.append(response.parse_key_name().rpartition("/")[2])
        return get(response)

    monkeypatch.setattr(S3Response, "get_object", counted)
    url, options = s3_store
    save({"w": torch.ones(4)}, url, no_dist=True, **options)
    fetched.clear()
    ranks.run(_load_from, url, options)
    assert fetched.count(".metadata") == 1, fetched
    assert len([name for name in fetched if name.endswith(".distcp")]) == 2 * 4, "each rank reads a footer and its data"


def _own_disks(path: Path, by: Any) -> str:
    """Load where each rank finds another checkpoint at the place that all of them name."""
    own = path / str(dist.get_rank())
    by(own, {"w": torch.full((4,), float(dist.get_rank()))})
    os.chdir(own)
    try:
        # as if each node had its own disk there
        with patch.object(importlib.import_module("dcp_nvcomp.loading.load"), "real_place", lambda path: "/data"):
            load({"w": torch.zeros(4)}, ".")
    except errors.CheckpointReplacedError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("by", [save_one, save_stock], ids=["ours", "stock"])
def test_disks_that_nodes_do_not_share(ranks: RankPool, tmp_path: Path, by: Any) -> None:
    """Data files of stock DCP have the same names everywhere: another rank's metadata would fit them, and be wrong."""
    told = ranks.run(_own_disks, tmp_path, by, world_size=2)
    assert all("Another save replaced the checkpoint" in one for one in told), told


def _damaged(path: Path) -> str:
    save({"w": torch.ones(4)}, path)
    if dist.get_rank() == 0:
        (path / ".metadata").write_bytes(b"no pickle")
    dist.barrier()
    try:
        load({"w": torch.zeros(4)}, path)
    except errors.MetadataError as error:
        return str(error)
    return "loaded"


def test_metadata_that_is_damaged(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(_damaged, tmp_path)
    assert len(set(told)) == 1 and "recover" in told[0]


def _two_paths(path: Path) -> tuple[str, torch.Tensor]:
    rank, into = dist.get_rank(), {"w": torch.zeros(4)}
    save_one(path / str(rank), {"w": torch.ones(4)})
    dist.barrier()
    try:
        load(into, path / str(rank))
    except errors.ConfigurationError as error:
        return str(error), into["w"]
    return "loaded", into["w"]


def test_ranks_that_load_from_two_paths(ranks: RankPool, tmp_path: Path) -> None:
    for said, loaded in ranks.run(_two_paths, tmp_path, world_size=2):
        assert "The ranks load different checkpoints" in said
        assert not loaded.any(), "nothing is loaded"


class _Noting:
    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"x": torch.zeros(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def _warnings_are_errors(path: Path) -> str:
    save({"model": {"a": torch.ones(2), "b": torch.ones(2)}, "s": _Noting()}, path)
    noting = _Noting()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            load({"model": {"a": torch.zeros(2)}, "s": noting}, path)
        except UserWarning as warning:
            assert noting.loaded.keys() == {"x"}
            return str(warning)
    return "loaded"


def test_a_warning_that_is_an_error_is_one_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(_warnings_are_errors, tmp_path, world_size=2)
    assert "'model.b'" in told[0] and told == told[:1] * 2


class _Looking(NvcompReader):
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert plan.items
        return super().prepare_local_plan(plan)


def _own_reader(path: Path) -> None:
    full = {"w": torch.arange(32.0).reshape(8, 4)}
    save(sharded(full), path)
    into = sharded(blank(full))
    load(into, storage_reader=_Looking(path) if dist.get_rank() == 1 else NvcompReader(path))
    assert_same(_shards(into), _shards(sharded(full)))


def test_plans_travel_if_a_reader_may_look_at_them(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(_own_reader, tmp_path, world_size=2)
