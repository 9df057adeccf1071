"""The same key with different values on several ranks: of what is not sharded a checkpoint keeps one rank's."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import re
import uuid
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dcp_nvcomp import CheckpointManager, async_save, save
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.saving.plans.fingerprints import fingerprints
from tests.distributed.launch import RankPool
from tests.states import State, assert_same


class _Loader:
    """What has a state of its own on each rank, under one key."""

    def state_dict(self) -> State:
        return {"position": dist.get_rank(), "buffer": torch.full((4,), float(dist.get_rank()))}

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


def _saved_twice(place: Path, call: str, state: State, **options: Any) -> None:
    """Save by a call; the second time it uses the plan of the first."""
    for _ in range(2):
        if call == "save":
            save(state, place / "a", **options)
        elif call == "async_save":
            async_save(state, place / "a", **options).upload_completion.result(60)
        else:
            with CheckpointManager(place / "run", every=1, preemption_signals=(), **options) as manager:
                manager.save(1, state)


def _differing(place: Path, call: str, on_difference: str) -> str:
    rank = dist.get_rank()
    state: State = {
        "loader": _Loader(),
        "large": torch.full((1 << 17,), float(rank)),
        "same": {"numbers": [1, 2.0, None, "x"], "large": torch.arange(1 << 17), "object": Path},
        f"of {rank}": rank,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _saved_twice(place, call, state, on_difference=on_difference)
        except ConfigurationError as error:
            return str(error)
    return "; ".join(str(one.message) for one in caught if "different values" in str(one.message))


@pytest.mark.parametrize("on_difference", ["warn", "error"])
@pytest.mark.parametrize("call", ["save", "async_save", "manager"])
def test_values_that_differ_between_ranks(ranks: RankPool, tmp_path: Path, call: str, on_difference: str) -> None:
    for told in ranks.run(_differing, tmp_path, call, on_difference, world_size=2):
        names = ("'loader.position' (rank 0 and 1)", "'loader.buffer' (rank 0 and 1)", "'large' (rank 0 and 1)")
        if on_difference == "error":
            assert all(name in told for name in names) and told.endswith("Nothing was saved."), told
        elif call == "save":  # once in these processes, whichever call meets it first
            assert all(name in told for name in names) and told.count("different values") == 1, told
        assert "'same" not in told, told
        assert "'of " not in told, told
    assert bool(list(tmp_path.glob("**/*.distcp"))) == (on_difference == "warn")


def test_fingerprints_of_equal_values_are_equal() -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(700, 300, generator=generator)
    pairs = [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"x", "y", "z"}, {"z", "y", "x"}),
        (wide, wide.t().contiguous().t()),
        (wide.bfloat16(), wide.clone().bfloat16()),
        (wide.numpy(), wide.clone().numpy()),
        (object(), object()),
        (float("nan"), float("nan")),
        (torch.zeros(0), torch.zeros(0)),
        ([1, (2, {3: b"x"})], [1, (2, {3: b"x"})]),
        (list(range(5000)), list(range(5000))),
        (_Setting(1, [2], object()), _Setting(1, [2], 5)),
        (collections.defaultdict(object, a=1, b=2), collections.defaultdict(object, b=2, a=1)),
        (slice(1, object()), slice(1, object())),
    ]
    for one, other in pairs:
        assert fingerprints({"x": one}) == fingerprints({"x": other}), one


def test_fingerprints_of_different_values_differ() -> None:
    values: list[object] = [
        *(None, 0, 1, 1.0, True, "1", b"1", 1j, (1,), [1], {1}, {1: 1}, {"1": 1}, [[1], 2], [[1, 2]], [1, [2]]),
        *(torch.zeros(3), torch.zeros(4), torch.zeros(3).int(), torch.ones(3), torch.float32, torch.float64),
        *(np.float32(1), np.zeros(3), np.zeros(4), np.ones(3)),
        *(torch.zeros(1 << 18), torch.ones(1 << 18), torch.zeros(1 << 18).half()),
        *(_Pair(0, torch.ones(1)), _Pair(1, torch.ones(1)), _Pair(0, torch.zeros(1)), (0, torch.ones(1))),
        *(_Setting(0, {}), _Setting(1, {}), _Setting(0, [_Setting(0, {})]), _Setting(0, [_Setting(1, {})])),
        *(collections.deque([1, 2]), collections.deque([2, 1]), collections.deque([1, 2], 5), collections.deque()),
        *(bytearray(b"a"), bytearray(b"b"), b"a", {1, 2}, frozenset({1, 2}), frozenset({1, 3}), {1, 3}),
        *(range(3), range(4), range(0, 3, 2), slice(3), slice(4), slice(0, 3), slice(0, 3, [1])),
        *(collections.Counter("aab"), collections.Counter("abb"), collections.defaultdict(int, a=2, b=1)),
        *(Path("a"), Path("b"), datetime.date(2024, 1, 2), datetime.date(2024, 1, 3), datetime.timedelta(1)),
        *(datetime.datetime(2024, 1, 2), datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc)),
        *(
            decimal.Decimal("0.1"),
            decimal.Decimal("0.10"),
            fractions.Fraction(1, 3),
            uuid.UUID(int=1),
            uuid.UUID(int=2),
        ),
        *(_Colour.RED, _Colour.BLUE, [_Colour.RED], [_Colour.BLUE]),
    ]
    found = [fingerprints({"x": value})["x"] for value in values]
    assert len(set(found)) == len(values)


class _Pair(NamedTuple):
    number: int
    tensor: torch.Tensor


@dataclass
class _Setting:
    number: int
    more: Any
    cached: Any = field(default=None, compare=False)


class _Colour(enum.Enum):
    RED = 1
    BLUE = 2


def _of_other_kinds(place: Path, call: str) -> str:
    values = [torch.ones(3), {1, 2}] if dist.get_rank() else [5, torch.zeros(2)]
    with pytest.raises(ConfigurationError) as caught:
        _saved_twice(place, call, {"it": {"is": values[0], "was": values[1]}, "same": torch.ones(2)})
    return str(caught.value)


@pytest.mark.parametrize("call", ["save", "async_save", "manager"])
def test_a_tensor_on_one_rank_and_an_object_on_another(ranks: RankPool, tmp_path: Path, call: str) -> None:
    for told in ranks.run(_of_other_kinds, tmp_path, call, world_size=3):
        assert "a tensor on one rank is a Python object on another" in told
        assert "'it.is' (rank 1 and 0)" in told and "'it.was' (rank 0 and 1)" in told and "'same" not in told
    assert not list(tmp_path.glob("**/.metadata"))


class _Color(enum.Enum):
    RED = 1


ONES = torch.ones(2)
# What each of two ranks saves, what its fresh state has, and what comes back.
MIXED: dict[str, list[tuple[Any, Any, Any]]] = {
    "nothing": [({"a": 1}, {"a": 0}, {"a": 1}), (None, None, None)],
    "number": [({"a": {"b": torch.ones(2)}}, {"a": {"b": torch.zeros(2)}}, {"a": {"b": torch.ones(2)}}), (5, 0, 5)],
    "list": [({"a": torch.ones(2)}, {"a": torch.zeros(2)}, {"a": torch.ones(2)}), ([ONES], [torch.zeros(2)], [ONES])],
    "plain_list": [({"a": 1}, {"a": 0}, {"a": 1}), ([1, 2, 3], [0], [1, 2, 3])],
    "lists": [([torch.ones(2), 3], [torch.zeros(2), 0], [torch.ones(2), 3]), ([1, 2, 3], [0], [1, 2, 3])],
    "enum": [({"a": 1}, {"a": 0}, {"a": 1}), ({_Color.RED: 2}, {_Color.RED: 0}, {_Color.RED: 2})],
    "fresh": [({"a": 1}, {}, {"a": 1}), (5, 0, 5)],
}
# What is saved so is not told, as no rank loses anything.
EMPTY: dict[str, list[tuple[Any, Any, Any]]] = {
    "objects": [({"a": 1}, {"a": 0}, {"a": 1}), ({}, {}, {"a": 1})],
    "tensors": [({"a": torch.ones(2)}, {"a": torch.zeros(2)}, {"a": torch.ones(2)}), ({}, {}, {})],
    "empty_list": [({"a": 1}, {"a": 0}, {"a": 1}), ([], [9], [])],
    "same_name": [({"0": ONES}, {"0": torch.zeros(2)}, {"0": ONES}), ([ONES], [torch.zeros(2)], [ONES])],
}


def _of_other_containers(place: Path, name: str, on_difference: str) -> tuple[list[str], Any]:
    own, fresh, _ = (MIXED | EMPTY)[name][dist.get_rank()]
    key, told = f"{name}_{on_difference}", []  # each set of keys is told once
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for how in ("warn", on_difference):  # the second one has the plan of the first
            try:
                with CheckpointManager(place, preemption_signals=(), on_difference=how) as manager:
                    manager.save(len(told), {"it": {key: own, "beside": 1}})
                told.append("")
            except ConfigurationError as error:
                told.append(str(error))
    told += [str(one.message) for one in caught if "in the same place" in str(one.message)]
    state = {"it": {key: fresh, "beside": 0}}
    with CheckpointManager(place, preemption_signals=()) as manager:
        assert manager.restore(state) is not None
    assert state["it"]["beside"] == 1 and set(state["it"]) == {key, "beside"}
    return told, state["it"][key]


@pytest.mark.parametrize("on_difference", ["warn", "error"])
@pytest.mark.parametrize("name", [*MIXED, *EMPTY])
def test_a_container_on_one_rank_and_another_kind_on_another(
    ranks: RankPool, tmp_path: Path, name: str, on_difference: str
) -> None:
    """It is said, and the kind comes back that each rank's own state has."""
    found = ranks.run(_of_other_containers, tmp_path, name, on_difference, world_size=2)
    for (told, restored), (_, _, wanted) in zip(found, (MIXED | EMPTY)[name], strict=True):
        first, second, *warned = told
        if name in EMPTY:
            assert not any(told), told
        else:
            assert first == "" and second.endswith("Nothing was saved." if on_difference == "error" else ""), told
            (words,) = warned
            assert re.search(rf"'it\.{name}\S*' on rank [01] and 'it\.{name}\S*' on rank [01]", words), words
        assert_same(restored, wanted)


class _Guarded:
    """An object that raises whatever it is asked for."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} today")


def test_values_that_are_hard_to_look_at_are_looked_at() -> None:
    found = fingerprints({"long": 1 << 20_000, "longer": (1 << 20_000) + 1, "guarded": _Guarded()})
    assert found["long"] != found["longer"]
