"""Every optimizer of torch goes on after a restore, bit for bit, as if it had not been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from dcp_nvcomp import CheckpointManager, TrainingState, load, save
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from tests.distributed.launch import RankPool
from tests.field.optimizers import PLAIN, SHARDED, combinations, resume, train
from tests.states import assert_same


def assert_resumed(names: dict[str, Any], trained: list[Any], resumed: list[Any], *, on_others: bool = False) -> None:
    for combination, whole, parts in zip(combinations(names), trained, resumed, strict=True):
        assert_same(parts[0], whole[0], f"{combination} restored")
        # in bfloat16, and in vectors with a rest, torch rounds by how a parameter is sharded
        if not (on_others and combination[0] in ("Muon", "AdamW fused")):
            assert_same(parts[1], whole[1], f"{combination} three steps later")


@pytest.mark.ci
def test_on_one_rank(tmp_path: Path) -> None:
    trained = train(tmp_path, PLAIN)
    assert_resumed(PLAIN, trained, resume(tmp_path, PLAIN))


@pytest.mark.ci
def test_on_two_and_four_ranks(ranks: RankPool, tmp_path: Path) -> None:
    trained = ranks.run(train, tmp_path, SHARDED, world_size=2)
    for count in (2, 4):
        for one in ranks.run(resume, tmp_path, SHARDED, world_size=count):
            assert_resumed(SHARDED, trained[0], one, on_others=count != 2)


# --- what has no place -----------------------------------------------------------------------------------------------


def saved_run(path: Path, model: torch.nn.Module, optimizers: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        optimizer.step()
    with CheckpointManager(path, every=1, preemption_signals=()) as manager:
        manager.save(1, {"t": TrainingState(model, optimizers)})


def restored_run(path: Path, model: torch.nn.Module, optimizers: Any) -> None:
    with CheckpointManager(path, every=1, preemption_signals=()) as manager:
        manager.restore({"t": TrainingState(model, optimizers)})


def two_layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))


def test_parameters_that_the_optimizer_lacks_are_named(tmp_path: Path) -> None:
    model = two_layers()
    saved_run(tmp_path, model, torch.optim.AdamW(model.parameters()))
    fresh = two_layers()
    with pytest.raises(
        CheckpointError, match=r"no place in the optimizer: optimizer\.state\.0\.bias\.exp_avg.*requires_grad"
    ):
        restored_run(tmp_path, fresh, torch.optim.AdamW(fresh[1].parameters()))


@pytest.mark.parametrize("kind", ["one more", "one less", "other parts"])
def test_groups_that_are_others_are_named(tmp_path: Path, kind: str) -> None:
    model, fresh = two_layers(), two_layers()
    groups = [{"params": list(model[0].parameters()), "lr": 0.5}, {"params": list(model[1].parameters())}]
    saved_run(tmp_path, model, torch.optim.SGD(groups, lr=0.1))
    parameters = list(fresh.parameters())
    parts = {"one more": (1, 2, 4), "one less": (4,), "other parts": (3, 4)}[kind]
    others = [{"params": parameters[start:stop]} for start, stop in zip((0, *parts), parts, strict=False)]
    with pytest.raises(CheckpointError, match=r"optimizer\.param_groups\.0.*\[0\.weight, 0\.bias\]"):
        restored_run(tmp_path, fresh, torch.optim.SGD(others, lr=0.1))


def test_groups_in_another_order_are_found(tmp_path: Path) -> None:
    model, fresh = two_layers(), two_layers()
    optimizer = torch.optim.SGD(
        [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(model, (0.5, 0.25), strict=True)]
    )
    saved_run(tmp_path, model, optimizer)
    other = torch.optim.SGD([{"params": list(part.parameters())} for part in reversed(fresh)], lr=1.0)
    restored_run(tmp_path, fresh, other)
    assert [group["lr"] for group in other.param_groups] == [0.25, 0.5]


def test_parameters_that_are_not_the_models_are_refused_at_the_save(tmp_path: Path) -> None:
    model, other = two_layers(), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with (
        CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager,
        pytest.raises(
            ConfigurationError, match=r"Parameter 4 of group 0 of SGD, of shape \(1, 2\), is not one of the model"
        ),
    ):
        manager.save(1, {"t": TrainingState(model, optimizer)})


def test_wide_state_of_narrow_parameters_keeps_its_bits(tmp_path: Path) -> None:
    """Optimizer.load_state_dict would convert it to the parameters' dtype."""
    model, fresh = two_layers().bfloat16(), two_layers().bfloat16()
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (model, fresh))
    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {"momentum_buffer": torch.full(parameter.shape, 1 + number / 1000), "text": "x"}
    with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
        manager.save(1, {"t": TrainingState(model, optimizer)})
    restored_run(tmp_path, fresh, other)
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert_same(other.state[two], optimizer.state[one])


