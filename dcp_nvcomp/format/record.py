"""One record of a footer, which is untrusted: written as JSON, and read and checked against docs/format.md. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from reprlib import repr as shown  # short and shallow: what is shown may be long, and nested too deep for repr
from typing import Any, NamedTuple

from dcp_nvcomp.codecs.base import ELEMENT_TYPES, CodecChain, ElementType
from dcp_nvcomp.codecs.transforms.derived import BASE_DTYPE
from dcp_nvcomp.engines.content_hash import HASH_DIGITS
from dcp_nvcomp.errors import UnsupportedVersionError
from dcp_nvcomp.format.block_grid import BlockGrid

KIND_TENSOR = "tensor"
KIND_BYTES = "bytes"
KIND_TORCH_SAVE = "torch_save"
KIND_PACK = "pack"
_KINDS = (KIND_TENSOR, KIND_BYTES, KIND_TORCH_SAVE, KIND_PACK)

# So decoding takes less than 64 MiB in addition to the decoded block: planes, one of them unpacked, and a slice.
MAX_BLOCK_NBYTES = 16 << 20
# Slices and planes are padded to 16 bytes each, which may double a block, and its end to a multiple of 4096.
MAX_ENCODED_NBYTES = 2 * MAX_BLOCK_NBYTES + 8192
MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 62
MAX_INTEGER = 1 << 62  # of any other number


class Record(NamedTuple):
    """One record of a footer."""

    kind: str  # `tensor`, `bytes`, `torch_save` or `pack`
    fqn: str  # the state-dict key; empty for a pack
    shape: tuple[int, ...]  # shape of the shard
    offsets: tuple[int, ...]  # its first element in the global tensor
    global_shape: tuple[int, ...]  # the global tensor's shape
    element: ElementType
    # index of the pack it lies in and its first element there; None for a record with blocks of its own
    pack: tuple[int, int] | None = None
    grid: BlockGrid | None = None  # its blocks; None in a pack
    chain: CodecChain | None = None  # its codec chain; None in a pack
    first_block: int = 0  # row of its first block in the block table; 0 until the record is read
    block_count: int = 0  # number of its rows there
    base: int | None = None  # index of the record that its blocks are derived from; None if its codec needs none
    content_hash: str = ""  # of the shard's elements (content_hash.py); empty if it was not saved to be shared

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def uncompressed_nbytes(self) -> int:
        return self.elements * self.element.nbytes

    def in_blocks(self, grid: BlockGrid, chain: CodecChain | None = None) -> Record:
        """Return the record with its blocks; without a chain one is chosen when they are encoded."""
        # `_replace` would take twice as long, for thousands of tensors
        return Record(
            *(self.kind, self.fqn, self.shape, self.offsets, self.global_shape, self.element, self.pack),
            *(grid, chain, 0, grid.block_count, self.base, self.content_hash),
        )

    def to_json(self, place: int | tuple[int, int]) -> dict[str, Any]:
        """Return the record as a footer describes it; `parse_record` is the inverse."""
        row: dict[str, Any] = {}
        if self.kind in (KIND_BYTES, KIND_PACK):
            row["kind"] = self.kind
        if self.kind != KIND_PACK:
            row["fqn"] = self.fqn
        row["shape"] = self.shape
        if self.kind == KIND_TORCH_SAVE:
            row |= {"kind": self.kind, "offsets": self.offsets, "global_shape": self.global_shape}
        elif self.kind == KIND_TENSOR:
            if any(self.offsets):
                row["offsets"] = self.offsets
            if self.global_shape != self.shape:
                row["global_shape"] = self.global_shape
        if isinstance(place, tuple):
            row["pack"] = place
            return row
        if self.content_hash:
            row["hash"] = self.content_hash
        if self.base is not None:
            row["base"] = self.base
        assert self.grid is not None
        return row | {"dtype": self.element.name, "block_shape": self.grid.block_shape, "codec": place}


class Invalid(Exception):
    """A footer breaks a rule of docs/format.md; becomes a FormatError with the file's path."""


def _dimensions(value: Any, what: str, low: int = 0) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise Invalid(f"{what} must be a list of at most {MAX_DIMENSIONS} integers")
    for size in value:
        if type(size) is not int or not low <= size <= MAX_ELEMENTS:
            raise Invalid(f"{what} holds {shown(size)}, which is not an integer from {low} to 2^62")
    return tuple(value)


def text(description: dict[str, Any], key: str) -> str:
    """Return a text of a footer's JSON object."""
    value = description.get(key)
    if not isinstance(value, str):
        raise Invalid(f"{key} must be text")
    return value


def integer(description: dict[str, Any], key: str) -> int:
    """Return a number of a footer's JSON object."""
    value = description.get(key)
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        raise Invalid(f"{key} must be an integer from 0 to 2^62")
    return value


def _element_type(name: Any) -> ElementType:
    element = ELEMENT_TYPES.get(name) if isinstance(name, str) else None
    if element is None:
        raise Invalid(f"the dtype {shown(name)} is unknown")
    return element


