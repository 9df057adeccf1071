"""`save` plans once for states of one structure, and nothing of an earlier state shows in a later checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_nvcomp import NvcompReader, NvcompWriter, SaveStats, async_save, errors, open_checkpoint, save
from dcp_nvcomp.saving.plans import planner as planner_module
from dcp_nvcomp.saving.plans.shared_plan import SharedPlan
from dcp_nvcomp.saving.process_state import forget_all, process_state
from tests.checkpoints import assert_loads
from tests.checkpoints import save as dcp_save
from tests.conformance.sabotage import Sabotage
from tests.states import State, small_state


@contextmanager
def planning() -> Iterator[list[Any]]:
    """Collect the plans that are made here: by DCP's planner, and computed."""
    found: list[Any] = []
    plan, compute = DefaultSavePlanner.create_local_plan, planner_module.plan_all

    def noted(planner: DefaultSavePlanner) -> SavePlan:
        found.append(plan(planner))
        return found[-1]  # type: ignore[no-any-return]

    def computed(*arguments: Any, **options: Any) -> SharedPlan:
        found.append(compute(*arguments, **options))
        return found[-1]  # type: ignore[no-any-return]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultSavePlanner, "create_local_plan", noted)
        patch.setattr(planner_module, "plan_all", computed)
        yield found


@pytest.fixture
def planned() -> Iterator[list[Any]]:
    with planning() as found:
        yield found


def put(state: State, path: Path, **options: Any) -> None:
    save(state, path, no_dist=True, **options)


def seen(path: Path) -> Metadata:
    return NvcompReader(path).read_metadata()


def places(metadata: Metadata) -> dict[Any, Any]:
    """The rank and the number of the file that each item is in."""
    return {
        (index.fqn, index.offset, index.index): file[0].split("_", 3)[:3]
        for index, (file, _) in metadata.storage_data.items()
    }


def assert_like_dcp(path: Path, state: State, beside: Path, **options: Any) -> None:
    """Fail unless the checkpoint is that of `dcp.save`."""
    assert_loads(path, state)
    dcp_save(beside, state, **options)
    mine, theirs = seen(path), seen(beside)
    assert list(mine.state_dict_metadata) == list(theirs.state_dict_metadata)
    assert mine.state_dict_metadata == theirs.state_dict_metadata
    assert mine.planner_data == {**theirs.planner_data, ".keys": ()}  # none of them is anything but text
    assert places(mine) == places(theirs)


# --- one structure ---------------------------------------------------------------------------------------------------


def test_states_of_one_structure_are_planned_once(tmp_path: Path, planned: list[Any]) -> None:
    for seed in range(4):  # each with a writer of its own
        state = {"model": small_state(seed), "list": [torch.full((2, 3), seed), "text"], "empty": torch.empty(0, 2)}
        put(state, tmp_path / str(seed))
        assert_like_dcp(tmp_path / str(seed), state, tmp_path / "dcp")
        assert len(planned) == 1 + seed + 1  # those of dcp.save are counted too


def test_save_and_async_save_share_plans(tmp_path: Path, planned: list[Any]) -> None:
    put(small_state(1), tmp_path)
    async_save(small_state(2), tmp_path, no_dist=True).upload_completion.result()
    assert_loads(tmp_path, small_state(2))
    put(small_state(3), tmp_path)
    assert_loads(tmp_path, small_state(3))
    assert len(planned) == 1


@pytest.mark.parametrize("options", [{}, {"single_file_per_rank": False}, {"codec": "none"}])
def test_one_plan_serves_every_writer(tmp_path: Path, planned: list[Any], options: dict[str, Any]) -> None:
    put(small_state(1), tmp_path / "first")
    put(small_state(2), tmp_path / "second", **options)
    assert len(planned) == 1
    assert_like_dcp(tmp_path / "second", small_state(2), tmp_path / "dcp", **options)


_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
_TENSORS = st.builds(
    lambda shape, dtype, grad: torch.ones(shape, dtype=dtype).requires_grad_(grad and dtype.is_floating_point),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(_DTYPES),
    st.booleans(),
)
_LEAVES = _TENSORS | st.integers() | st.text(max_size=3) | st.none() | st.lists(st.booleans(), max_size=2)
_STATES = st.dictionaries(
    st.text("ab.", min_size=1, max_size=3),
    st.recursive(_LEAVES, lambda inner: st.dictionaries(st.text("ab", max_size=2), inner, max_size=3), max_leaves=6),
    min_size=1,
    max_size=5,
)


