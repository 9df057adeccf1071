"""Hostile `.metadata`: each is refused, quickly, in little memory, and nothing in the process has changed."""

from __future__ import annotations

import io
import pickle
import pickletools
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from dcp_nvcomp.errors import CheckpointError, MetadataError, UnsafeMetadataError, UnsafePathError
from dcp_nvcomp.format.metadata.serialization import parse_metadata

from . import assembler as asm

# fmt: off
SUPPORTED = {
    "MEMOIZE", "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MARK", "FRAME", "PROTO", "STOP", "BININT1", "BININT2",
    "BININT", "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE", "SHORT_BINUNICODE", "BINUNICODE", "SHORT_BINBYTES",
    "BINBYTES", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "STACK_GLOBAL", "GLOBAL", "NEWOBJ", "REDUCE", "BUILD",
}
# fmt: on


def refused(
    data: bytes, match: str, kind: type[CheckpointError] = UnsafeMetadataError, *, seconds: float = 5, mib: int = 64
) -> None:
    begin = time.process_time()
    with pytest.raises(kind, match=match) as caught:
        parse(data)
    took = time.process_time() - begin
    assert caught.value.path == "run/.metadata"
    assert len(str(caught.value)) < 1000
    assert took < seconds, f"{took:.1f} s"
    tracemalloc.start()
    try:
        with pytest.raises(kind, match=match):
            parse(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mib << 20, f"{peak >> 20} MiB"


def parse(data: bytes) -> torch_metadata.Metadata:
    return parse_metadata(data, path="run/.metadata")


class _OnlyTheModuleIsChecked(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        assert module == "torch"
        return super().find_class(module, name)


def test_dotted_name_reaches_nothing(tmp_path: Path) -> None:
    target = tmp_path / "executed"
    system = asm.named("torch", "serialization.os.system")
    data = asm.pickled(asm.call(system, asm.text(f"touch {target}")))
    _OnlyTheModuleIsChecked(io.BytesIO(data)).load()
    assert target.exists()  # the attack is real

    target.unlink()
    refused(data, "'torch.serialization.os.system'")
    assert not target.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "object"),
        ("torch", "load"),
        ("torch", "Tensor"),
        ("torch", "Size.__class__"),
        ("torch.serialization", "os"),
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("torch.distributed.checkpoint.filesystem", "FileSystemReader"),
        ("pathlib", "os.system"),
        ("pathlib", "Path.home"),
        ("collections", "OrderedDict"),
        ("torch.distributed.checkpoint", "metadata.Metadata"),
    ],
)
@pytest.mark.parametrize("opcode", ["STACK_GLOBAL", "GLOBAL", "INST"])
def test_global_that_is_not_listed(module: str, name: str, opcode: str) -> None:
    written = {
        "STACK_GLOBAL": asm.named(module, name),
        "GLOBAL": f"c{module}\n{name}\n".encode(),
        "INST": f"(i{module}\n{name}\n".encode(),
    }
    refused(asm.pickled(written[opcode]), f"'{module}.{name}'")


CLASS, FORMATS = asm.named(asm.METADATA, "Metadata"), asm.named(asm.METADATA, "_MEM_FORMAT_ENCODING")
NOT_CALLED: list[tuple[bytes, str]] = [
    *(
        (asm.call(asm.named("builtins", "getattr"), *args), "'builtins.getattr', which may only name")
        for args in (
            (asm.named("torch", "float32"), asm.text("__class__")),
            (CLASS, asm.text("__init__")),
            (FORMATS, asm.number(0)),
            (FORMATS,),
            (asm.text("os"), asm.text("system")),
        )
    ),
    (asm.listed() + asm.text("system") + b"\x93", "not text"),
    (CLASS + asm.sequence(asm.EMPTY_DICT) + asm.NEWOBJ, "only data"),
    (asm.call(CLASS), "only data"),
    (asm.call(asm.named("torch", "float32")), "only data"),
    (asm.call(asm.named("torch.distributed.checkpoint.filesystem", "_StorageInfo")), "only data"),
    *(
        (thing + asm.EMPTY_TUPLE + opcode, "not a global")
        for thing in (asm.text("os.system"), asm.fresh("Metadata"), asm.EMPTY_DICT, asm.size(1), b"N")
        for opcode in (asm.REDUCE, asm.NEWOBJ)
    ),
    *(
        (thing + asm.EMPTY_TUPLE + asm.NEWOBJ, "calls")
        for thing in (asm.named("torch", "Size"), asm.named("torch", "float32"), asm.text("x"))
    ),
]


