"""Writes `.metadata` from arrays: what is the same for every shard is a template, filled in by numpy.

    Metadata
      dcp_nvcomp_shared    what rows refer to: files, properties, sizes, shards; first, and an attribute that no reader
                           looks at
      state_dict_metadata  of each tensor its shards, 5 bytes each
      planner_data
      storage_data         a row of 36 bytes for each shard, 38 or 40 where there are more than 65,536 of a kind
      storage_meta, version, the summary

It is the pickle that DCP would write but for the order of things and for what is shared: `pickle.loads` makes DCP's
Metadata of it, one object for each shard, and parse_metadata the same.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import io
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_nvcomp.format.metadata.shards import plain_file
from dcp_nvcomp.format.metadata.summary import SUMMARY_ATTRIBUTE, Summary, trailer_of

Ints = npt.NDArray[np.int64]
_RowPart = bytes | tuple[str, str]  # what is the same in all rows, or a field: its name and numpy's code for it

_SHARED: Final = "dcp_nvcomp_shared"
_BATCH: Final = 1 << 16  # rows between two marks, about
_SAMPLED_SHARDS: Final = 2
_BYTE, _WORD, _INT = 1 << 8, 1 << 16, 1 << 31
_SLOT: Final = np.dtype([("opcode", "S1"), ("slot", "<u4")])  # LONG_BINGET


@dataclass(frozen=True, eq=False)
class TensorShards:
    """The shape, properties and shards that some tensors have in common."""

    properties: TensorProperties
    shape: tuple[int, ...]
    offsets: Ints  # (shards, dimensions)
    sizes: Ints


@dataclass(frozen=True, eq=False)
class MetadataArrays:
    """The metadata of a save. What there is of each shard is in the order of the keys, and of the shards of each."""

    keys: Sequence[str]
    tensors: Sequence[TensorShards | None]  # of each key; None for an object, which counts as one shard
    hints: Sequence[Ints]  # of each key: the places of its shards in DCP's list of them
    planner_data: Mapping[str, Any] | None
    files: Sequence[tuple[str, int, int, int]]  # each a DataFileRef, or a plain tuple of the same
    file_numbers: npt.NDArray[Any]  # of each shard, in `files`
    records: npt.NDArray[Any]  # of each shard
    storage_meta: StorageMeta
    version: str | None


def unfolded(metadata: MetadataArrays) -> Metadata:
    """Return DCP's metadata, an object for each shard."""
    items: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    stored = zip(metadata.file_numbers.tolist(), metadata.records.tolist(), strict=True)
    for key, tensor, hints in zip(metadata.keys, metadata.tensors, metadata.hints, strict=True):
        if tensor is None:
            items[key] = BytesStorageMetadata()
            file, record = next(stored)
            places[MetadataIndex(key)] = (metadata.files[file], record)
            continue
        shards: list[Any] = [None] * len(hints)
        for hint, offsets, sizes in zip(hints.tolist(), tensor.offsets.tolist(), tensor.sizes.tolist(), strict=True):
            shards[hint] = shard = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            file, record = next(stored)
            places[MetadataIndex(key, shard.offsets, hint)] = (metadata.files[file], record)
        properties = dataclasses.replace(tensor.properties)
        items[key] = TensorStorageMetadata(properties, torch.Size(tensor.shape), shards)
    planner_data = None if metadata.planner_data is None else dict(metadata.planner_data)
    return Metadata(items, planner_data, places, metadata.storage_meta, metadata.version)


def sample_of(metadata: MetadataArrays) -> MetadataArrays:
    """Return metadata with few of the keys and shards, which a reader refuses if it refuses the whole but for paths."""
    numbers: dict[Any, int] = {}
    for number, tensor in enumerate(metadata.tensors):
        numbers.setdefault(id(tensor), number)
    chosen = list(numbers.values())
    tensors, hints = list[TensorShards | None](), list[Ints]()
    for number in chosen:
        tensor = metadata.tensors[number]
        few = slice(0, _SAMPLED_SHARDS)
        if tensor is not None:
            tensor = dataclasses.replace(tensor, offsets=tensor.offsets[few], sizes=tensor.sizes[few])
        tensors.append(tensor)
        hints.append(np.arange(len(metadata.hints[number][few])))
    count = sum(map(len, hints))
    return dataclasses.replace(
        metadata,
        keys=[metadata.keys[number] for number in chosen],
        tensors=tensors,
        hints=hints,
        planner_data=None,
        file_numbers=np.arange(count) % max(len(metadata.files), 1),
        records=np.zeros(count, np.int64),
    )


