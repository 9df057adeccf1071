"""What people lost around their tensors elsewhere: keys, containers, extra state, views, wrappers."""

from __future__ import annotations

import collections
import dataclasses
import enum
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import (
    CheckpointManager,
    MissingKeyError,
    NvcompReader,
    NvcompWriter,
    TrainingState,
    async_save,
    convert,
    load,
    load_compressed_checkpoint,
    open_checkpoint,
    save,
    save_compressed_checkpoint,
    tools,
)
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, ShapeMismatchError
from tests.states import assert_same


def run_and_back(path: Path, state: dict[str, Any], fresh: dict[str, Any]) -> dict[str, Any]:
    """Save a state in a run, and restore it into a fresh one."""
    with CheckpointManager(path, every=1, preemption_signals=()) as manager:
        manager.save(1, state).saved.result(60)
    with CheckpointManager(path, every=1, preemption_signals=()) as manager:
        manager.restore(fresh)
    return fresh


def trained(module: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int = 3) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        module(torch.ones(2, width)).square().sum().backward()
        optimizer.step()


# --- keys that are no text -------------------------------------------------------------------------------------------


def test_a_plain_scheduler_comes_back(tmp_path: Path) -> None:
    def build() -> torch.optim.lr_scheduler.MultiStepLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5, 5])
        optimizer.step()
        return scheduler

    first, second = build(), build()
    for _ in range(3):
        first.step()
    run_and_back(tmp_path, {"scheduler": first}, {"scheduler": second})
    assert second.milestones == collections.Counter([2, 5, 5]) and set(map(type, second.milestones)) == {int}
    assert_same(second.state_dict(), first.state_dict())


def test_a_plain_optimizer_comes_back_into_a_fresh_one(tmp_path: Path) -> None:
    module, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    first, second = torch.optim.AdamW(module.parameters(), lr=0.1), torch.optim.AdamW(other.parameters(), lr=0.5)
    trained(module, first)
    run_and_back(tmp_path, {"model": module.state_dict(), "opt": first}, {"model": other.state_dict(), "opt": second})
    assert_same(second.state_dict(), first.state_dict())
    trained(module, first), trained(other, second)
    assert_same(other.state_dict(), module.state_dict())


def test_each_way_of_loading_has_the_keys(tmp_path: Path) -> None:
    state = {"by": {0: 1, -7: 2, 1.5: 3, True: 4, None: 5, (1, "a"): 6, b"x": 7, "text": 8}, "w": {3: torch.ones(2)}}
    fresh = {"by": dict.fromkeys(state["by"], 0), "w": {3: torch.zeros(2)}}
    save(state, tmp_path / "one", no_dist=True)
    async_save(state, tmp_path / "two", no_dist=True).upload_completion.result(60)
    for name in ("one", "two"):
        found = {key: dict(value) for key, value in fresh.items()}
        load(found, tmp_path / name, no_dist=True)
        assert_same(found, state)
    convert(tmp_path / "one", tmp_path / "state.pt")
    assert_same(torch.load(tmp_path / "state.pt", weights_only=True), state)
    convert(tmp_path / "state.pt", tmp_path / "three")
    assert tools.compare(tmp_path / "one", tmp_path / "three").is_equal
    save({"by": {str(key): value for key, value in state["by"].items()}, "w": {"3": torch.ones(2)}}, tmp_path / "text")
    kinds = {one.kind for one in tools.compare(tmp_path / "one", tmp_path / "text").differences}
    assert kinds == {"place"}


