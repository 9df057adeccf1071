"""Hostile `.metadata`: each is refused, quickly, in little memory, and nothing in the process has changed."""

from __future__ import annotations

import io
import os
import pickle
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as torch_metadata

from dcp_nvcomp.errors import CheckpointError, MetadataError, UnsafeMetadataError, UnsafePathError
from dcp_nvcomp.metadata import parse_metadata

from . import assembler as asm


@contextmanager
def refused(
    match: str, kind: type[CheckpointError] = UnsafeMetadataError, *, seconds: float = 1, mib: int = 64
) -> Iterator[None]:
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(kind, match=match) as caught:
            yield
        took = time.process_time() - begin
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.path == "run/.metadata"
    assert len(str(caught.value)) < 1000
    assert took < seconds, f"{took:.1f} s"
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
    with refused("'torch.serialization.os.system'"):
        parse(data)
    assert not target.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("builtins", "eval"),
        ("builtins", "getattr"),
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
    with refused(f"'{module}.{name}'"):
        parse(asm.pickled(written[opcode]))


def test_name_of_a_global_is_not_text() -> None:
    with refused("not text"):
        parse(asm.pickled(asm.listed(), asm.text("system"), b"\x93"))


@pytest.mark.parametrize(
    "function",
    [
        asm.named(asm.METADATA, "Metadata"),
        asm.named("torch", "float32"),
        asm.named("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ],
)
def test_reduce_calls_nothing(function: bytes) -> None:
    with refused("only data"):
        parse(asm.pickled(asm.call(function)))


@pytest.mark.parametrize("thing", [asm.text("os.system"), asm.fresh("Metadata"), asm.EMPTY_DICT, asm.size(1), b"N"])
@pytest.mark.parametrize("opcode", [asm.REDUCE, asm.NEWOBJ])
def test_calling_what_is_not_a_global(thing: bytes, opcode: bytes) -> None:
    with refused("not a global"):
        parse(asm.pickled(thing, asm.EMPTY_TUPLE, opcode))


@pytest.mark.parametrize("target", [asm.named("torch", "Size"), asm.named("torch", "float32"), asm.text("x")])
def test_newobj_of_what_is_not_a_class_here(target: bytes) -> None:
    with refused("calls"):
        parse(asm.pickled(target, asm.EMPTY_TUPLE, asm.NEWOBJ))


def test_newobj_with_arguments() -> None:
    with refused("only data"):
        parse(asm.pickled(asm.named(asm.METADATA, "Metadata"), asm.sequence(asm.EMPTY_DICT), asm.NEWOBJ))


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
    before = dict(vars(torch_metadata.Metadata)), dict(vars(torch_metadata._MEM_FORMAT_ENCODING))
    with refused("state of something that it has not just made"):
        parse(asm.pickled(target, asm.mapping(asm.text("__init__"), asm.text("x")), asm.BUILD))
    assert before == (dict(vars(torch_metadata.Metadata)), dict(vars(torch_metadata._MEM_FORMAT_ENCODING)))


def test_build_on_a_class_is_a_real_attack() -> None:
    class Victim:
        pass

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            return Victim

    data = asm.pickled(asm.named("m", "V"), b"N", asm.mapping(asm.text("poisoned"), b"\x88"), b"\x86", asm.BUILD)
    Unpickler(io.BytesIO(data)).load()
    assert Victim.poisoned  # type: ignore[attr-defined]
    with refused("'m.V'"):
        parse(data)


@pytest.mark.parametrize("slot", [1, 1 << 20, (1 << 32) - 1])
def test_memo_slot_far_out(slot: int) -> None:
    with refused(f"memo slot {slot}"):
        parse(asm.pickled(b"N", b"r" + slot.to_bytes(4, "little")))


def test_string_lengths_beyond_the_input() -> None:
    for opcode in (b"X", b"B"):
        with refused("cut off|no operand", MetadataError, mib=1):
            parse(b"\x80\x04" + opcode + b"\xff\xff\xff\xff" + b"abc.")


def nested_keys(levels: int) -> bytes:
    """A tuple of two references to a tuple of two references ...: hashing it takes 2**levels steps."""
    parts = [asm.EMPTY_TUPLE, asm.MEMOIZE]
    for level in range(levels):
        parts += [asm.get(level), asm.get(level), b"\x86", asm.MEMOIZE]
    return b"".join(parts)


@pytest.mark.parametrize(
    "attribute",
    [
        {"state_dict_metadata": asm.EMPTY_DICT + nested_keys(60) + b"Ns"},
        {"storage_data": asm.EMPTY_DICT + nested_keys(60) + b"Ns"},
        {"planner_data": asm.EMPTY_DICT + nested_keys(60) + b"Ns"},
        {"planner_data": asm.listed(asm.EMPTY_DICT + nested_keys(60) + b"Ns")},
        {"planner_data": asm.mapping(asm.text("w"), nested_keys(60))},
        {"planner_data": asm.mapping(asm.text("w"), asm.sequence(asm.text("a"), asm.number(1), nested_keys(60)))},
        {"anything": asm.EMPTY_DICT + nested_keys(60) + b"Ns"},
    ],
    ids=["state dict", "storage", "planner", "planner's dict", "path", "in a path", "unknown attribute"],
)
def test_keys_that_hash_for_ever(attribute: dict[str, bytes]) -> None:
    attribute = {key: asm.MARK + value + b"1" if False else value for key, value in attribute.items()}
    data = b"\x80\x04" + _stack_is_clean(attribute)
    if "anything" in attribute:
        assert parse(data).version == "1.0.0"  # ignored, and never hashed
        return
    with refused("", MetadataError):
        parse(data)


def _stack_is_clean(attribute: dict[str, bytes]) -> bytes:
    return asm.metadata(**attribute)[2:]