def _region(description: dict[str, Any], shape: tuple[int, ...], kind: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and global shape of a record."""
    offsets = _dimensions(description["offsets"], "offsets") if "offsets" in description else None
    whole = _dimensions(description["global_shape"], "global_shape") if "global_shape" in description else None
    if kind in (KIND_BYTES, KIND_PACK):
        return (0,) * len(shape), shape
    if kind == KIND_TORCH_SAVE:
        # the shape is that of the payload; offsets and global shape are those of the tensor in it
        return offsets or (), whole or ()
    offsets = offsets if offsets is not None else (0,) * len(shape)
    whole = whole if whole is not None else shape
    if not len(offsets) == len(whole) == len(shape):
        raise Invalid("shape, offsets and global_shape differ in their number of dimensions")
    if any(offset + size > limit for offset, size, limit in zip(offsets, shape, whole, strict=True)):
        raise Invalid("the shard reaches out of its global tensor")
    return offsets, whole


def parse_record(description: Any, earlier: Sequence[Record], chains: Sequence[CodecChain], first_block: int) -> Record:
    """Check and return a record; the inverse of `Record.to_json`."""
    if not isinstance(description, dict):
        raise Invalid("it is not an object")
    kind = description.get("kind", KIND_TENSOR)
    if kind not in _KINDS:
        raise Invalid(f"its kind {shown(kind)} is unknown")
    if description.get("depends_on", []) != []:
        raise UnsupportedVersionError(
            "A record depends on another save, which this reader does not know. Update dcp-nvcomp."
        )
    fqn = "" if kind == KIND_PACK else text(description, "fqn")
    shape = _dimensions(description.get("shape"), "shape")
    if math.prod(shape) > MAX_ELEMENTS:
        raise Invalid("it has more than 2^62 elements")
    if kind != KIND_TENSOR and len(shape) != 1:
        raise Invalid(f"a {kind} record must have one dimension")
    offsets, whole = _region(description, shape, kind)
    if "pack" in description:
        pack, element = _parse_pack(description["pack"], earlier, math.prod(shape), kind)
        return Record(kind, fqn, shape, offsets, whole, element, pack, first_block=first_block)
    element = _element_type(description.get("dtype"))
    if kind in (KIND_BYTES, KIND_TORCH_SAVE) and element.name != "uint8":
        raise Invalid(f"a {kind} record must be uint8")
    block_shape = _dimensions(description.get("block_shape"), "block_shape", low=1)
    if len(block_shape) != len(shape):
        raise Invalid("block_shape and shape differ in their number of dimensions")
    grid = _grid(shape, block_shape)
    if math.prod(map(min, block_shape, shape)) * element.nbytes > MAX_BLOCK_NBYTES:
        raise Invalid(f"its blocks are larger than {MAX_BLOCK_NBYTES} bytes")
    codec = description.get("codec")
    if type(codec) is not int or not 0 <= codec < len(chains):
        raise Invalid(f"its codec {shown(codec)} is not in the list of codecs")
    if not chains[codec].array_to_bytes.fits(element):
        raise Invalid(f"its codec can't be that of {element.name} elements")
    chain, content_hash = chains[codec], _content_hash(description)
    base = _parse_base(description, earlier, grid) if chain.array_to_bytes.has_base else None
    return Record(
        kind, fqn, shape, offsets, whole, element, None, grid, chain, first_block, grid.block_count, base, content_hash
    )


def _parse_base(description: dict[str, Any], earlier: Sequence[Record], grid: BlockGrid) -> int:
    """Return which record one is derived from, whose blocks are those of its `grid`."""
    index = integer(description, "base")
    found = earlier[index] if index < len(earlier) else None
    if found is None or found.kind != KIND_TENSOR or found.element.name != BASE_DTYPE or found.grid != grid:
        raise Invalid(f"its base must be an earlier record of {BASE_DTYPE} with the same blocks")
    if found.chain is None or found.chain.needs_gpu:
        raise Invalid("its base must be one that every reader decodes")
    return index


def _content_hash(description: dict[str, Any]) -> str:
    """Return a record's hash; empty for one of another form, of which later versions may have some."""
    found = description.get("hash", "")
    return found if isinstance(found, str) and len(found) == HASH_DIGITS else ""


@lru_cache(maxsize=1024)
def _grid(shape: tuple[int, ...], block_shape: tuple[int, ...]) -> BlockGrid:
    """Return a grid of blocks, one object for all records of a shape."""
    return BlockGrid(shape, block_shape)


def _parse_pack(value: Any, earlier: Sequence[Record], elements: int, kind: str) -> tuple[tuple[int, int], ElementType]:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(number) is int and number >= 0 for number in value)
    ):
        raise Invalid("pack must be two non-negative integers")
    index, start = value
    if kind == KIND_PACK or index >= len(earlier) or earlier[index].kind != KIND_PACK:
        raise Invalid("pack must name an earlier pack")
    holder = earlier[index]
    if start + elements > holder.elements:
        raise Invalid("it reaches out of its pack")
    if kind in (KIND_BYTES, KIND_TORCH_SAVE) and holder.element.name != "uint8":
        raise Invalid(f"a {kind} record can't lie in a pack of {holder.element.name}")
    return (index, start), holder.element
