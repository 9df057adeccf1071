"""Values with `state_dict` and `load_state_dict` in dicts and lists of a state."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import CheckpointManager, NvcompWriter, TrainingState, async_save, load, save
from dcp_nvcomp.calls.values import try_values_of
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, MissingKeyError
from tests.distributed.launch import RankPool
from tests.states import assert_same


class Counter:
    """A value without tensors."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Part(enum.Enum):
    ONE = 1


def _model(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(2, 3)


def _saved(state: dict[str, Any], path: Path) -> None:
    save(state, path, no_dist=True)


def _saved_behind(state: dict[str, Any], path: Path) -> None:
    async_save(state, path, no_dist=True).upload_completion.result()


def _loaded(state: dict[str, Any], path: Path) -> None:
    load(state, path, no_dist=True)


def _run_saved(state: dict[str, Any], path: Path) -> None:
    with CheckpointManager(path, every=1, preemption_signals=()) as manager:
        manager.save(1, state)


def _restored(state: dict[str, Any], path: Path) -> None:
    with CheckpointManager(path, every=1, preemption_signals=()) as manager:
        manager.restore(state)


HOWS = pytest.mark.parametrize(
    ("write", "read"),
    [(_saved, _loaded), (_saved_behind, _loaded), (_run_saved, _restored)],
    ids=lambda one: one.__name__,
)


def _state(seed: int, count: int) -> tuple[dict[str, Any], list[Any]]:
    model, other, counter, inner, odd = _model(seed), _model(seed + 5), Counter(count), Counter(count), Counter(count)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (count + 1))
    parts = [model, other, counter, inner, odd, optimizer]
    state = {
        "parts": {"model": model, "list": [counter, {"x": [other]}], "w": torch.full((2,), float(count)), "n": count},
        "flat": [inner],
        "odd": collections.OrderedDict([(Part.ONE, odd), (7, count)]),
        "optimizers": collections.OrderedDict({"main": optimizer}),
    }
    return state, parts


@HOWS
def test_state_comes_back_at_any_depth(tmp_path: Path, write: Callable[..., None], read: Callable[..., None]) -> None:
    (state, parts), (fresh, others) = _state(0, 7), _state(1, 0)
    write(state, tmp_path)
    containers, tensor = (fresh["parts"], fresh["parts"]["list"], fresh["flat"]), fresh["parts"]["w"]
    read(fresh, tmp_path)
    for one, other in zip(parts, others, strict=True):
        assert_same(other.state_dict(), one.state_dict())
    assert (fresh["parts"], fresh["parts"]["list"], fresh["flat"]) == containers
    assert (
        fresh["parts"]["list"][0] is others[2] and fresh["flat"][0] is others[3] and fresh["odd"][Part.ONE] is others[4]
    )
    assert type(fresh["odd"]) is collections.OrderedDict and fresh["odd"][7] == 7 and fresh["parts"]["n"] == 7
    assert fresh["parts"]["w"] is tensor and tensor.tolist() == [7, 7]
    assert state["parts"]["model"] is parts[0] and state["flat"] == [parts[3]]  # nothing of what was saved is changed


@HOWS
@pytest.mark.parametrize("nest", ["dict", "list"])
def test_what_has_no_counterpart_is_an_error(
    tmp_path: Path, write: Callable[..., None], read: Callable[..., None], nest: str
) -> None:
    names: dict[str, Any] = {"dict": lambda **parts: parts, "list": lambda **parts: list(parts.values())}
    for number, (saved, fresh) in enumerate(
        [
            ({"a": Counter(1)}, {"a": Counter(), "b": Counter(5)}),
            ({"a": 1}, {"a": Counter(1), "b": Counter(5)}),
            ({}, {"b": Counter(5)}),
        ]
    ):
        path = tmp_path / f"{number}"
        write({"s": names[nest](**saved)}, path)
        with pytest.raises((MissingKeyError, CheckpointError), match=r"key '?s|There is no 's"):
            read({"s": names[nest](**fresh)}, path)


@pytest.mark.parametrize(
    "place", [lambda x: (x,), lambda x: {x}, lambda x: [(1, {"x": x})], lambda x: collections.deque([x])]
)
def test_places_that_cannot_be_given_back_are_named(tmp_path: Path, place: Callable[[Any], Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"A Counter, which has state_dict .* put it into a dict .*key 'a\.b"):
        save({"a": {"b": place(Counter())}}, tmp_path, no_dist=True)
    with pytest.raises(ConfigurationError, match="A TrainingState has to be at the top"):
        save({"a": {"b": TrainingState(_model(0))}}, tmp_path, no_dist=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [lambda x: {"x": x}, lambda x: [x], lambda x: {"x": [x, 1]}])
@pytest.mark.parametrize("read", [_loaded, _restored])
def test_whole_objects_of_earlier_releases_are_loaded(
    tmp_path: Path, place: Callable[[Any], Any], read: Callable[..., None]
) -> None:
    path = tmp_path / "step-1" if read is _restored else tmp_path
    model = _model(0)
    # DCP's planner pickles them to this day
    dcp.save({"s": place(model)}, storage_writer=NvcompWriter(path), no_dist=True)
    other = _model(1)
    read({"s": place(other)}, tmp_path)
    assert_same(other.state_dict(), model.state_dict())


def _saved_on_ranks(path: Path) -> str:
    try:
        save({"a": {"b": (Counter(),) if dist.get_rank() else 1}}, path)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_ranks_refuse(ranks: RankPool, tmp_path: Path) -> None:
    for words in ranks.run(_saved_on_ranks, tmp_path, world_size=2):
        assert words.startswith("ConfigurationError: A Counter") and "key 'a.b'" in words


@pytest.mark.parametrize("value", [torch.optim.AdamW, {"o": torch.optim.AdamW}, ({"o": torch.nn.Linear},)])
def test_a_class_is_no_stateful_value(tmp_path: Path, value: Any) -> None:
    state = {"cfg": value, "w": torch.zeros(3)}
    values, failure = try_values_of(state)
    assert values == state and failure is None
    save(state, tmp_path, no_dist=True)


class _Odd(dict[str, Any]):
    """A dict that does not do what a dict does."""

    def __init__(self, method: str) -> None:
        super().__init__(sampler=torch.optim.SGD([torch.zeros(1)], lr=0.1))
        self._method = method

    def items(self) -> Any:
        return self._do("items", super().items)

    def __copy__(self) -> Any:
        return self._do("copy", lambda: _Odd(self._method))

    def __setitem__(self, key: str, value: Any) -> None:
        self._do("set", lambda: super(_Odd, self).__setitem__(key, value))

    def _do(self, method: str, do: Callable[[], Any]) -> Any:
        if method == self._method:
            raise OSError("not today")
        return do()


@pytest.mark.parametrize("method", ["items", "copy", "set"])
def test_what_a_container_raises_is_returned_for_the_other_ranks(method: str) -> None:
    values, failure = try_values_of({"data": {"odd": _Odd(method)}})
    assert values == {} and type(failure) is CheckpointError
    assert failure.fqn == "data" and "OSError: not today" in str(failure) and isinstance(failure.__cause__, OSError)


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    loop: dict[str, Any] = {"w": torch.zeros(3)}
    loop["loop"] = [loop]
    with pytest.raises(ConfigurationError, match="nested too deeply, or contains itself"):
        save({"loop": loop}, tmp_path, no_dist=True)
    save({"loop": {"w": torch.zeros(3)}}, tmp_path, no_dist=True)
    with pytest.raises(ConfigurationError, match="nested too deeply, or contains itself"):
        load({"loop": loop}, tmp_path, no_dist=True)
