"""What the plan of DCP's default planner depends on: everything about a state but its values.

Two states of the same structure have the same plan, on this rank. A global plan follows from the structures of all
ranks and the planner's options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcp_nvcomp.calls.values import PLAIN_TENSORS


@dataclass(frozen=True)
class Structure:
    """A state without its values; equal to another one if both have the same plan.

    Attributes:
        entries: what is known of each value, in the order of the state.
        paths: where each value is in the nested state; None if it was not flattened.
        needs_grad: whether gradients were recorded, which shows in the properties of a DTensor's shard.
    """

    entries: tuple[tuple[Any, ...], ...]
    paths: Mapping[str, Any] | None
    needs_grad: bool


def structure_of(state: Mapping[str, Any], paths: Mapping[str, Any] | None) -> Structure | None:
    """Describe a flattened state.

    Examples:
        >>> structure_of({"w": torch.zeros(2)}, None) == structure_of({"w": torch.ones(2)}, None)
        True
        >>> structure_of({"w": torch.zeros(2)}, None) == structure_of({"w": torch.zeros(2).half()}, None)
        False
    """
    meshes: dict[int, tuple[Any, ...]] = {}
    entries = []
    needs_grad = torch.is_grad_enabled()
    with torch.no_grad():  # then a DTensor's shard is had without a node in the graph
        for fqn, value in state.items():
            if type(value) in PLAIN_TENSORS:
                entries.append((fqn, value.shape, *_properties(value)))
            elif type(value) is DTensor:
                mesh = meshes.get(id(value.device_mesh))
                if mesh is None:
                    mesh = meshes[id(value.device_mesh)] = _described(value.device_mesh)
                shard = value.to_local()
                entries.append(
                    (fqn, value.shape, mesh, value.placements, shard.shape, value.requires_grad, *_properties(shard))
                )
            elif isinstance(value, torch.Tensor) or hasattr(value, "__create_write_items__"):
                return None
            else:
                entries.append((fqn,))
    return Structure(tuple(entries), paths, needs_grad)


def _properties(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.layout, tensor.requires_grad, tensor.is_pinned()


def _described(mesh: DeviceMesh) -> tuple[Any, ...]:
    """Return what a plan depends on, without holding the mesh, and with it its process groups."""
    coordinate = mesh.get_coordinate()
    return (
        mesh.device_type,
        mesh.mesh_dim_names,
        tuple(mesh.mesh.shape),
        tuple(mesh.mesh.flatten().tolist()),
        None if coordinate is None else tuple(coordinate),
    )