@pytest.mark.parametrize(("data", "match"), NOT_CALLED)
def test_nothing_is_called(data: bytes, match: str) -> None:
    refused(asm.pickled(data), match)


def test_getattr_itself_is_nothing() -> None:
    with pytest.raises(MetadataError):
        parse(asm.pickled(asm.named("builtins", "getattr")))


@pytest.mark.parametrize(
    "target",
    [
        asm.named(asm.METADATA, "Metadata"),
        asm.named(asm.METADATA, "_MEM_FORMAT_ENCODING"),
        asm.call(asm.named(asm.METADATA, "_MEM_FORMAT_ENCODING"), asm.number(0)),
        asm.size(1),
        asm.named("torch", "float32"),
        asm.call(asm.named("pathlib", "PosixPath"), asm.text("run")),
        asm.EMPTY_DICT,
        asm.built("Metadata", version=asm.text("1")),
    ],
    ids=["class", "enum class", "enum member", "size", "dtype", "path", "dict", "twice"],
)
def test_build_changes_only_fresh_objects(target: bytes) -> None:
    classes = (torch_metadata.Metadata, torch_metadata._MEM_FORMAT_ENCODING)
    before = [dict(vars(kind)) for kind in classes]
    state = asm.mapping(asm.text("__init__"), asm.text("x"))
    refused(asm.pickled(target, state, asm.BUILD), "state of something that it has not just made")
    assert before == [dict(vars(kind)) for kind in classes]


def test_build_on_a_class_is_a_real_attack() -> None:
    class Victim:
        pass

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            return Victim

    data = asm.pickled(asm.named("m", "V"), b"N", asm.mapping(asm.text("poisoned"), b"\x88"), b"\x86", asm.BUILD)
    Unpickler(io.BytesIO(data)).load()
    assert Victim.poisoned  # type: ignore[attr-defined]
    refused(data, "'m.V'")


@pytest.mark.parametrize("slot", [1, 1 << 20, (1 << 32) - 1])
def test_memo_slot_far_out(slot: int) -> None:
    refused(asm.pickled(b"N", b"r" + slot.to_bytes(4, "little")), f"memo slot {slot}")


def test_string_lengths_beyond_the_input() -> None:
    for opcode in (b"X", b"B"):
        refused(b"\x80\x04" + opcode + b"\xff\xff\xff\xff" + b"abc.", "cut off|no operand", MetadataError, mib=1)


def nested_key(levels: int) -> bytes:
    """A tuple that holds one tuple twice, which holds one tuple twice, ...: hashing it takes 2**levels steps."""
    return asm.EMPTY_TUPLE + asm.MEMOIZE + b"".join(asm.get(n) + b"\x86" + asm.MEMOIZE for n in range(levels))


@pytest.mark.parametrize(
    "attributes",
    [
        {"state_dict_metadata": asm.mapping(nested_key(60), b"N")},
        {"storage_data": asm.mapping(nested_key(60), b"N")},
        {"storage_data": asm.mapping(asm.index(nested_key(60)), b"N")},
        {"planner_data": asm.mapping(nested_key(60), b"N")},
        {"planner_data": asm.listed(asm.mapping(nested_key(60), b"N"))},
        {"planner_data": asm.mapping(asm.text("w"), nested_key(60))},
        {"planner_data": asm.mapping(asm.text("w"), asm.sequence(asm.text("a"), asm.number(1), nested_key(60)))},
        {"version": nested_key(60)},
    ],
    ids=["state dict", "storage", "fqn", "planner", "planner's dict", "path", "in a path", "version"],
)
def test_keys_that_hash_for_ever(attributes: dict[str, bytes]) -> None:
    refused(asm.metadata(**attributes), ".", MetadataError)


def test_unknown_attribute_is_never_looked_into() -> None:
    begin = time.process_time()
    parse(asm.metadata(later=asm.mapping(nested_key(60), nested_key(0))))
    assert time.process_time() - begin < 5  # of exponential work on any machine, however busy


@pytest.mark.ci
def test_keys_that_collide() -> None:
    modulus = (1 << 61) - 1  # a number hashes to its rest
    offsets = [[(n >> shift & 3) * modulus for shift in range(0, 20, 2)] for n in range(1000)]
    assert len({hash(torch.Size(offset)) for offset in offsets}) == 1
    stored = asm.sequence(asm.file(), asm.number(0))
    pairs = b"".join(asm.index(offset=asm.size(*offset)) + stored for offset in offsets)
    refused(asm.metadata(storage_data=asm.mapping(pairs)), "collide")


