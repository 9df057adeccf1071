"""Places of values in the nested state, as `.metadata` has them."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from dcp_nvcomp.calls.values import flatten, nested
from dcp_nvcomp.errors import CheckpointError, ConfigurationError
from dcp_nvcomp.format.metadata.paths import has_keys, merged_paths, paths_of, paths_to_store, split_paths


def metadata_of(planner_data: Any, *fqns: str) -> Metadata:
    return Metadata({fqn: BytesStorageMetadata() for fqn in fqns}, planner_data=planner_data)


def test_keys_are_stored_beside_the_paths_of_dcp() -> None:
    flat = flatten({"a": {7: 1, "b": [{None: 2}]}, ".keys": 3})
    stored = paths_to_store(flat.paths)
    assert stored["a.7"] == ("a", "7") and stored["a.b.0.None"] == ("a", "b", 0, "None")
    assert stored["..keys"] == ((("a", "7"), 7), (("a", "b", 0, "None"), None))  # a value has the usual name
    metadata = metadata_of(stored, *flat.values)
    assert has_keys(metadata) and paths_of(metadata) == flat.paths


@pytest.mark.parametrize(
    "noted",
    [
        None,
        5,
        "text",
        (1, 2),
        ((("a", "7"), "x"),),
        ((("a", "7"), 8),),
        ((("a", 7), 7),),
        (((), 7),),
        ((["a", "7"], 7),),
        ((("a", "7"), [7]),),
        ((("a", "7"),),),
    ],
)
def test_what_is_noted_of_keys_counts_only_if_it_fits(noted: Any) -> None:
    assert paths_of(metadata_of({"a.7": ("a", "7"), ".keys": noted}, "a.7")) == {"a.7": ("a", "7")}


def test_paths_that_no_state_has_cost_little() -> None:
    long = ("a",) * 20_000
    metadata = metadata_of({"a": long, ".keys": ((("a", "7"), 7),)}, "a")
    assert paths_of(metadata) == {"a": ("a",)}


@pytest.mark.parametrize(("one", "other"), [({7: 1}, {"7": 1}), ({"7": 1}, {7: 1}), ({True: 1}, {"True": 1})])
def test_keys_of_ranks_that_look_alike_are_refused(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    parts = [paths_to_store(flatten({"a": state}).paths) for state in (one, other)]
    fqns = {fqn for part in parts for fqn in part if fqn != ".keys"}
    with pytest.raises(ConfigurationError, match="look alike") as caught:
        merged_paths([split_paths(part, fqns) for part in parts], fqns)
    assert caught.value.fqn in fqns
    own = {fqn for fqn in parts[0] if fqn != ".keys"}
    assert merged_paths([split_paths(parts[0], own)] * 2, own) == parts[0]


def test_ranks_may_have_other_keys_of_one_dict() -> None:
    parts = [paths_to_store(flatten({"a": state}).paths) for state in ({7: 1, "b": 2}, {8: 1, "b": 2})]
    fqns = {"a.7", "a.8", "a.b"}
    merged = merged_paths([split_paths(part, fqns) for part in parts], fqns)
    assert merged == {"a.7": ("a", "7"), "a.8": ("a", "8"), "a.b": ("a", "b"), ".keys": merged[".keys"]}
    assert dict(merged[".keys"]) == {("a", "7"): 7, ("a", "8"): 8}


@pytest.mark.parametrize("paths", [{"a": ("a",), "a.b": ("a", "b")}, {"a.b": ("a", "b"), "a": ("a",)}])
def test_a_value_where_a_container_has_to_be(paths: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="value"):
        nested(paths, {"a": {"plain": "dict"}, "a.b": 1})
