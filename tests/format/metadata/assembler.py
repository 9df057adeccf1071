"""Writes pickles by hand: what no pickler would ever write."""

from __future__ import annotations

METADATA = "torch.distributed.checkpoint.metadata"

EMPTY_TUPLE, EMPTY_DICT, EMPTY_LIST, MARK = b")", b"}", b"]", b"("
NEWOBJ, REDUCE, BUILD, MEMOIZE, STOP = b"\x81", b"R", b"b", b"\x94", b"."


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + STOP


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def number(value: int) -> bytes:
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def get(slot: int) -> bytes:
    return b"j" + slot.to_bytes(4, "little")


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def sequence(*parts: bytes) -> bytes:
    return MARK + b"".join(parts) + b"t"


def listed(*parts: bytes) -> bytes:
    return EMPTY_LIST + MARK + b"".join(parts) + b"e"


def mapping(*parts: bytes) -> bytes:
    return EMPTY_DICT + MARK + b"".join(parts) + b"u"


def call(function: bytes, *args: bytes) -> bytes:
    return function + sequence(*args) + REDUCE


def fresh(name: str, module: str = METADATA) -> bytes:
    return named(module, name) + EMPTY_TUPLE + NEWOBJ


def built(name: str, *, module: str = METADATA, **attributes: bytes) -> bytes:
    pairs = [text(key) + value for key, value in attributes.items()]
    return fresh(name, module) + mapping(*pairs) + BUILD


def size(*dims: int) -> bytes:
    return call(named("torch", "Size"), sequence(*map(number, dims)))


def properties(*more: bytes, dtype: bytes | None = None) -> bytes:
    layout = call(named("torch.serialization", "_get_layout"), text("torch.strided"))
    memory_format = call(named(METADATA, "_MEM_FORMAT_ENCODING"), number(0))
    state = sequence(dtype or named("torch", "float32"), layout, b"\x89", memory_format, b"\x89", *more)
    return fresh("TensorProperties") + state + BUILD


def shard(offsets: bytes, sizes: bytes) -> bytes:
    return built("ChunkStorageMetadata", offsets=offsets, sizes=sizes)


def tensor(whole: bytes | None = None, *shards: bytes, **attributes: bytes) -> bytes:
    parts = {
        "properties": properties(),
        "size": whole or size(4, 6),
        "chunks": listed(*(shards or [shard(size(0, 0), size(4, 6))])),
    }
    return built("TensorStorageMetadata", **{**parts, **attributes})


def file(name: bytes = text("__0_0.distcp"), file_nbytes: int = 100, footer_nbytes: int = 8, crc: int = 1) -> bytes:
    return sequence(name, number(file_nbytes), number(footer_nbytes), number(crc))


def index(fqn: bytes = text("w"), offset: bytes | None = None, **attributes: bytes) -> bytes:
    return built("MetadataIndex", **{"fqn": fqn, "index": number(0), "offset": offset or size(0, 0), **attributes})


def info(name: str = "__0_0.distcp", offset: int = 0, length: int = 10, **attributes: bytes) -> bytes:
    module = "torch.distributed.checkpoint.filesystem"
    parts = {"relative_path": text(name), "offset": number(offset), "length": number(length), **attributes}
    return built("_StorageInfo", module=module, **parts)


def metadata(**attributes: bytes) -> bytes:
    """A whole `.metadata` of one tensor "w", with some attributes replaced or added."""
    parts = {
        "state_dict_metadata": mapping(text("w"), tensor()),
        "planner_data": mapping(text("w"), sequence(text("w"))),
        "storage_data": mapping(index(), sequence(file(), number(0))),
        "storage_meta": built("StorageMeta", checkpoint_id=text("run"), save_id=text("ab" * 16)),
        "version": text("1.0.0"),
    }
    return pickled(built("Metadata", **{**parts, **attributes}))