@pytest.mark.ci
@pytest.mark.parametrize("opcode", [asm.EMPTY_LIST, asm.EMPTY_DICT, asm.EMPTY_TUPLE + b"\x85", asm.MARK + b"t"])
def test_more_containers_than_dcp_would_make(opcode: bytes) -> None:
    many = opcode * (300_000 // len(opcode))
    if len(opcode) == 1:
        refused(asm.pickled(many), "containers")
    refused(asm.pickled(asm.EMPTY_LIST, asm.MARK, many, b"e"), ".", MetadataError)


def many_lists() -> bytes:
    pairs = [asm.text(str(n)) + asm.sequence(asm.text(str(n)), asm.number(5000)) for n in range(1000)]
    return asm.metadata(planner_data=asm.mapping(*pairs))


def one_path() -> bytes:
    path = asm.sequence(*[asm.text("a")] * 10_000) + asm.MEMOIZE
    pairs = [asm.text("0") + path] + [asm.text(str(n)) + asm.get(0) for n in range(1, 10_000)]
    return asm.metadata(planner_data=asm.mapping(*pairs))


def long_checkpoint_id() -> bytes:
    part = asm.text("a" * 1000) + asm.MEMOIZE + asm.get(0) * 100_000
    path = asm.named("pathlib", "PosixPath") + asm.MARK + part + b"t" + asm.REDUCE
    return asm.metadata(storage_meta=asm.built("StorageMeta", checkpoint_id=path))


def numbers() -> bytes:
    keys = b"".join(asm.number(n * ((1 << 61) - 1)) + b"N" for n in range(5000))
    return asm.metadata(planner_data=asm.listed(asm.mapping(keys)))


def dicts() -> bytes:
    deep = (asm.EMPTY_DICT + asm.text("a")) * 10_000 + b"N" + b"s" * 10_000
    return asm.metadata(planner_data=asm.listed(deep))


def looked_up() -> bytes:  # DCP would look up path[0], path[1], ... in it
    path = asm.mapping(asm.number(0), asm.text("w"), asm.number(1), asm.number(1 << 40))
    return asm.metadata(planner_data=asm.mapping(asm.text("w"), path))


COSTLY: dict[str, tuple[Callable[[], bytes], str, type[CheckpointError]]] = {
    "tuples_in_tuples": (lambda: asm.pickled(asm.EMPTY_TUPLE, b"\x85" * 300_000), "containers", UnsafeMetadataError),
    "marks_in_marks": (lambda: asm.pickled(asm.MARK * 300_000), "nests more than 64", UnsafeMetadataError),
    "dicts_in_dicts": (dicts, "deep", UnsafeMetadataError),
    "numbers_that_collide": (numbers, "collide", UnsafeMetadataError),
    "one_path_for_many_keys": (one_path, "more often", UnsafeMetadataError),
    "one_checkpoint_id_that_is_long": (long_checkpoint_id, "more often", UnsafeMetadataError),
    "many_lists_that_fill_the_memory": (many_lists, "list indices", UnsafeMetadataError),
    "path_that_is_a_dict": (looked_up, "keys that are not text", MetadataError),
    "size_of_many_dimensions": (lambda: asm.pickled(asm.size(*range(65))), "torch.Size", MetadataError),
}


@pytest.mark.parametrize("what", COSTLY)
def test_what_would_cost_time_or_memory(what: str) -> None:
    make, match, kind = COSTLY[what]
    refused(make(), match, kind)


@pytest.mark.parametrize("where", ["planner_data", "state_dict_metadata", "storage_data", "storage_meta", "version"])
@pytest.mark.parametrize("container", ["list", "dict", "instance"])
def test_container_in_itself(where: str, container: str) -> None:
    written = {
        "list": asm.EMPTY_LIST + asm.MEMOIZE + asm.get(0) + b"a",
        "dict": asm.EMPTY_DICT + asm.MEMOIZE + asm.text("a") + asm.get(0) + b"s",
        "instance": asm.fresh("StorageMeta") + asm.MEMOIZE + asm.mapping(asm.text("modules"), asm.get(0)) + asm.BUILD,
    }
    refused(asm.metadata(**{where: written[container]}), ".", MetadataError)


@pytest.mark.slow
def test_one_list_for_many_tensors() -> None:
    shards = [asm.shard(asm.size(0, 0), asm.size(4, 6)) + asm.MEMOIZE, *[asm.get(0)] * 2000]
    memoized = asm.listed(*shards) + asm.MEMOIZE  # slot 1
    tensors = [asm.text("0") + asm.tensor(chunks=memoized)]
    tensors += [asm.text(str(n)) + asm.tensor(chunks=asm.get(1)) for n in range(1, 1000)]
    refused(asm.metadata(state_dict_metadata=asm.mapping(*tensors)), "more often")


def test_one_state_for_many_shards() -> None:
    boxes = asm.text("offsets") + asm.size(0, 0) + asm.text("sizes") + asm.size(4, 6)
    state = asm.mapping(boxes, *[asm.text(str(n)) + b"N" for n in range(5000)]) + asm.MEMOIZE  # slot 1
    new = asm.EMPTY_TUPLE + asm.NEWOBJ
    shards = [asm.named(asm.METADATA, "ChunkStorageMetadata") + asm.MEMOIZE + new + state + asm.BUILD]
    shards += [asm.get(0) + new + asm.get(1) + asm.BUILD] * 3000
    tensor = asm.tensor(chunks=asm.listed(*shards))
    refused(asm.metadata(state_dict_metadata=asm.mapping(asm.text("w"), tensor)), "more often")


@pytest.mark.parametrize("index", [10**7, 1 << 40, 1 << 2000])
@pytest.mark.parametrize("make", [asm.sequence, asm.listed])
def test_list_index_that_fills_the_memory(index: int, make: Callable[..., bytes]) -> None:
    # DCP's loader would make a list of that length
    refused(
        asm.metadata(planner_data=asm.mapping(asm.text("w"), make(asm.text("w"), asm.number(index)))), "list indices"
    )


@pytest.mark.parametrize(
    "name", ["../x", "a/../../x", "/etc/passwd", "", ".", "a//b", "s3://b/x", "C:\\x", "a\x00b", "file::x", "..\\x"]
)
@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_path_out_of_the_checkpoint(name: str, kind: str) -> None:
    value = asm.sequence(asm.file(asm.text(name)), asm.number(0)) if kind == "ours" else asm.info(name)
    refused(asm.metadata(storage_data=asm.mapping(asm.index(), value)), "not allowed", UnsafePathError)


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        *((directory, "x.distcp") for directory in ("..", ".", "", "a/b", "/etc", "a/..", "s3://b", "C:\\x", "a\x00b")),
        *(("step-1", name) for name in ("../x", "a/x", "", "..", "/etc/passwd")),
    ],
)
def test_path_out_of_the_directory_beside(directory: str, name: str) -> None:
    file = asm.sequence(asm.text(name), *map(asm.number, (100, 10, 1)), asm.text(directory))
    value = asm.sequence(file, asm.number(0))
    refused(asm.metadata(storage_data=asm.mapping(asm.index(), value)), "not allowed|plain names", UnsafePathError)