def test_what_no_checkpoint_can_hold_is_refused_at_the_save(tmp_path: Path) -> None:
    for state, key in (
        ({"a": {0: 1, "0": 2}}, "a.0"),
        ({"a.b": 1, "a": {"b": 2}}, "a.b"),
        ({"opt": {torch.nn.Parameter(torch.ones(1)): {"step": torch.ones(1)}}}, "opt"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            save(state, tmp_path / "refused", no_dist=True)
        assert caught.value.fqn == key
    assert not (tmp_path / "refused" / ".metadata").exists()


# --- containers ------------------------------------------------------------------------------------------------------


def test_a_restore_brings_back_containers_a_load_says_what_it_leaves(tmp_path: Path) -> None:
    state = {
        "hist": [{"loss": 1.0}, {"loss": 0.5}],
        "replay": [torch.ones(2), torch.zeros(1)],
        "none": {},
        "seen": {4: 5},
    }

    def fresh() -> dict[str, Any]:
        return {
            "p": {"hist": [{"loss": 9.0, "more": 1}], "replay": [torch.zeros(2)] * 3, "none": {"x": 1}, "seen": {1: 2}}
        }

    found = fresh()
    containers = found["p"], found["p"]["hist"], found["p"]["seen"]
    run_and_back(tmp_path / "run", {"p": state}, found)
    assert_same(found, {"p": state})
    assert containers[0] is found["p"] and containers[1] is found["p"]["hist"] and containers[2] is found["p"]["seen"]
    save({"p": state}, tmp_path / "one", no_dist=True)
    into: dict[str, Any] = {"p": {"hist": [{"loss": 9.0}], "replay": [torch.zeros(2)], "seen": {}}}
    with pytest.warns(UserWarning, match=r"4 saved value\(s\) were not loaded.*'p\.hist\.1\.loss'") as warned:
        load(into, tmp_path / "one", no_dist=True)
    assert len(warned) == 1
    assert_same(into, {"p": {"hist": [{"loss": 1.0}], "replay": [torch.ones(2)], "seen": {}}})


def test_tensors_are_filled_in_place_and_missing_ones_are_missed(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    fresh = torch.nn.Linear(3, 2)
    run_and_back(tmp_path, {"model": module.state_dict()}, {"model": fresh.state_dict()})
    assert_same(fresh.state_dict(), module.state_dict())
    wider = torch.nn.Sequential(collections.OrderedDict(weight=torch.nn.Linear(1, 1)))
    with (
        CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager,
        pytest.raises(CheckpointError, match=r"weight"),
    ):
        manager.restore({"model": {**fresh.state_dict(), **wider.state_dict()}})


def test_other_kinds_of_containers_take_their_places(tmp_path: Path) -> None:
    state = {"a": [1, 2], "b": {"x": {}}, "c": 5, "d": (1, {"y": torch.ones(1)}), "e": [{}, []]}
    found = {"a": {"was": "dict"}, "b": [1], "c": [{"was": "list"}], "d": {}, "e": {"x": [1, {}]}}
    assert_same(run_and_back(tmp_path, dict(state), dict(found)), state)


# --- extra state -----------------------------------------------------------------------------------------------------


class Counting(torch.nn.Linear):
    """A module whose extra state is of another size, or kind, each time."""

    seen: Any = ()
    as_tensor = True

    def get_extra_state(self) -> Any:
        if not self.as_tensor:
            return {"seen": self.seen} if self.seen else None
        return torch.frombuffer(bytearray(pickle.dumps(self.seen)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        is_tensor = isinstance(state, torch.Tensor)
        self.seen = pickle.loads(bytes(state.tolist())) if is_tensor else (state or {"seen": ()})["seen"]


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("grows", [True, False])
def test_extra_state_of_another_size(tmp_path: Path, as_tensor: bool, grows: bool) -> None:
    def build(seen: Any) -> torch.nn.Module:
        module = torch.nn.Sequential(Counting(3, 3), torch.nn.Sequential(Counting(3, 2)))
        for part in (module[0], module[1][0]):
            part.as_tensor, part.seen = as_tensor, seen
        return module

    large, small = [[1.5, 2]] * 300, (3,) if as_tensor else [3]
    module = build(large if grows else small)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    trained(module, optimizer)

    def check(other: torch.nn.Module) -> None:
        assert other[0].seen == other[1][0].seen == module[0].seen  # type: ignore[index]
        assert torch.equal(other[0].weight, module[0].weight)  # type: ignore[index]

    fresh = build(small if grows else large)
    its_own = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    run_and_back(tmp_path / "run", {"t": TrainingState(module, optimizer)}, {"t": TrainingState(fresh, its_own)})
    check(fresh)
    fresh = build(())
    with open_checkpoint(tmp_path / "run" / "step-1") as checkpoint:
        checkpoint.load_into(fresh, prefix="t.model.")
    check(fresh)
    if as_tensor:
        fresh = build(())
        save({"model": module.state_dict()}, tmp_path / "one", no_dist=True)
        into = {"model": fresh.state_dict()}
        load(into, tmp_path / "one", no_dist=True)
        fresh.load_state_dict(into["model"])
        check(fresh)


# --- views -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    tensor: torch.Tensor
    label: int


def test_small_views_in_objects_take_little_room(tmp_path: Path) -> None:
    base = torch.arange(1_000_000.0)
    state = {
        "sample": Sample(base[5:15], 1),
        "tuple": (base[:3], [base[7:9].requires_grad_()], {"x": torch.nn.Parameter(base[::250_000])}),
        "half": (base.view(1000, 1000).t()[:2], base.to(torch.bfloat16)[4:]),
    }
    save(state, tmp_path / "one", no_dist=True)
    async_save(state, tmp_path / "two", no_dist=True).upload_completion.result(60)
    save_compressed_checkpoint({key: state[key] for key in ("tuple", "half")}, tmp_path / "three" / "one")
    found = dict.fromkeys(state)
    for name in ("one", "two"):
        load(found, tmp_path / name, no_dist=True)
        assert_same(dataclasses.astuple(found["sample"]), dataclasses.astuple(state["sample"]))  # type: ignore[arg-type]
        assert_same(found["tuple"], state["tuple"])
        assert_same(found["half"], state["half"])
        assert found["tuple"][1][0].requires_grad  # type: ignore[index]
    one_file = load_compressed_checkpoint(tmp_path / "three" / "one")
    assert_same(one_file, {key: state[key] for key in ("tuple", "half")})
    for name in ("one", "two", "three"):
        assert sum(file.stat().st_size for file in (tmp_path / name).iterdir()) < 3_000_000  # of the bfloat16 tensor


def test_tensors_of_an_object_that_show_their_memory_share_it(tmp_path: Path) -> None:
    base = torch.arange(10_000.0)
    save({"pair": (base[:6000], base[4000:]), "tied": (base, base[:10])}, tmp_path, no_dist=True)
    found: dict[str, Any] = {"pair": None, "tied": None}
    load(found, tmp_path, no_dist=True)
    for one, other in found.values():
        assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


# --- wrappers --------------------------------------------------------------------------------------------------------


def wrapped(module: torch.nn.Module, kind: str) -> torch.nn.Module:
    if kind == "compile":
        return torch.compile(module)  # type: ignore[return-value]
    if kind == "inner compile":
        module[0] = torch.compile(module[0])  # type: ignore[index,operator]
    if kind == "checkpointing":
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        module[0] = checkpoint_wrapper(module[0])  # type: ignore[index,operator]
    return torch.nn.ModuleDict({"module": module}) if kind == "module" else module


@pytest.mark.ci
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("plain", "compile"),
        ("compile", "module"),
        ("inner compile", "plain"),
        ("inner compile", "checkpointing"),
        ("module", "plain"),
        ("module", "compile"),
    ],
)
def test_wrappers_of_modules_make_no_difference(tmp_path: Path, before: str, after: str) -> None:
    def build(kind: str) -> torch.nn.Module:
        return wrapped(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)), kind)

    module = build(before)
    values = list(module.state_dict().values())
    save({"model": module.state_dict()}, tmp_path / "one", no_dist=True)
    fresh = build(after)
    load({"model": fresh.state_dict()}, tmp_path / "one", no_dist=True)
    assert_same(list(fresh.state_dict().values()), values)
    fresh = build(after)
    with open_checkpoint(tmp_path / "one") as checkpoint:
        checkpoint.load_into(fresh, prefix="model.")
    assert_same(list(fresh.state_dict().values()), values)
    fresh = build(after)
    run_and_back(tmp_path / "run", {"model": module.state_dict()}, {"model": fresh.state_dict()})
    assert_same(list(fresh.state_dict().values()), values)


def test_a_name_that_two_may_mean_is_missing(tmp_path: Path) -> None:
    save({"module.w": torch.ones(1), "_orig_mod.w": torch.zeros(1)}, tmp_path, no_dist=True)
    with pytest.raises(MissingKeyError, match=r"'w'"):
        load({"w": torch.zeros(1)}, tmp_path, no_dist=True)


class Adapter(torch.nn.Linear):
    """A module whose own parameter has the name of its child's, but for a wrapper's."""

    def __init__(self) -> None:
        super().__init__(2, 2, bias=False)
        self.module = torch.nn.Linear(2, 2, bias=False)


def test_wrappers_never_swap_what_has_one_name_without_them(tmp_path: Path) -> None:
    module = Adapter()
    save({"model": module.state_dict()}, tmp_path, no_dist=True)
    other = torch.nn.DataParallel(Adapter())
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(MissingKeyError):
        load({"model": other.state_dict()}, tmp_path, no_dist=True)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(MissingKeyError):
        checkpoint.load_into(other, prefix="model.")
    assert_same(other.state_dict(), before)


@pytest.mark.parametrize("before", ["plain", "parallel"])
@pytest.mark.parametrize("after", ["plain", "parallel"])
def test_optimizers_of_wrapped_modules(tmp_path: Path, before: str, after: str) -> None:
    def build(kind: str) -> torch.nn.Module:
        module = torch.nn.Sequential(torch.nn.Linear(3, 2))
        return torch.nn.DataParallel(module) if kind == "parallel" else module

    module, fresh = build(before), build(after)
    first, second = (torch.optim.AdamW(one.parameters()) for one in (module, fresh))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    run_and_back(tmp_path, {"o": TrainingState(module, first)}, {"o": TrainingState(fresh, second)})
    for one, other in zip(module.parameters(), fresh.parameters(), strict=True):
        assert_same(second.state[other], first.state[one])


# --- DCP's own calls, and what can only be said ----------------------------------------------------------------------


def test_dcp_load_has_the_keys_too(tmp_path: Path) -> None:
    state = {"seen": {0: 1, (1, 2): 2, None: 3}, "text": {"a": 4}, "w": {7: torch.ones(2)}}
    dcp.save(state, storage_writer=NvcompWriter(tmp_path / "theirs"), no_dist=True)
    save(state, tmp_path / "ours", no_dist=True)
    for name in ("theirs", "ours"):
        found = {"seen": {0: 0, (1, 2): 0, None: 0}, "text": {"a": 0}, "w": {7: torch.zeros(2)}}
        dcp.load(found, storage_reader=NvcompReader(tmp_path / name), no_dist=True)
        assert_same(found, state)


def test_dcp_load_of_a_training_state_is_refused(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    trained(module, optimizer)
    save({"t": TrainingState(module, optimizer)}, tmp_path, no_dist=True)
    with pytest.raises(ConfigurationError, match=r"restored by CheckpointManager\.restore or dcp_nvcomp\.load"):
        dcp.load(
            {"t": TrainingState(module, torch.optim.AdamW(module.parameters()))},
            storage_reader=NvcompReader(tmp_path),
            no_dist=True,
        )


def test_planners_that_do_not_flatten(tmp_path: Path) -> None:
    state = {"x": {0: 1, "0": 2}, "y": 3}
    save(state, tmp_path, planner=dcp.DefaultSavePlanner(flatten_state_dict=False), no_dist=True)
    found: dict[str, Any] = {"x": None, "y": 0}
    load(found, tmp_path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False), no_dist=True)
    assert found == state


def test_stock_keys_that_were_numbers_are_said_to_be_text(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    trained(module, optimizer)
    dcp.save({"opt": optimizer.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    with pytest.warns(UserWarning, match=r"which keys of dicts were numbers.*'opt\.state\.0"):
        convert(tmp_path / "stock", tmp_path / "x.pt")


class Holder:
    """A Stateful value that is given back what it had, in a container of that kind."""

    def __init__(self) -> None:
        self.counts = collections.Counter({3: 2})
        self.lists = collections.defaultdict(list, {"a": [1]})

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_kinds_of_containers_are_those_of_the_destination(tmp_path: Path) -> None:
    first, second = Holder(), Holder()
    first.counts[7] += 5
    first.lists["b"].append(2)
    run_and_back(tmp_path, {"it": first}, {"it": second})
    assert type(second.counts) is collections.Counter and second.counts == {3: 2, 7: 5}
    second.lists["new"].append(3)
    assert second.lists == {"a": [1], "b": [2], "new": [3]}


@pytest.mark.ci
def test_extra_state_of_another_kind(tmp_path: Path) -> None:
    def build(seen: Any) -> torch.nn.Module:
        module = torch.nn.Sequential(Counting(3, 3))
        module[0].as_tensor, module[0].seen = False, seen
        return module

    for number, (saved, fresh) in enumerate(
        [
            ([torch.ones(4)], [torch.ones(2)]),
            ([torch.ones(1)] * 3, []),
            ([{"a": torch.ones(2)}], [1]),
            ([1], [{"b": 2}]),
        ]
    ):
        module, other = build(saved), build(fresh)
        run_and_back(tmp_path / f"{number}", {"t": TrainingState(module)}, {"t": TrainingState(other)})
        assert_same(other[0].seen, module[0].seen)  # type: ignore[index]
        other = build(fresh)
        run_and_back(tmp_path / f"whole-{number}", {"model": module}, {"model": other})
        assert_same(other[0].seen, module[0].seen)  # type: ignore[index]


def test_top_level_keys_that_a_restore_leaves_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_and_back(
        tmp_path, {"model": {"w": torch.ones(1)}, "ema": {"w": torch.ones(1)}}, {"model": {"w": torch.zeros(1)}}
    )
    assert "Step 1 also has values that the state has no key for; they are not restored: ema.w" in caplog.text


# --- what a review found ---------------------------------------------------------------------------------------------


def test_containers_that_a_state_has_twice_come_back_apart(tmp_path: Path) -> None:
    shared: tuple[Any, Any] = ([], {"x": 0})
    found: dict[str, Any] = {"h": dict.fromkeys("ab", shared[0]), "i": dict.fromkeys("ab", shared[1])}
    state = {"h": {"a": [1], "b": [2]}, "i": {"a": {"x": 1}, "b": {"x": 2}}}
    assert_same(run_and_back(tmp_path, state, found), state)


class Defaults:
    """A Stateful value that gives what it shares with others, and has more than was saved."""

    shared: dict[str, Any] = {"rate": 0.9, "hist": [0]}

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = self.shared if state is None else state
        self.newer = 5

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_what_a_stateful_value_gives_is_not_changed(tmp_path: Path) -> None:
    one, two = Defaults(), Defaults()
    saved = {"one": Defaults({"rate": 0.5, "hist": [1]}), "two": Defaults({"rate": 0.25, "hist": [2]})}
    run_and_back(tmp_path, saved, {"one": one, "two": two})
    assert one.state == {"rate": 0.5, "hist": [1]} and two.state == {"rate": 0.25, "hist": [2]}
    assert Defaults.shared == {"rate": 0.9, "hist": [0]}
    holder = Holder()
    holder.newer = 5  # type: ignore[attr-defined]
    run_and_back(tmp_path / "more", {"it": Holder()}, {"it": holder})
    assert holder.newer == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(("one", "other"), [(0, "0"), (None, "None"), ((1, "2"), "(1, '2')")])
def test_containers_under_keys_that_look_alike_are_refused(tmp_path: Path, one: Any, other: Any) -> None:
    for values in ({"x": 1}, {"y": 2}), ({"x": torch.ones(1)}, {"y": torch.ones(1)}), ([{}], {"y": 2}):
        with pytest.raises(ConfigurationError, match="look alike") as caught:
            save({"a": {one: values[0], other: values[1]}}, tmp_path, no_dist=True)
        assert caught.value.fqn == f"a.{other}"


class Color(str, enum.Enum):
    RED = "red"


def test_text_that_is_another_text_as_a_key(tmp_path: Path) -> None:
    state = {"a": {Color.RED: 1, "x": {Color.RED: {"y": 2}}}}
    save(state, tmp_path / "one", no_dist=True)
    found: dict[str, Any] = {"a": {Color.RED: 0, "x": {Color.RED: {"y": 0}}}}
    load(found, tmp_path / "one", no_dist=True)
    assert_same(found, state)
    assert_same(run_and_back(tmp_path / "run", state, {"a": {}}), state)


def test_a_stock_checkpoint_is_restored_under_the_keys_of_the_state(tmp_path: Path) -> None:
    dcp.save({"a": {1: {"x": 5}, (2, 3): 6}, "w": {7: torch.ones(2)}}, checkpoint_id=tmp_path / "step-1", no_dist=True)
    found: dict[str, Any] = {"a": {1: {"x": 0}, (2, 3): 0}, "w": {7: torch.zeros(2)}}
    with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
        manager.restore(found)
    assert_same(found, {"a": {1: {"x": 5}, (2, 3): 6}, "w": {7: torch.ones(2)}})


def test_views_keep_what_was_put_on_them(tmp_path: Path) -> None:
    base = torch.arange(100_000.0)
    view, parameter = base[:3], torch.nn.Parameter(base[:4])
    view.tag, parameter.mp = "x", True  # type: ignore[attr-defined]
    save({"pair": (view, parameter)}, tmp_path, no_dist=True)
    found: dict[str, Any] = {"pair": None}
    load(found, tmp_path, no_dist=True)
    assert found["pair"][0].tag == "x" and found["pair"][1].mp is True


@pytest.mark.ci
@pytest.mark.parametrize(
    "nest", [lambda x: {"a": x}, lambda x: {"p": {"a": x}}, lambda x: {"p": {"q": {"a": x}, "b": []}}]
)
@pytest.mark.parametrize("saved", [{}, [], 5, torch.ones(1), {"x": {"z": torch.ones(1)}}, {"x": 5}, {"x": {}}])
def test_a_tensor_of_a_dict_for_which_there_is_none_is_an_error(tmp_path: Path, nest: Any, saved: Any) -> None:
    fresh = nest({"x": torch.zeros(1)})
    with pytest.raises((MissingKeyError, ShapeMismatchError), match=r"destination (has|is) a tensor.*a\.x'") as caught:
        run_and_back(tmp_path, nest(saved), fresh)
    assert "no dict or list" not in str(caught.value)
    assert_same(fresh, nest({"x": torch.zeros(1)}))


def test_what_a_stateful_value_makes_of_another_kind_is_its_own_affair(tmp_path: Path) -> None:
    for number, (saved, fresh) in enumerate([({}, {"x": torch.ones(1)}), ({"x": 5}, {"x": torch.ones(1)})]):
        one, other = Defaults({"s": saved}), Defaults({"s": fresh})
        run_and_back(tmp_path / f"{number}", {"one": one, "in": {"it": one}}, {"one": other, "in": {"it": other}})
        assert other.state == {"s": saved}


def test_keys_of_dicts_are_in_the_order_of_the_state(tmp_path: Path) -> None:
    state = {
        "z": {"last": 1, "first": torch.ones(3), "e": {}, 7: "mid", "large": torch.ones(500)},
        "a": [{"y": 1, "x": 2}],
    }
    save(state, tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "b.pt")
    convert(tmp_path / "b", tmp_path / "stock", to="dcp")
    convert(tmp_path / "stock", tmp_path / "stock.pt")
    for name in "a.pt", "b.pt", "stock.pt":
        found = torch.load(tmp_path / name)
        assert [str(key) for key in found["z"]] == ["last", "first", "e", "7", "large"], name
        assert list(found["a"][0]) == ["y", "x"] and list(found) == ["z", "a"], name
    restored = run_and_back(tmp_path / "run", state, {"z": {}, "a": []})
    assert list(restored["z"]) == list(state["z"])
