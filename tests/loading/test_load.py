"""`load`: what `dcp.load` loads, by the shorter way too, which whole plain tensors take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcp_nvcomp import NvcompReader, errors, load, save
from tests.checkpoints import damage, save_stock
from tests.checkpoints import save as dcp_save
from tests.conformance.sabotage import Sabotage
from tests.states import State, assert_same, blank, small_state


def full() -> State:
    return {
        **small_state(1),
        "nested": {"w": torch.arange(12.0).reshape(3, 4), "list": [torch.ones(2), {"deep": "text"}], "none": None},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "complex": torch.complex(torch.arange(3.0), torch.ones(3)),
        "a": 5,
    }


def got(path: Path, into: State, **options: Any) -> State:
    load(into, path, no_dist=True, **options)
    return into


@pytest.fixture
def planned_whole(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that DCP's own planner planned."""
    found: list[str] = []
    plan = default_planner.create_default_local_load_plan

    def planning(state_dict: State, *arguments: Any) -> LoadPlan:
        found.extend(state_dict)
        return plan(state_dict, *arguments)

    monkeypatch.setattr("dcp_nvcomp.loading.planner.create_default_local_load_plan", planning)
    monkeypatch.setattr(default_planner, "create_default_local_load_plan", planning)
    return found


@pytest.mark.parametrize("write", [lambda state, path: save(state, path, no_dist=True), lambda s, p: dcp_save(p, s)])
def test_everything_that_can_be_saved(tmp_path: Path, write: Callable[[State, Path], Any]) -> None:
    write(full(), tmp_path)
    into = blank(full())
    nested = into["nested"]
    assert_same(got(tmp_path, into), full())
    assert into["nested"] is nested, "filled where it is"


def test_a_stock_checkpoint(tmp_path: Path) -> None:
    save_stock(tmp_path, full())
    assert_same(got(tmp_path, blank(full())), full())


def test_plain_tensors_take_the_shorter_way(tmp_path: Path, planned_whole: list[str]) -> None:
    save(full(), tmp_path, no_dist=True)
    got(tmp_path, blank(full()))
    assert set(planned_whole) == {"step.number", "nested.list.1.deep", "nested.none", "empty", "a"}


def test_the_plan_is_that_of_dcp(tmp_path: Path) -> None:
    state = full()
    save(state, tmp_path, no_dist=True)
    plans: list[dict[Any, ReadItem]] = []

    class Recording(NvcompReader):
        def read_data(self, plan: LoadPlan, planner: Any) -> Any:
            plans.append({(item.dest_index.fqn, item.dest_index.offset): item for item in plan.items})
            return super().read_data(plan, planner)

    load(blank(state), storage_reader=Recording(tmp_path), no_dist=True)
    dcp.load(blank(state), storage_reader=Recording(tmp_path), no_dist=True)
    assert plans[0] == plans[1]


def test_into_parameters(tmp_path: Path) -> None:
    save({"w": torch.arange(4.0)}, tmp_path, no_dist=True)
    parameter = torch.nn.Parameter(torch.zeros(4))
    into = got(tmp_path, {"w": parameter})
    assert into["w"] is parameter
    assert_same(parameter.detach(), torch.arange(4.0))


def test_a_part_of_a_checkpoint(tmp_path: Path) -> None:
    save(full(), tmp_path, no_dist=True)
    with pytest.warns(
        UserWarning, match=r"3 saved value\(s\) were not loaded.*'nested\.list\.0', 'nested\.list\.1\.deep'"
    ):
        into = got(tmp_path, {"nested": {"w": torch.zeros(3, 4)}, "scalar": torch.tensor(0.0)})
    assert_same(into, {"nested": {"w": full()["nested"]["w"]}, "scalar": torch.tensor(3.5)})