def test_file_in_the_directory_beside() -> None:
    file = asm.sequence(asm.text("x.distcp"), *map(asm.number, (100, 10, 1)), asm.text("step-1"))
    data = asm.metadata(storage_data=asm.mapping(asm.index(), asm.sequence(file, asm.number(2))))
    (stored,) = parse_metadata(data, path="run/step-2").storage_data.values()
    assert stored == (("../step-1/x.distcp", 100, 10, 1), 2)


@pytest.mark.parametrize("more", [[asm.number(1)], [asm.text("a"), asm.text("b")], [b"N"], [asm.EMPTY_TUPLE]])
def test_what_is_no_directory_beside(more: list[bytes]) -> None:
    file = asm.sequence(asm.text("x.distcp"), *map(asm.number, (100, 10, 1)), *more)
    value = asm.sequence(file, asm.number(0))
    refused(asm.metadata(storage_data=asm.mapping(asm.index(), value)), "must be|not text", MetadataError)


@pytest.mark.parametrize(
    "opcode", [op for op in pickletools.opcodes if op.name not in SUPPORTED], ids=lambda op: op.name
)
def test_opcode_without_a_use(opcode: pickletools.OpcodeInfo) -> None:
    values = {"INST": b"os\nsystem\n", "DUP": b"", "LONG4": (1 << 30).to_bytes(4, "little") + b"x"}
    data = asm.pickled(
        asm.MARK, asm.text("os"), asm.EMPTY_TUPLE, opcode.code.encode("latin-1"), values.get(opcode.name, b"0\n" * 8)
    )
    refused(data, "os.system" if opcode.name == "INST" else f"opcode {opcode.name},")