@pytest.mark.ci
@given(states=st.lists(_STATES, min_size=1, max_size=3), order=st.lists(st.integers(0, 2), min_size=2, max_size=5))
@pytest.mark.timeout(600)
def test_kept_plans_make_the_checkpoints_of_new_ones(
    tmp_path_factory: pytest.TempPathFactory, states: list[State], order: list[int]
) -> None:
    """Of any states, in any order: `.metadata` and data files are those that a new process writes."""
    forget_all()
    path = tmp_path_factory.mktemp("kept")
    for number, which in enumerate(order):
        state = states[which % len(states)]
        try:
            put(state, path / f"{number}-kept")
        except errors.CheckpointError as error:  # a state that nothing can be saved of, such as keys that are one
            forget = process_state().plans
            with pytest.raises(type(error)):
                put(state, path / f"{number}-new")
            assert process_state().plans is forget
            continue
        keeping = process_state()
        forget_all()
        put(state, path / f"{number}-new")
        mine, theirs = (seen(path / f"{number}-{how}") for how in ("kept", "new"))
        assert mine.state_dict_metadata == theirs.state_dict_metadata
        assert mine.planner_data == theirs.planner_data
        assert places(mine) == places(theirs)
        _keep_on(keeping)


def _keep_on(keeping: Any) -> None:
    from dcp_nvcomp.saving import process_state as module

    module._kept = keeping


# --- other structures ------------------------------------------------------------------------------------------------


def _model(**changes: Any) -> State:
    return {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5), "step": 1, **changes}


