"""Which ranks make a replica, and what it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_nvcomp import save
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.format.data_file import find_data_file, read_footer
from dcp_nvcomp.runs.replicas import _crcs, digest_of, entries, joined, missing_on, whole_sets, with_entries
from dcp_nvcomp.storage.open import open_filesystem
from tests.distributed.launch import RankPool


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        ([], ((0,), (1,), (2,), (3,))),
        ([{0, 1}, {2, 3}], ((0, 1), (2, 3))),
        ([{0, 2}, {1, 3}], ((0, 2), (1, 3))),
        ([{3, 1}, {2, 3}], ((0,), (1, 2, 3))),
        ([{0, 1, 2, 3}], ((0, 1, 2, 3),)),
        ([{0, 1}, {2, 3}, {0}, {3, 0}], ((0, 1, 2, 3),)),
    ],
)
def test_joined(sets: list[set[int]], expected: tuple[tuple[int, ...], ...]) -> None:
    assert joined(4, sets) == expected
    assert joined(4, reversed(sets)) == expected


def _sets_of(dims: tuple[int, ...], kinds: str) -> set[frozenset[int]]:
    mesh = init_device_mesh("cpu", dims)
    placements = [Replicate() if kind == "r" else Shard(0) for kind in kinds]
    tensor = distribute_tensor(torch.ones(8, 8), mesh, placements, src_data_rank=None)
    return set(whole_sets([{"a": [tensor], "n": 1}, torch.ones(3)], range(dist.get_world_size())))


@pytest.mark.parametrize(
    ("dims", "kinds", "expected"),
    [
        ((4,), "s", [{0, 1, 2, 3}]),
        ((4,), "r", [{0}, {1}, {2}, {3}]),
        ((2, 2), "rs", [{0, 1}, {2, 3}]),
        ((2, 2), "sr", [{0, 2}, {1, 3}]),
        ((2, 2), "ss", [{0, 1, 2, 3}]),
        ((1, 2, 2), "rrs", [{0, 1}, {2, 3}]),
    ],
)
def test_ranks_that_hold_a_tensor_whole(
    ranks: RankPool, dims: tuple[int, ...], kinds: str, expected: list[set[int]]
) -> None:
    for found in ranks.run(_sets_of, dims, kinds, world_size=4):
        assert found == set(map(frozenset, expected))


def _beyond(_: Any = None) -> str:
    tensor = distribute_tensor(torch.ones(8), init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
    with pytest.raises(ConfigurationError) as caught:
        whole_sets([tensor], [0])
    return str(caught.value)


def test_tensors_on_ranks_that_are_not_in_the_run(ranks: RankPool) -> None:
    assert all("not in the process_group" in text for text in ranks.run(_beyond, world_size=2))


def test_a_sharded_tensor_says_what_to_use_instead() -> None:
    class ShardedTensor:
        local_shards = ()

    with pytest.raises(ConfigurationError, match="this state has a ShardedTensor: use fully_shard"):
        whole_sets([{"a": [ShardedTensor()]}], [0])


def test_what_a_replica_lacks() -> None:
    shared, first, second, last = ("w",), ("rng", "0"), ("rng", "1"), ("rng", "2")
    paths = [{shared: True, first: False}, {shared: True, second: False}, {shared: True, last: False}, {shared: True}]
    assert missing_on([(0, 1), (2, 3)], paths) == {first: 0, second: 1, last: 2}
    assert missing_on([(0, 1, 2, 3)], paths) == {}
    paths[3][second] = paths[3][first] = False
    assert missing_on([(0, 1), (2, 3)], paths) == {last: 2}


def test_replicas_must_hold_the_same_tensors() -> None:
    with pytest.raises(ConfigurationError, match=r"'layer', 1.*not on all of them"):
        missing_on([(0,), (1,)], [{("layer", 1): True}, {("layer", 2): True}])


def test_entries_are_added_beside_those_that_are_there() -> None:
    state: dict[str, Any] = {"a": {"b": {"c": 1}}, "empty": {}, "list": [1, {"x": 2}]}
    added = with_entries(state, {("a", "b", "d"): 2, ("a", "e"): 3, ("new", "f"): 4})
    assert added == {"a": {"b": {"c": 1, "d": 2}, "e": 3}, "empty": {}, "list": [1, {"x": 2}], "new": {"f": 4}}
    assert state == {"a": {"b": {"c": 1}}, "empty": {}, "list": [1, {"x": 2}]}, "the caller's is unchanged"
    assert dict(entries(state)) == {("a", "b", "c"): 1, ("empty",): {}, ("list",): [1, {"x": 2}]}


def test_digests_tell_paths_and_kinds_apart() -> None:
    seen = [{("a", "b"): True}, {("a", "b"): False}, {("a.b",): True}, {("a", 1): True}, {("a", "1"): True}]
    assert len({digest_of(paths) for paths in seen}) == len(seen)


def _crcs_of(path: Path, state: dict[str, Any]) -> dict[str, int]:
    """Return what a replica would compare of a state: checksums by the keys that they are of."""
    save(state, path, no_dist=True)
    (file,) = path.glob("*.distcp")
    filesystem = open_filesystem(path)
    footer = read_footer(filesystem, find_data_file(filesystem, file.name, file.stat().st_size))
    return {" ".join(sorted(fqns)): crc for _, fqns, crc in _crcs(footer)}


def test_tensors_are_compared_and_objects_are_not(tmp_path: Path) -> None:
    state = {"large": torch.ones(300, 300), "small": torch.arange(9), "bytes": torch.ones(3, dtype=torch.uint8)}
    first = _crcs_of(tmp_path / "1", {**state, "host": ("node-a",), "seconds": 0.5})
    assert first == _crcs_of(tmp_path / "2", {**state, "host": ("node-b",), "seconds": 1.5})
    assert first.keys() == {"large", "small", "bytes"}
    other = _crcs_of(tmp_path / "3", {**state, "bytes": torch.zeros(3, dtype=torch.uint8)})
    assert {key for key, crc in first.items() if other[key] != crc} == {"bytes"}