def serialize_arrays(metadata: MetadataArrays, summary: Summary | None = None) -> bytes:
    """Return the bytes of `.metadata`."""
    out = _Pickle()
    out.put(b"\x80\x04")
    out.new(Metadata)
    out.put(b"}(")
    out.value(_SHARED)
    out.put(b"](")
    for name in ("fqn", "index", "offset", "properties", "size", "chunks", "offsets", "sizes"):
        out.value(name)  # first, so that a row names them in two bytes
    out.global_of(MetadataIndex)
    out.global_of(TensorStorageMetadata)
    files = np.array([out.kept(plain_file(file)) for file in metadata.files], "<u4")
    shared: dict[int, _SharedSlots] = {}
    for tensor in metadata.tensors:
        if tensor is not None and id(tensor) not in shared:
            shared[id(tensor)] = _shared_slots(out, tensor)
    out.put(b"e")
    out.value("state_dict_metadata")
    out.put(b"}(")
    key_slots = np.empty(len(metadata.keys), "<u4")
    lists: dict[tuple[int, int], bytes] = {}
    for number, (key, tensor, hints) in enumerate(zip(metadata.keys, metadata.tensors, metadata.hints, strict=True)):
        key_slots[number] = out.kept(key)
        if tensor is None:
            out.value(BytesStorageMetadata())
            continue
        slots = shared[id(tensor)]
        if (id(tensor), id(hints)) not in lists:
            rows = np.empty(len(hints), _SLOT)
            rows["opcode"] = b"j"
            rows["slot"][hints] = slots.shards
            lists[id(tensor), id(hints)] = rows.tobytes()
        out.new(TensorStorageMetadata)
        out.put(b"}(")
        for name, slot in (("properties", slots.properties), ("size", slots.size)):
            out.value(name)
            out.put(_get(slot))
        out.value("chunks")
        out.put(b"](" + lists[id(tensor), id(hints)] + b"eub")
    out.put(b"u")
    out.value("planner_data")
    out.value(metadata.planner_data)
    out.value("storage_data")
    out.put(b"}")
    _put_places(out, metadata, shared, key_slots, files)
    out.value("storage_meta")
    out.instance(metadata.storage_meta)
    out.value("version")
    out.value(metadata.version)
    text = None if summary is None else summary.to_text()
    if text is not None:
        out.value(SUMMARY_ATTRIBUTE)
        out.value(text)
    out.put(b"ub.")
    return out.taken()


@dataclass(frozen=True, eq=False)
class _SharedSlots:
    properties: int
    size: int
    shards: npt.NDArray[np.uint32]
    offsets: npt.NDArray[np.uint32]


def _shared_slots(out: _Pickle, tensor: TensorShards) -> _SharedSlots:
    properties = out.kept(tensor.properties)
    size = out.kept(torch.Size(tensor.shape))
    shards, places = [], []
    for offsets, sizes in zip(tensor.offsets.tolist(), tensor.sizes.tolist(), strict=True):
        out.new(ChunkStorageMetadata)
        out.put(b"}(")
        out.value("offsets")
        places.append(out.kept(torch.Size(offsets)))
        out.value("sizes")
        out.value(torch.Size(sizes))
        out.put(b"ub")
        shards.append(out.memoized())
    return _SharedSlots(properties, size, np.array(shards, "<u4"), np.array(places, "<u4"))


def _put_places(
    out: _Pickle,
    metadata: MetadataArrays,
    shared: Mapping[int, _SharedSlots],
    key_slots: npt.NDArray[np.uint32],
    files: npt.NDArray[np.uint32],
) -> None:
    """Put the rows, of so many keys at a time that they take little memory beside what is written."""
    begin_row: list[_RowPart] = [out.slot_of(MetadataIndex) + b")\x81}(" + out.text_of("fqn") + b"j", ("fqn", "<u4")]
    hint = _number("index", max(map(len, metadata.hints), default=0))
    of_offset: list[_RowPart] = [*hint, out.text_of("offset") + b"j", ("offset", "<u4")]
    record = _number("record", int(metadata.records.max(initial=0)))
    end_row: list[_RowPart] = [b"ubj", ("file", "<u4"), *record, b"\x86"]
    of_tensors = [*begin_row, out.text_of("index"), *of_offset, *end_row]
    of_objects = [*begin_row, out.text_of("index") + b"N", *end_row]
    starts = np.concatenate([[0], np.cumsum([len(hints) for hints in metadata.hints])]).astype(np.int64)
    begin = 0
    while begin < len(metadata.keys):
        end = max(begin + 1, int(np.searchsorted(starts, starts[begin] + _BATCH, side="right")) - 1)
        tensors, hints = metadata.tensors[begin:end], metadata.hints[begin:end]
        shards, counts = slice(starts[begin], starts[end]), np.diff(starts[begin : end + 1])
        is_object = np.repeat(np.array([tensor is None for tensor in tensors], np.bool_), counts)
        none = np.zeros(1, np.uint32)
        columns = {
            "fqn": np.repeat(key_slots[begin:end], counts),
            "index": np.concatenate(hints),
            "offset": np.concatenate([none if tensor is None else shared[id(tensor)].offsets for tensor in tensors]),
            "file": files[metadata.file_numbers[shards]],
            "record": metadata.records[shards],
        }
        for template, chosen in ((of_tensors, ~is_object), (of_objects, is_object)):
            rows = _filled(template, {name: column[chosen] for name, column in columns.items()})
            if len(rows):
                out.put(b"(" + rows.tobytes() + b"u")
        begin = end


def _number(name: str, most: int) -> tuple[bytes, tuple[str, str]]:
    """Return the opcode for numbers of a row, and the field that follows it."""
    assert 0 <= most < _INT
    return (b"M", (name, "<u2")) if most < _WORD else (b"J", (name, "<i4"))


