"""Any nested state comes back as it was saved, keys of all kinds included, by each way in and out; or it is refused."""

from __future__ import annotations

import enum
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp import (
    CheckpointManager,
    ConfigurationError,
    convert,
    load,
    load_compressed_checkpoint,
    save,
    save_compressed_checkpoint,
    tools,
)
from dcp_nvcomp.reading.comparison import is_same
from tests.effort import examples
from tests.states import blank


class Color(enum.Enum):
    RED = 1


texts = st.text("ab.0[]é", max_size=4)
numbers = st.integers(-3, 12) | st.booleans() | st.floats(allow_nan=False) | st.none()
keys = st.one_of(
    texts,
    numbers,
    st.binary(max_size=2),
    st.tuples(numbers | texts, texts),
    st.sampled_from([Color.RED, frozenset({1})]),
)
tensors = st.tuples(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]), st.integers(0, 5)).map(
    lambda drawn: torch.arange(drawn[1]).to(drawn[0])
)
leaves = st.one_of(
    tensors,
    numbers,
    texts,
    st.binary(max_size=3),
    st.just({}),
    st.just([]),
    st.tuples(numbers, tensors),
    st.sampled_from([Color.RED, torch.float16]),
)
values = st.recursive(
    leaves,
    lambda inner: st.dictionaries(keys, inner, max_size=4) | st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=12,
)
states = st.dictionaries(st.sampled_from(["a", "b"]), values, min_size=1)


def saved(state: dict[str, Any], path: str) -> bool:
    """Save, or be refused with the name of a key."""
    return refusal(lambda: save(state, path, no_dist=True)) is None


def refusal(call: Callable[[], object]) -> str | None:
    """Return the key for which a call is refused; None if it is not."""
    try:
        call()
    except ConfigurationError as error:
        assert error.fqn is not None  # noqa: PT017
        return error.fqn
    return None


@pytest.mark.parametrize("found", [{}, {0: None}, {"": None, 0: None}, {"0": None}, {0: 5}, [None]], ids=str)
def test_a_list_comes_back_where_a_dict_has_its_places_as_keys(tmp_path: Path, found: Any) -> None:
    with CheckpointManager(tmp_path, every=1, preemption_signals=()) as manager:
        manager.save(1, {"a": [torch.ones(2)]}).saved.result(60)
        state = {"a": found}
        manager.restore(state)
    assert is_same(state, {"a": [torch.ones(2)]})


@settings(max_examples=examples(400), deadline=None)
@given(states)
def test_a_load_fills_a_state_of_the_same_keys(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as path:
        if saved(state, path):
            found = blank(state)
            load(found, path, no_dist=True)
            assert is_same(found, state)


@pytest.mark.ci
@settings(max_examples=examples(200), deadline=None)
@given(states, st.data())
def test_a_restore_brings_back_what_was_saved_into_any_containers(state: dict[str, Any], data: st.DataObject) -> None:
    found = {key: data.draw(values.filter(lambda value: isinstance(value, dict | list))) for key in state}
    wanted = {key: value for key, value in state.items() if isinstance(value, dict | list) and value}
    found = {key: without_tensors(found[key]) for key in wanted}
    with tempfile.TemporaryDirectory() as path:
        if not saved(wanted, f"{path}/alone"):
            return
        with CheckpointManager(f"{path}/run", every=1, preemption_signals=()) as manager:
            manager.save(1, wanted).saved.result(60)
            manager.restore(found)
        assert is_same(found, wanted)


def without_tensors(value: Any) -> Any:
    """Return a destination whose tensors are not missed: those of a module would be."""
    if isinstance(value, dict):
        return {key: without_tensors(one) for key, one in value.items()}
    if isinstance(value, list):
        return [without_tensors(one) for one in value]
    return 0 if isinstance(value, torch.Tensor) else value


@settings(max_examples=examples(200), deadline=None)
@given(states)
def test_converted_there_and_back(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as path:
        if not saved(state, f"{path}/first"):
            return
        if has_kinds_of_its_own(state):  # which no file that runs no code has
            return
        convert(f"{path}/first", f"{path}/state.pt")
        assert is_same(torch.load(f"{path}/state.pt", weights_only=False), state)
        for source, target, kind in (
            ("state.pt", "second", "dcp-nvcomp"),
            ("second", "stock", "dcp"),
            ("stock", "third", "dcp-nvcomp"),
        ):
            convert(f"{path}/{source}", f"{path}/{target}", to=kind)  # type: ignore[arg-type]
        assert tools.compare(f"{path}/first", f"{path}/third").is_equal
        found = blank(state)
        load(found, f"{path}/third", no_dist=True)
        assert is_same(found, state)


def has_kinds_of_its_own(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_kinds_of_its_own, [*value, *value.values()]))
    if isinstance(value, list | tuple | frozenset):
        return isinstance(value, frozenset) or any(map(has_kinds_of_its_own, value))
    return isinstance(value, enum.Enum)


@settings(max_examples=examples(200), deadline=None)
@given(states)
def test_one_file(state: dict[str, Any]) -> None:
    if has_kinds_of_its_own(state):
        return
    with tempfile.TemporaryDirectory() as path:
        save_compressed_checkpoint(state, f"{path}/one")
        assert is_same(load_compressed_checkpoint(f"{path}/one"), state)


@settings(max_examples=examples(100), deadline=None)
@given(st.dictionaries(keys.filter(lambda key: not isinstance(key, enum.Enum | frozenset)), tensors, min_size=1))
def test_tensors_by_way_of_safetensors(values: dict[Any, torch.Tensor]) -> None:
    state = {"w": {"inner": values}}
    with tempfile.TemporaryDirectory() as path:
        if not saved(state, f"{path}/first"):
            return
        if refusal(lambda: convert(f"{path}/first", f"{path}/flat.safetensors")) is not None:
            return  # for a key that is infinite
        convert(f"{path}/flat.safetensors", f"{path}/state.pt")
        assert is_same(torch.load(f"{path}/state.pt", weights_only=False), state)


def test_a_stock_checkpoint_fills_the_keys_of_the_destination(tmp_path: Any) -> None:
    from torch.distributed.checkpoint import save as stock_save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stock_save({"seen": {0: 1000, 7: 2000, (1, 2): 3, "x": 4}}, checkpoint_id=str(tmp_path), no_dist=True)
    found: dict[str, Any] = {"seen": {0: 0, "7": 0, (1, 2): 0, "x": 0}}
    load(found, tmp_path, no_dist=True)
    assert found == {"seen": {0: 1000, "7": 2000, (1, 2): 3, "x": 4}}


@pytest.mark.parametrize(
    ("saved_key", "own_key"), [(0, "0"), ("0", 0), (True, "True"), ((1, 2), "(1, 2)"), (None, "None")]
)
def test_a_key_that_only_looks_alike_is_another_key(tmp_path: Any, saved_key: Any, own_key: Any) -> None:
    save({"seen": {saved_key: 1}}, tmp_path, no_dist=True)
    with pytest.raises(KeyError, match="of type"):
        load({"seen": {own_key: 0}}, tmp_path, no_dist=True)
