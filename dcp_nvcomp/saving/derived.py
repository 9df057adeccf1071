"""Which shards of a rank are derived from others, as `derived=` of a writer names them.

    {"optimizer.master.*": "model.*"}   master weights, by key -> the weights that they were rounded to

A pair shares a data file, in which the weight comes first, so that a footer can name it as the base of its master
(docs/format.md, `derived`). What it takes beside the names is that a rank writes both shards, of the same region, as
`float32` and `bfloat16`; whether one was rounded to the other shows when they are encoded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.saving.data_files import planned_nbytes
from dcp_nvcomp.saving.encode.records import SMALL_NBYTES

_ANY = "*"


def check_derived(derived: Mapping[str, str]) -> dict[str, str]:
    """Return the option `derived`, checked.

    Raises:
        ConfigurationError: it does not map keys to keys, with a `*` in both or in none.
    """
    if not isinstance(derived, Mapping):
        raise ConfigurationError(f"derived={derived!r} must map keys of masters to those of weights.")
    for master, weight in derived.items():
        are_text = isinstance(master, str) and isinstance(weight, str)
        if not are_text or master.count(_ANY) != weight.count(_ANY) or master.count(_ANY) > 1:
            raise ConfigurationError(
                f"derived= maps {master!r} to {weight!r}: both must be keys, with one * in both or in none of them."
            )
    return dict(derived)


def weight_fqn(fqn: str, derived: Mapping[str, str]) -> str | None:
    """Return the key of the weight that a tensor is the master of, by the first that fits; None if it is no master.

    Examples:
        >>> weight_fqn("optimizer.master.layers.0.weight", {"optimizer.master.*": "model.*"})
        'model.layers.0.weight'
    """
    for master, weight in derived.items():
        before, star, after = master.partition(_ANY)
        if not star:
            if fqn == master:
                return weight
        elif len(fqn) >= len(before) + len(after) and fqn.startswith(before) and fqn.endswith(after):
            return weight.replace(_ANY, fqn[len(before) : len(fqn) - len(after)])
    return None


def pairs(items: Sequence[WriteItem], derived: Mapping[str, str]) -> dict[MetadataIndex, MetadataIndex]:
    """Map each master in a rank's plan to its weight, if that is there too."""
    if not derived:
        return {}
    weights = {(item.index.fqn, *_region(item)): item for item in items if _is(item, torch.bfloat16)}
    found: dict[MetadataIndex, MetadataIndex] = {}
    taken = set[MetadataIndex]()
    for item in items:
        fqn = weight_fqn(item.index.fqn, derived) if _is(item, torch.float32) else None
        weight = weights.get((fqn, *_region(item))) if fqn is not None else None
        if weight is not None and weight.index not in taken and planned_nbytes(weight) >= SMALL_NBYTES:
            found[item.index] = weight.index
            taken.add(weight.index)
    return found


def together(items: Iterable[WriteItem], pairs: Mapping[MetadataIndex, MetadataIndex]) -> list[tuple[WriteItem, ...]]:
    """Return the items, each weight followed by its master, all others alone."""
    items = list(items)
    if not pairs:
        return [(item,) for item in items]
    by_index = {item.index: item for item in items}
    masters = {weight: by_index[master] for master, weight in pairs.items()}
    return [
        (item, masters[item.index]) if item.index in masters else (item,) for item in items if item.index not in pairs
    ]


def _is(item: WriteItem, dtype: torch.dtype) -> bool:
    return item.tensor_data is not None and item.tensor_data.properties.dtype == dtype


def _region(item: WriteItem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    assert item.tensor_data is not None
    box = item.tensor_data.chunk
    return tuple(box.offsets), tuple(box.sizes)
