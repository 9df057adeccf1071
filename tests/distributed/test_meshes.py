"""One key on several meshes: replicas, or stages of a pipeline that name their layers alike, of which one is kept."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dcp_nvcomp import CheckpointManager, async_save, save
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.saving.plans import differences
from dcp_nvcomp.saving.plans import planner as planner_module
from tests.states import State

from .launch import RankPool, logged

PLANS = ("by the ranks", "by DCP", "by DCP, kept")
NOT_ALL = "by the ranks, and other values can't be looked at"


class Named(torch.Tensor):
    """A subclass: a state that has one is for DCP to plan."""


def _on(mesh: DeviceMesh, local: torch.Tensor, *placements: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False)


def _state(kind: str) -> State:
    """Two layers, of which each of two pairs of ranks has one half each, and what they have beside them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    pair, place = divmod(dist.get_rank(), 2)
    rows = torch.arange(200_000.0).reshape(4, -1) + place
    match kind:
        case "stages" | "stages with layers of their own":
            layer = _on(mesh["inner"], rows + pair, Shard(0))
        case "replicas":
            layer = _on(mesh["inner"], rows.clone(), Shard(0))
        case "copies":
            layer = _on(mesh["inner"], torch.arange(3) + pair, Replicate())  # type: ignore[assignment]
        case "one mesh":  # whose ranks torch keeps equal
            layer = _on(mesh, rows + pair, Replicate(), Shard(0))
        case _:
            raise AssertionError(kind)
    state = {"model": {"layers.0": layer, "norm": torch.ones(3)}, "step": 3}
    if kind == "stages with layers of their own":
        state["own"] = {f"layers.{pair}": _on(mesh["inner"], torch.ones(2), Shard(0))}
    return state


def _told(place: Path, call: str, kind: str, plans: str, on_difference: str) -> tuple[list[str], list[str], int]:
    """Save twice; return what was told, what was logged, and how many shards were compared."""
    state, looked = _state(kind), 0
    if plans == "by DCP":
        state["named"] = torch.ones(2).as_subclass(Named)
    words = list[str]()
    fingerprints = differences.shard_fingerprints

    def counted(state: Any, keys: Any) -> Any:
        nonlocal looked
        looked += len(keys)
        return fingerprints(state, keys)

    with pytest.MonkeyPatch.context() as patch, logged(20) as lines, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(differences, "shard_fingerprints", counted)
        if plans == NOT_ALL:
            patch.setattr(differences, "fingerprints", None)
        if plans == "by DCP, kept":
            patch.setattr(planner_module, "described", lambda *_: None)
        for number in range(2):
            patch.setattr("dcp_nvcomp.saving.plans.differences._already_told", set())
            try:
                if call == "save":
                    save(state, place / "a", on_difference=on_difference)  # type: ignore[arg-type]
                elif call == "async_save":
                    async_save(state, place / "a", on_difference=on_difference).upload_completion.result(60)  # type: ignore[arg-type]
                else:
                    with CheckpointManager(
                        place / "run",
                        every=1,
                        preemption_signals=(),
                        on_difference=on_difference,  # type: ignore[arg-type]
                    ) as manager:
                        manager.save(number, state).saved.result(60)
            except ConfigurationError as error:
                words.append(str(error))
    words += [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]
    return words, [line for line in lines if "not compared" in line], looked


def _assert_told(
    told: list[tuple[list[str], list[str], int]], on_difference: str, *, all_compared: bool = True
) -> None:
    for words, lines, looked in told:
        assert bool(lines) != all_compared
        assert looked
        assert len(words) == 2, "at the first save, and by the kept plan"
        for one in words:
            assert "have different shards under the same key" in one and "'model.layers.0' (rank 0 and 2" in one, one
            assert "own." not in one and "norm" not in one, one
            assert one.endswith("Nothing was saved.") == (on_difference == "error")


@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        *(("stages", plans) for plans in PLANS),
        ("stages with layers of their own", "by the ranks"),
        ("copies", "by the ranks"),
        pytest.param("stages", NOT_ALL, marks=pytest.mark.ci),
        pytest.param("stages with layers of their own", "by DCP", marks=pytest.mark.ci),
        pytest.param("copies", "by DCP, kept", marks=pytest.mark.ci),
    ],
)
def test_stages_that_name_their_layers_alike_are_told(ranks: RankPool, tmp_path: Path, kind: str, plans: str) -> None:
    told = ranks.run(_told, tmp_path, "save", kind, plans, "warn")
    _assert_told(told, "warn", all_compared=plans != NOT_ALL)


@pytest.mark.parametrize("plans", [PLANS[0], *(pytest.param(plans, marks=pytest.mark.ci) for plans in PLANS[1:])])
def test_on_difference_error_writes_nothing(ranks: RankPool, tmp_path: Path, plans: str) -> None:
    _assert_told(ranks.run(_told, tmp_path, "save", "stages", plans, "error"), "error")
    assert not list(tmp_path.glob("**/*.distcp")) and not list(tmp_path.glob("**/.metadata"))


@pytest.mark.parametrize(("call", "on_difference"), [("async_save", "warn"), ("manager", "error")])
def test_every_call_tells(ranks: RankPool, tmp_path: Path, call: str, on_difference: str) -> None:
    _assert_told(ranks.run(_told, tmp_path, call, "stages", "by the ranks", on_difference), on_difference)


@pytest.mark.parametrize("plans", PLANS[:2])
@pytest.mark.parametrize("kind", ["replicas", "one mesh"])
def test_replicas_are_no_difference(ranks: RankPool, tmp_path: Path, kind: str, plans: str) -> None:
    """Those on one mesh are not even looked at."""
    for words, lines, looked in ranks.run(_told, tmp_path, "save", kind, plans, "error"):
        assert not words and not lines
        assert bool(looked) == (kind == "replicas")