CHANGES: dict[str, Callable[[], State]] = {
    "dtype": lambda: _model(w=torch.arange(12.0).reshape(3, 4).bfloat16()),
    "dtype of one size": lambda: _model(w=torch.arange(12, dtype=torch.int32).reshape(3, 4)),
    "shape": lambda: _model(w=torch.arange(12.0).reshape(4, 3)),
    "one more key": lambda: _model(more=torch.ones(2)),
    "one key less": lambda: {key: value for key, value in _model().items() if key != "b"},
    "another key": lambda: {("a" if key == "b" else key): value for key, value in _model().items()},
    "an object instead of a tensor": lambda: _model(b="text"),
    "a tensor instead of an object": lambda: _model(step=torch.tensor(1)),
    "deeper": lambda: {"w": _model()["w"], "b": _model()["b"], "step": {"step": 1}},
    "same names, other paths": lambda: {"model": {"w": torch.ones(3)}, **_model()},
    "gradients": lambda: _model(b=torch.ones(5, requires_grad=True)),
    "order": lambda: dict(reversed(_model().items())),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_differs_in_structure_is_planned_anew(
    tmp_path: Path, planned: list[Any], change: Callable[[], State]
) -> None:
    put(_model(), tmp_path / "before")
    put(change(), tmp_path / "changed")
    assert len(planned) == 2
    assert_like_dcp(tmp_path / "changed", change(), tmp_path / "dcp")
    put(_model(), tmp_path / "after")
    assert_like_dcp(tmp_path / "after", _model(), tmp_path / "dcp")
    assert len(planned) == 4, "two of them by dcp.save"


def test_paths_are_part_of_the_structure(tmp_path: Path, planned: list[Any]) -> None:
    for state in ({"a": {"b.c": torch.ones(2)}}, {"a.b": {"c": torch.ones(2)}}, {"a.b.c": torch.ones(2)}):
        put(state, tmp_path)
        assert_like_dcp(tmp_path, state, tmp_path / "dcp")
    assert len(planned) == 6


def test_options_of_the_planner_are_part_of_it(tmp_path: Path, planned: list[Any]) -> None:
    state = {"model": {"w": torch.ones(2)}}
    for number, flatten in enumerate((True, False, True, False)):
        put(state, tmp_path / str(number), planner=DefaultSavePlanner(flatten_state_dict=flatten))
    assert [sorted(seen(tmp_path / str(number)).state_dict_metadata) for number in range(4)] == [
        ["model.w"],
        ["model"],
        ["model.w"],
        ["model"],
    ]
    assert len(planned) == 2


def test_the_latest_plans_are_kept(tmp_path: Path, planned: list[Any]) -> None:
    for size in [*range(1, 10), 9, 2, 1]:
        put({"w": torch.ones(size)}, tmp_path)
        assert_loads(tmp_path, {"w": torch.ones(size)})
    assert len(planned) == 10, "eight are kept, so the first one was forgotten"


# --- who plans otherwise ---------------------------------------------------------------------------------------------


class _Renaming(DefaultSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=plan.items[:1])


class _Subclass(torch.Tensor):
    pass


class _Observing(NvcompWriter):
    results: list[Any] = []

    def finish(self, metadata: Metadata, results: Any) -> None:
        self.results.append([len(rank) for rank in results])
        super().finish(metadata, results)


def test_planners_of_other_classes_plan_each_save(tmp_path: Path, planned: list[Any]) -> None:
    put(_model(), tmp_path)
    for _ in range(2):
        put(_model(), tmp_path, planner=_Renaming())
        assert len(seen(tmp_path).storage_data) == 1
    assert len(planned) == 3
    put(_model(), tmp_path)
    assert_loads(tmp_path, _model())


def test_a_planner_with_methods_of_the_callers_plans_each_save(tmp_path: Path, planned: list[Any]) -> None:
    for _ in range(2):
        planner = DefaultSavePlanner()
        planner.lookup_object = lambda index: torch.full((5,), 7.0)  # type: ignore[method-assign]
        put({"b": torch.ones(5)}, tmp_path, planner=planner)
        assert_loads(tmp_path, {"b": torch.full((5,), 7.0)})
    assert len(planned) == 2


def test_dcps_cache_of_plans_is_not_used(tmp_path: Path) -> None:
    """It would publish fp32 for what became bf16."""
    cached = dict(DefaultSavePlanner._cached_save_plan)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        put({"w": torch.ones(4, dtype=dtype)}, tmp_path, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert_loads(tmp_path, {"w": torch.ones(4, dtype=dtype)})
    assert cached == DefaultSavePlanner._cached_save_plan


def test_subclasses_of_the_writer_see_all_results(tmp_path: Path, planned: list[Any]) -> None:
    for _ in range(2):
        save(_model(), storage_writer=_Observing(tmp_path), no_dist=True)
    assert _Observing.results == [[3]] * 2 and len(planned) == 2


def test_a_state_that_plans_itself_comes_between(tmp_path: Path, planned: list[Any]) -> None:
    """A, a tensor subclass, A: the plan of the first A serves the second."""
    own = {"w": torch.ones(4).as_subclass(_Subclass)}
    for number, state in enumerate((_model(), own, _model(), own)):
        put(state, tmp_path / str(number))
    assert_loads(tmp_path / "2", _model())
    assert_loads(tmp_path / "3", {"w": torch.ones(4)})
    assert len(planned) == 3


def test_a_tensor_that_has_several_shards_of_its_own(tmp_path: Path) -> None:
    """As torchrec's, in a DTensor that looks like others: DCP plans it each time."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path}/store")
    try:
        mesh = init_device_mesh("cpu", (1,))

        def made(*columns: tuple[int, int]) -> DTensor:
            whole = torch.arange(16.0).reshape(4, 4)
            local = LocalShardsWrapper(
                [whole[:, low:high].clone() for low, high in columns], [(0, low) for low, _ in columns]
            )
            return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=(4, 1))

        for _ in range(2):
            # whichever of a kind is looked at, its first or its last
            save({"a": made((0, 4)), "b": made((0, 2), (2, 4)), "c": made((0, 4))}, tmp_path / "it")
            assert len(seen(tmp_path / "it").state_dict_metadata["b"].chunks) == 2
            found = open_checkpoint(tmp_path / "it")
            for key in "abc":
                assert torch.equal(found[key][:], torch.arange(16.0).reshape(4, 4))
    finally:
        dist.destroy_process_group()


# --- what fails ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["prepare_local_plan", "prepare_global_plan", "write_data", "finish"])
def test_a_failed_save_leaves_no_plan_that_is_wrong(
    tmp_path: Path, planned: list[Any], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Also between the global plan and its end, where the trial kept the failed save's shapes."""
    put(_model(), tmp_path)

    def fails(*arguments: Any, **options: Any) -> Any:
        raise Sabotage("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(NvcompWriter, step, fails)
        for state in (CHANGES["shape"](), _model()):
            with pytest.raises(errors.RankFailedError, match="on purpose"):
                put(state, tmp_path)
    for number, state in enumerate((_model(), CHANGES["shape"](), _model())):
        put(state, tmp_path / str(number))
        assert_like_dcp(tmp_path / str(number), state, tmp_path / "dcp")


def test_a_state_that_cannot_be_planned_fails_each_time(tmp_path: Path) -> None:
    put(_model(), tmp_path)
    for _ in range(2):
        with pytest.raises(errors.CheckpointError, match="Two values have this name"):
            put({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path)
    assert_loads(tmp_path, _model())


def test_the_metadata_that_was_returned_is_the_callers(tmp_path: Path) -> None:
    for _ in range(3):
        saving = async_save(_model(), tmp_path, no_dist=True)
        metadata = saving.upload_completion.result()
        assert saving.upload_completion.result() is metadata
        assert type(metadata) is Metadata and SaveStats.of(metadata) is not None
        assert_like_dcp(tmp_path, _model(), tmp_path / "dcp")
        item = metadata.state_dict_metadata["w"]
        assert isinstance(item, TensorStorageMetadata)
        item.size, item.properties.dtype = torch.Size([7]), torch.int8
        item.chunks.clear()
        metadata.planner_data.clear()
        metadata.storage_data.clear()
        del metadata.state_dict_metadata["b"]


def test_the_state_is_not_kept(tmp_path: Path) -> None:
    import gc
    import weakref

    state = _model()
    watched = weakref.ref(state["w"])
    put(state, tmp_path)
    del state
    gc.collect()
    assert watched() is None