def _filled(template: Sequence[_RowPart], columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return rows: the template's bytes, and columns in its fields."""
    fields = [
        (f"constant{at}", f"S{len(part)}") if isinstance(part, bytes) else part for at, part in enumerate(template)
    ]
    rows = np.empty(len(columns["fqn"]), np.dtype(fields))
    for (name, _), part in zip(fields, template, strict=True):
        rows[name] = part if isinstance(part, bytes) else columns[name]
    return rows


class _Pickle:
    """Opcodes of a pickle. Texts, sizes and names that were put are named by their memo slots after that."""

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._slots: dict[Any, int] = {}
        self._count = 0

    def put(self, data: bytes) -> None:
        self._file.write(data)

    def taken(self) -> bytes:
        """Return all of it, followed by its CRC."""
        with self._file.getbuffer() as data:
            trailer = trailer_of(data)
        self.put(trailer)
        return self._file.getvalue()  # without a copy

    def memoized(self) -> int:
        """Give what was put last a slot."""
        self.put(b"\x94")
        self._count += 1
        return self._count - 1

    def text_of(self, text: str) -> bytes:
        return _get(self._slots[text])

    def slot_of(self, kind: type) -> bytes:
        return _get(self._slots[kind])

    def kept(self, value: Any) -> int:
        """Put a value that rows refer to; return its slot."""
        if type(value) in (str, torch.Size):
            self.value(value)
            return self._slots[_key(value)]
        self.value(value)
        return self.memoized()

    def new(self, kind: type) -> None:
        """Put a new object of a class, without its attributes."""
        self.global_of(kind)
        self.put(b")\x81")

    def instance(self, value: Any) -> None:
        """Put an object of a class with its attributes."""
        self.new(type(value))
        self.value(vars(value) if "__getstate__" not in vars(type(value)) else value.__getstate__())
        self.put(b"b")

    def global_of(self, named: Any) -> None:
        self._once(named, lambda: self._global(named.__module__, named.__qualname__))

    def _global(self, module: str, name: str) -> None:
        self.value(module)
        self.value(name)
        self.put(b"\x93")

    def _once(self, key: Any, put: Any) -> None:
        slot = self._slots.get(key)
        if slot is not None:
            self.put(_get(slot))
            return
        put()
        self._slots[key] = self.memoized()

    def value(self, value: Any) -> None:
        kind = type(value)
        if kind is str or kind is torch.Size:
            self._once(_key(value), lambda: self._text(value) if kind is str else self._call(torch.Size, tuple(value)))
        elif value is None or kind is bool:
            self.put({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif kind is int:
            self._integer(value)
        elif kind is float:
            self.put(b"G" + struct.pack(">d", value))
        elif kind is bytes:
            self.put(
                (b"C" + bytes([len(value)]) if len(value) < _BYTE else b"B" + struct.pack("<I", len(value))) + value
            )
        elif kind is tuple:
            self._many(b"(", value, b"t")
        elif kind is list:
            self._many(b"](", value, b"e")
        elif kind is dict:
            self._many(b"}(", [part for pair in value.items() for part in pair], b"u")
        elif kind is torch.dtype:
            self._once(value, lambda: self._global("torch", str(value).removeprefix("torch.")))
        elif kind is torch.layout:
            self._call(*copyreg.dispatch_table[torch.layout](value))
        elif isinstance(value, enum.Enum):
            self._call(kind, (value.value,))
        else:
            assert kind in (TensorProperties, BytesStorageMetadata), f"{kind} is no part of DCP's metadata"
            if vars(value) or kind is TensorProperties:
                self.instance(value)
            else:
                self.new(kind)

    def _many(self, begin: bytes, values: Sequence[Any], end: bytes) -> None:
        self.put(begin)
        for value in values:
            self.value(value)
        self.put(end)

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        self.global_of(function)
        self.put(b"(")
        if function is torch.Size:
            self._many(b"(", arguments, b"t")
        else:
            for argument in arguments:
                self.value(argument)
        self.put(b"tR")

    def _text(self, text: str) -> None:
        raw = text.encode("utf-8", "surrogatepass")
        self.put((b"\x8c" + bytes([len(raw)]) if len(raw) < _BYTE else b"X" + struct.pack("<I", len(raw))) + raw)

    def _integer(self, value: int) -> None:
        if 0 <= value < _BYTE:
            self.put(b"K" + bytes([value]))
        elif 0 <= value < _WORD:
            self.put(b"M" + struct.pack("<H", value))
        elif -_INT <= value < _INT:
            self.put(b"J" + struct.pack("<i", value))
        else:
            raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.put((b"\x8a" + bytes([len(raw)]) if len(raw) < _BYTE else b"\x8b" + struct.pack("<i", len(raw))) + raw)


def _key(value: Any) -> Any:
    return (torch.Size, tuple(value)) if type(value) is torch.Size else value


def _get(slot: int) -> bytes:
    return b"h" + bytes([slot]) if slot < _BYTE else b"j" + struct.pack("<I", slot)