def test_a_number_of_steps_may_become_a_tensor(tmp_path: Path) -> None:
    """As it was in checkpoints of old releases of torch, whose optimizers counted with Python's numbers."""
    model, fresh = two_layers(), two_layers()
    first, second = torch.optim.Adam(model.parameters()), torch.optim.Adam(fresh.parameters())
    for parameter in model.parameters():
        moments = {name: torch.ones_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        first.state[parameter] = {"step": 7, **moments}
    with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
        manager.save(1, {"t": TrainingState(model, first)})
    restored_run(tmp_path, fresh, second)
    fresh(torch.ones(1, 2)).sum().backward()
    second.step()
    assert {float(state["step"]) for state in second.state.values()} == {8.0}


def test_what_a_training_state_was_not_given_is_told(tmp_path: Path) -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
        manager.save(1, {"t": TrainingState(model, optimizer, scheduler=scheduler)})
    fresh = two_layers()
    with (
        CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager,
        pytest.warns(UserWarning, match=r"also has optimizer, scheduler, which this TrainingState does not have"),
    ):
        manager.restore({"t": TrainingState(fresh)})
    assert_same(fresh.state_dict(), model.state_dict())


def test_state_that_goes_by_the_order_of_parameters(tmp_path: Path) -> None:
    model, fresh = two_layers(), two_layers()
    first = torch.optim.LBFGS(model.parameters())
    first.step(lambda: torch.tensor(1.0))  # without gradients
    with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
        manager.save(1, {"t": TrainingState(model, first)})
    with pytest.raises(CheckpointError, match="LBFGS keeps it by the order"):
        restored_run(tmp_path, fresh, torch.optim.LBFGS(list(fresh.parameters())[::-1]))


class WithMore(torch.optim.SGD):
    """An optimizer with entries of its own beside the two that all have."""

    more = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "more": self.more}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.more = state_dict["more"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "more"})


def test_entries_of_an_optimizers_own(tmp_path: Path) -> None:
    model, fresh = two_layers(), two_layers()
    first, second = (WithMore(one.parameters(), lr=0.1) for one in (model, fresh))
    first.more = 7
    first.state["global"] = {"count": 5}  # type: ignore[index]
    saved_run(tmp_path, model, first)
    restored_run(tmp_path, fresh, second)
    assert second.more == 7 and second.state["global"] == {"count": 5}  # type: ignore[index]


# --- names of parameters across wrappers ------------------------------------------------------------------------------


def _stepped(wrap: Any, lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wrap(two_layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


WRAPS: dict[str, Any] = {
    "plain": lambda model: model,
    "parallel": torch.nn.DataParallel,
    "wrapped": lambda model: checkpoint_wrapper(torch.nn.DataParallel(model)),
    "twice": lambda model: torch.nn.DataParallel(torch.nn.DataParallel(model)),
}


@pytest.mark.parametrize("how", ["load", "restore", "stock"])
@pytest.mark.parametrize(
    ("saved", "fresh"), [("plain", "parallel"), ("parallel", "plain"), ("wrapped", "parallel"), ("twice", "wrapped")]
)
def test_names_of_parameters_come_back_as_the_destination_has_them(
    tmp_path: Path, saved: str, fresh: str, how: str
) -> None:
    model, optimizer = _stepped(WRAPS[saved], 0.07)
    other, other_optimizer = _stepped(WRAPS[fresh], 0.01)
    if how == "restore":
        other_optimizer.state.clear()
    weights, options = get_state_dict(model, optimizer)
    state = dict(zip(("m", "o"), get_state_dict(other, other_optimizer), strict=True))
    own = list(state["o"]["param_groups"][0]["params"])
    if how == "restore":
        with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
            manager.save(1, {"m": weights, "o": options})
            for name in list(state["o"]["state"])[:2]:
                del state["o"]["state"][name]  # as of parameters that have none yet
            manager.restore(state)
    elif how == "stock":
        dcp.save({"m": weights, "o": options}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
        load(state, tmp_path, no_dist=True)
    else:
        save({"m": weights, "o": options}, tmp_path, no_dist=True)
        load(state, tmp_path, no_dist=True)
    assert state["o"]["param_groups"][0]["params"] == own
    assert sorted(state["o"]["state"]) == sorted(own)
    set_state_dict(other, other_optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


def test_names_of_named_parameters_follow_too(tmp_path: Path) -> None:
    model, other = torch.nn.DataParallel(two_layers()), two_layers()
    save({"m": model.state_dict(), "o": torch.optim.SGD(model.named_parameters()).state_dict()}, tmp_path, no_dist=True)
    state = {"m": other.state_dict(), "o": torch.optim.SGD(other.named_parameters()).state_dict()}
    load(state, tmp_path, no_dist=True)
    assert state["o"]["param_groups"][0]["param_names"] == [name for name, _ in other.named_parameters()]
