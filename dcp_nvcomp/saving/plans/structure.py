"""A state without its values: all that its plan depends on, so that each rank can compute the plans of all ranks.

    state --structure_of--> Structure: of this rank alone; equal to that of an earlier save if the plans are
                     |
                 described
                     v
                 Described: three parts, DTensors, plain tensors and objects, each of which is usually the same on all
                            ranks, and the rank's place in each mesh, which is not

From the parts and the places follows which shard of which tensor every rank has (layouts.py). `described` compares what
follows for this rank with what DCP plans for it, so each shard is checked by a rank that has it.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.tensor import DTensor, Replicate, Shard

from dcp_nvcomp.calls.values import PLAIN_TENSORS, Path
from dcp_nvcomp.format.metadata.paths import stored_paths
from dcp_nvcomp.saving.plans.layouts import Cut, shards_of
from dcp_nvcomp.saving.plans.meshes import Members, members_of

DTENSORS, PLAIN, OBJECTS = range(3)
_HAS_STRIDES: Final = "strides" in TensorProperties.__dataclass_fields__  # torch >= 2.15

Place = tuple[int, ...] | None  # of this rank in a mesh, one coordinate a dimension; None if it is not in it


@dataclass(frozen=True)
class Structure:
    keys: tuple[tuple[str, ...], ...]  # of each part
    kinds: tuple[tuple[int, ...], ...]  # of each key of a part, a number in `distinct`; none of objects
    distinct: tuple[tuple[Any, ...], ...]  # what the values of one kind have in common on this rank
    meshes: tuple[tuple[tuple[int, ...], Place, Members], ...]  # shape, this rank's place, and who is in it
    paths: Mapping[str, Path] | None
    empty: tuple[str, ...]  # keys of empty containers


def structure_of(state: Mapping[str, Any], paths: Mapping[str, Path] | None) -> Structure | None:
    """Return the structure of a flat state; None if it has values that plan for themselves."""
    keys: tuple[list[str], ...] = ([], [], [])
    kinds: tuple[list[int], ...] = ([], [], [])
    distinct: dict[tuple[Any, ...], int] = {}
    meshes: dict[Any, int] = {}
    numbers: dict[int, int] = {}  # of meshes by id, which are compared only once
    empty = list[str]()
    needs_grad = torch.is_grad_enabled()
    with torch.no_grad():  # then a DTensor's shard is had without a node in the graph
        for fqn, value in state.items():
            if type(value) in PLAIN_TENSORS:
                part, kind = PLAIN, (value.shape, *_properties(value, value.requires_grad))
            elif type(value) is DTensor:
                mesh, shard = value.device_mesh, value.to_local()
                if hasattr(shard, "__create_write_items__"):  # of several shards of its own, as torchrec has them
                    return None
                number = numbers.get(id(mesh))
                if number is None:
                    number = numbers[id(mesh)] = meshes.setdefault(mesh, len(meshes))
                requires_grad = value.requires_grad if needs_grad else shard.requires_grad
                part, kind = (
                    DTENSORS,
                    (value.shape, *_properties(shard, requires_grad), number, value.placements, shard.shape),
                )
            elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
                return None
            else:
                keys[OBJECTS].append(fqn)
                if isinstance(value, Mapping | list) and not value:
                    empty.append(fqn)
                continue
            keys[part].append(fqn)
            kinds[part].append(distinct.setdefault(kind, len(distinct)))
    places = tuple((tuple(mesh.shape), _place(mesh.get_coordinate()), _members(mesh)) for mesh in meshes)
    return Structure(tuple(map(tuple, keys)), tuple(map(tuple, kinds)), tuple(distinct), places, paths, tuple(empty))


def _properties(tensor: torch.Tensor, requires_grad: bool) -> tuple[Any, ...]:
    """Return what DCP notes of a tensor."""
    strides = tensor.stride() if _HAS_STRIDES and tensor.layout is torch.strided else None
    return tensor.dtype, tensor.layout, requires_grad, tensor.is_pinned(), strides


def _place(coordinate: Any) -> Place:
    return None if coordinate is None else tuple(map(int, coordinate))


def _members(mesh: Any) -> Members:
    return members_of(mesh.mesh.flatten().tolist())


@dataclass(frozen=True)
class TensorKind:
    """What all ranks know of some tensors."""

    properties: tuple[Any, ...]  # the state of DCP's TensorProperties
    shape: tuple[int, ...]  # of the whole tensor
    mesh: int | None = None  # the number of a DTensor's mesh
    cuts: tuple[Cut | None, ...] = ()  # by the dimensions of that


@dataclass(frozen=True)
class Part:
    """The values of a state that are DTensors, plain tensors, or objects."""

    keys: tuple[str, ...]
    kinds: tuple[int, ...]  # of each key, a number in `distinct`; none of objects
    distinct: tuple[TensorKind, ...]
    mesh_shapes: tuple[tuple[int, ...], ...]
    paths: Mapping[str, Any]  # as DCP stores them
    key_parts: Mapping[tuple[str | int, ...], Any]  # the parts of these that are keys of dicts, and no text
    empty: tuple[str, ...]  # keys of empty containers

    @cached_property
    def packed(self) -> bytes:
        return zlib.compress(pickle.dumps(self, protocol=4), 1)

    @staticmethod
    def unpacked(data: bytes) -> Part:
        part = pickle.loads(zlib.decompress(data))
        assert type(part) is Part
        return part

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _text(self) -> bytes:
        """What is equal for equal parts; pickles need not be, which have what is one object once."""
        values = self.__getstate__().values()
        return repr([list(value.items()) if isinstance(value, dict) else value for value in values]).encode(
            errors="surrogatepass"
        )

    @cached_property
    def digest(self) -> bytes:
        return hashlib.blake2b(self._text, digest_size=16).digest()

    @property
    def nbytes(self) -> int:
        """What it takes in memory, about."""
        return len(self._text)


@dataclass(frozen=True)
class Described:
    parts: tuple[Part, ...]
    places: tuple[Place, ...]  # of this rank in each mesh
    members: tuple[Members, ...]  # of each mesh


def described(structure: Structure, state: Mapping[str, Any]) -> Described | None:
    """Return what all ranks need to know of a structure; None if a shard of this rank is not what would follow."""
    examples: dict[int, str] = {}  # the key of a value of each kind
    for keys, kinds in zip(structure.keys, structure.kinds, strict=True):
        examples |= zip(kinds, keys, strict=False)
    known = [_kind(structure, number, state[fqn]) for number, fqn in sorted(examples.items())]
    parts = list[Part]()
    for keys, kinds in zip(structure.keys, structure.kinds, strict=True):
        renumbered: dict[TensorKind, int] = {}
        numbers: dict[int, int] = {}  # in this part, by those in the structure
        for kind in dict.fromkeys(kinds):
            found = known[kind]
            if found is None:
                return None
            numbers[kind] = renumbered.setdefault(found, len(renumbered))
        paths = {} if structure.paths is None else {fqn: structure.paths[fqn] for fqn in keys}
        shapes = tuple(shape for shape, *_ in structure.meshes) if not parts else ()
        empty = structure.empty if len(parts) == OBJECTS else ()
        parts.append(
            Part(keys, tuple([numbers[kind] for kind in kinds]), tuple(renumbered), shapes, *stored_paths(paths), empty)
        )
    _, places, members = zip(*structure.meshes, strict=True) if structure.meshes else ((), (), ())
    return Described(tuple(parts), places, members)


def _kind(structure: Structure, number: int, value: torch.Tensor) -> TensorKind | None:
    """Return what ranks know of the tensors of one kind, if it is what DCP plans for one of them."""
    shape = tuple(value.shape)
    planned = [item.tensor_data for item in create_default_local_save_plan({"": value}, False).items]
    if not isinstance(value, DTensor):
        offsets, sizes, kind = (0,) * len(shape), shape, TensorKind((), shape)
    else:
        mesh, placements, local_shape = structure.distinct[number][-3:]
        mesh_shape, place, _ = structure.meshes[mesh]
        cuts = _cuts(placements)
        if cuts is None:
            return None
        kind = TensorKind((), shape, mesh, cuts)
        if place is None:  # no rank's shard: those that are in the mesh know the properties
            properties = TensorProperties.create_from_tensor(value.to_local())
            return None if planned else replace(kind, properties=_state(properties))
        own = shards_of(shape, mesh_shape, cuts, np.array([place]))
        offsets, sizes = (tuple(values[0].tolist()) for values in own)
        if tuple(local_shape) != sizes:
            return None
    (data,) = planned
    assert data is not None
    if (tuple(data.chunk.offsets), tuple(data.chunk.sizes), tuple(data.size)) != (offsets, sizes, shape):
        return None
    return replace(kind, properties=_state(data.properties))


def _state(properties: TensorProperties) -> tuple[Any, ...]:
    state = properties.__getstate__()  # type: ignore[no-untyped-call]
    return tuple(state)


def _cuts(placements: Sequence[Any]) -> tuple[Cut | None, ...] | None:
    """Return how placements cut a tensor: the dimension, and of how many pieces a rank has a piece each."""
    cuts = list[Cut | None]()
    for placement in placements:
        if type(placement) is Replicate:
            cuts.append(None)
        elif type(placement) is Shard:
            cuts.append((placement.dim, 1))
        elif type(placement).__name__ == "_StridedShard":  # what FSDP2 makes of a tensor that TP has cut; not public
            cuts.append((placement.dim, placement.split_factor))
        else:  # a partial sum, or what a later torch or a user adds
            return None
    return tuple(cuts)