def test_partial_loads_leave_what_is_not_there(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path, no_dist=True)
    into = {"w": torch.zeros(2), "more": torch.full((2,), 7.0)}
    got(tmp_path, into, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert_same(into, {"w": torch.ones(2), "more": torch.full((2,), 7.0)})


class _Doubling(DefaultLoadPlanner):
    committed: list[str]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        tensor.mul_(2)


def test_planners_of_other_classes_plan_themselves(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path, no_dist=True)
    assert_same(got(tmp_path, {"w": torch.zeros(2)}, planner=_Doubling()), {"w": torch.full((2,), 2.0)})


# --- what fails -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3,), (2, 1), ()])
def test_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save({"w": torch.ones(2)}, tmp_path, no_dist=True)
    with pytest.raises(errors.CheckpointError, match="but .* was saved"):
        got(tmp_path, {"w": torch.zeros(shape)})


def test_damage_is_reported_as_it_is(tmp_path: Path) -> None:
    save({"w": torch.rand(5000)}, tmp_path, no_dist=True)
    damage(tmp_path)
    with pytest.raises(errors.CorruptDataError):
        got(tmp_path, {"w": torch.zeros(5000)})


def test_interrupts_stay_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(2)}, tmp_path, no_dist=True)

    def interrupt(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(NvcompReader, "read_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        got(tmp_path, {"w": torch.zeros(2)})


def test_foreign_errors_keep_their_words(tmp_path: Path) -> None:
    class Failing(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            raise Sabotage("on purpose")

    save({"w": torch.ones(2)}, tmp_path, no_dist=True)
    with pytest.raises(errors.RankFailedError, match="^Sabotage: on purpose") as caught:
        got(tmp_path, {"w": torch.zeros(2)}, planner=Failing())
    assert caught.value.failures == {0: "Sabotage: on purpose"}


def message(path: Path, into: State, error: type[errors.CheckpointError]) -> str:
    with pytest.raises(error) as caught:
        got(path, into)
    assert len(caught.traceback) < 6  # none of DCP's
    return str(caught.value)


def test_what_a_tensor_cannot_be_loaded_into(tmp_path: Path) -> None:
    save(full(), tmp_path, no_dist=True)
    for value in (3, None, "text"):
        text = message(tmp_path, {"nested": {"w": value}}, errors.ShapeMismatchError)
        assert "a tensor was saved, of shape (3, 4) and torch.float32" in text and "'nested.w'" in text
    text = message(tmp_path, {"a": torch.zeros(())}, errors.ShapeMismatchError)
    assert "a Python object was saved" in text
    text = message(tmp_path, {"nested": {"w": torch.zeros(3, 4, device="meta")}}, errors.ConfigurationError)
    assert "meta device" in text and "'nested.w'" in text
    text = message(tmp_path, {"nested": {"w": torch.zeros(1, 4).expand(3, 4)}}, errors.ConfigurationError)
    assert "share their memory" in text and "'nested.w'" in text
    into = full()
    into["nested"]["w"] = torch.zeros(4, 3).t()  # not contiguous, but nothing is shared
    assert_same(got(tmp_path, into)["nested"]["w"], full()["nested"]["w"])


def test_empty_dicts_that_the_checkpoint_has_something_for(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    save({"opt": optimizer.state_dict(), "none": {}, "list": [{}, {"x": 1}]}, tmp_path, no_dist=True)
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.warns(UserWarning, match=r"6 saved value.*opt\.state\.0\..*optimizer has its state from") as warned:
        got(tmp_path, {"opt": fresh.state_dict(), "none": {}})
    assert len(warned) == 1, [str(one.message) for one in warned]
    got(tmp_path, {"opt": optimizer.state_dict(), "none": {}, "list": [{}, {"x": 0}]})  # no warning


def test_a_warning_is_shown_once_per_place(tmp_path: Path) -> None:
    program = (
        "import sys, warnings, torch, dcp_nvcomp\n"
        "for _ in range(3):\n"
        "    warnings.warn('once per place')\n"
        "    dcp_nvcomp.save({'w': torch.ones(1)}, sys.argv[1])\n"
        "    dcp_nvcomp.load({'w': torch.ones(1)}, sys.argv[1])\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    # once more after the first save, which adds a filter, and not at each
    assert done.stderr.count("UserWarning: once per place") == 2
