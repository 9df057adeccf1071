"""Runs the pickle opcodes of `.metadata` without ever calling what the file names.

This machine knows only the opcodes that DCP's metadata needs, and turns them into the inert tree of allowed_globals.py.
Everything else raises `UnsafeMetadataError`. Time and memory are linear in the input, and the memory that the tree
takes is checked as it grows.
"""

from __future__ import annotations

import pickle
import pickletools
import struct
import sys
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import Any, Final

from dcp_nvcomp.errors import MetadataError, UnsafeMetadataError
from dcp_nvcomp.format.metadata.allowed_globals import (
    TRUST_ADVICE,
    Global,
    Instance,
    PickledDict,
    PickledList,
    TrustedCall,
)
from dcp_nvcomp.format.metadata.row_reader import rows_at

MAX_MARKS: Final = 64
# Opcodes from one look at the memory to the next, each of which may make an object of a hundred bytes or so. A look
# takes half a millisecond in a process of a gigabyte.
_MOST_UNSEEN: Final = 1 << 17
_BLOCK_NBYTES: Final = 64  # of the interpreter's small blocks, on average
_LONG_NBYTES: Final = 128  # text from here on may be no small block
_MAX_NAME_NBYTES: Final = 1000


def _opcodes(names: str) -> list[int]:
    """Return opcodes as an index into the data gives them."""
    return [getattr(pickle, name)[0] for name in names.split()]


_MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _TUPLE1 = _opcodes("MEMOIZE BINGET LONG_BINGET BININT1 TUPLE1")
_TUPLE2, _EMPTY_TUPLE, _NEWOBJ, _REDUCE, _EMPTY_DICT = _opcodes("TUPLE2 EMPTY_TUPLE NEWOBJ REDUCE EMPTY_DICT")
_MARK, _SETITEMS, _APPENDS, _BUILD, _SHORT_BINUNICODE = _opcodes("MARK SETITEMS APPENDS BUILD SHORT_BINUNICODE")
_BININT2, _TUPLE, _EMPTY_LIST, _APPEND, _SETITEM, _TUPLE3 = _opcodes("BININT2 TUPLE EMPTY_LIST APPEND SETITEM TUPLE3")
_STACK_GLOBAL, _GLOBAL, _BINPUT, _LONG_BINPUT, _FRAME = _opcodes("STACK_GLOBAL GLOBAL BINPUT LONG_BINPUT FRAME")
_PROTO, _STOP, _INST, _NONE, _NEWTRUE, _NEWFALSE = _opcodes("PROTO STOP INST NONE NEWTRUE NEWFALSE")
_SHORT_BINBYTES, _BININT = _opcodes("SHORT_BINBYTES BININT")
_BINFLOAT, _BINUNICODE, _LONG1, _BINBYTES = _opcodes("BINFLOAT BINUNICODE LONG1 BINBYTES")
_CALLS: Final = (_NEWOBJ, _REDUCE)
_EXTENSIONS: Final = (_SETITEMS, _APPENDS)
_PUTS: Final = (_BINPUT, _LONG_BINPUT)
# `_run` has these in local variables.
_FREQUENT: Final = (_MEMOIZE, _BINGET, _LONG_BINGET, _BININT1, _TUPLE1, _TUPLE2, _EMPTY_TUPLE, _NEWOBJ)
_LESS_FREQUENT: Final = (_CALLS, _EMPTY_DICT, _MARK, _EXTENSIONS, _SETITEMS, _BUILD, _SHORT_BINUNICODE, _BININT2)

_CONSTANTS: Final = {_NONE: None, _NEWTRUE: True, _NEWFALSE: False}


def _text(raw: bytes) -> str:
    return str(raw, "utf-8", "surrogatepass")


def _signed(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


def _float(raw: bytes) -> float:
    value: float = struct.unpack(">d", raw)[0]
    return value


_Read = Callable[[bytes], Any]
_FIXED: Final[dict[int, tuple[int, _Read]]] = {  # opcode -> (length, how those bytes are read)
    _BININT: (4, _signed),
    _BINFLOAT: (8, _float),
}
_COUNTED: Final[dict[int, tuple[int, _Read]]] = {  # opcode -> (bytes that hold the length, how what follows is read)
    _BINUNICODE: (4, _text),
    _LONG1: (1, _signed),
    _SHORT_BINBYTES: (1, bytes),
    _BINBYTES: (4, bytes),
}


def run_pickle(
    data: bytes,
    allowed: Mapping[tuple[str, str], Global],
    trusted: Mapping[str, Any] | None = None,
    *,
    end: int,
    most_nbytes: int,
) -> Any:
    """Return the inert tree that `data` describes."""
    widened = {name: Global(name, value=value, is_trusted=True) for name, value in (trusted or {}).items()}

    def find(module: object, name: object) -> Global:
        if type(module) is not str or type(name) is not str:
            raise UnsafeMetadataError("The pickle names a global by something that is not text.")
        found = allowed.get((module, name)) or widened.get(f"{module}.{name}")
        if found is None:
            raise _refused_global(f"{module}.{name}")
        return found

    try:
        return _run(data, find, end, most_nbytes)
    except IndexError:
        raise MetadataError("This is not a pickle of DCP's metadata: an opcode finds no operand.") from None
    except (UnicodeDecodeError, struct.error) as error:
        raise MetadataError(f"This is not a pickle of DCP's metadata: {error}.") from error


# One function, because a million shards are sixty million opcodes, and local variables and if-tests in the order of
# frequency are what makes Python quick at it. It reads beyond the end of `data` only by slices, which are then short;
# the next opcode's index raises IndexError. What reads beyond `end` is found at the latest when it stops elsewhere.
def _run(data: bytes, find: Callable[[object, object], Global], end: int, most_nbytes: int) -> Any:
    memoize_, binget, long_binget, binint1, tuple1, tuple2, empty_tuple, newobj = _FREQUENT
    calls, empty_dict, mark, extensions, setitems, build, short_binunicode, binint2 = _LESS_FREQUENT
    memo: list[Any] = []
    marks: list[list[Any]] = []  # the stacks below the current one
    stack: list[Any] = []
    push, pop, memoize = stack.append, stack.pop, memo.append
    budget = 1024 + end // 3  # containers that may still be made; DCP needs one for every 5 bytes or more
    pos = 0
    long_nbytes = moved = 0  # size of long texts, slots in containers
    blocks = sys.getallocatedblocks()
    batch = min(_MOST_UNSEEN, most_nbytes >> 9)
    while True:
        pointers = 2 * (len(stack) + sum(map(len, marks))) + len(memo) + moved
        # lists are an eighth longer than they must
        if 9 * pointers + long_nbytes + _BLOCK_NBYTES * (sys.getallocatedblocks() - blocks) > most_nbytes:
            raise _too_much(most_nbytes)
        for _ in repeat(None, batch):
            opcode = data[pos]
            pos += 1
            if opcode == memoize_:
                memoize(stack[-1])
            elif opcode == binget:
                push(memo[data[pos]])
                pos += 1
            elif opcode == long_binget:
                push(memo[data[pos] | data[pos + 1] << 8 | data[pos + 2] << 16 | data[pos + 3] << 24])
                pos += 4
            elif opcode == binint1:
                push(data[pos])
                pos += 1
            elif opcode == tuple1:
                if not budget:
                    break
                budget -= 1
                stack[-1] = (stack[-1],)
            elif opcode == tuple2:
                if not budget:
                    break
                budget -= 1
                last = pop()
                stack[-1] = (stack[-1], last)
            elif opcode == empty_tuple:
                push(())
            elif opcode in calls:
                if not budget:
                    break
                budget -= 1
                args = pop()
                kind = stack[-1]
                if type(kind) is not Global or type(args) is not tuple:
                    raise UnsafeMetadataError("The pickle calls something that is not a global.")
                if opcode == newobj and kind.is_class and not args:
                    stack[-1] = Instance(kind)
                elif opcode == _REDUCE and kind.reduce is not None:
                    stack[-1] = kind.reduce(args)
                elif kind.is_trusted:
                    stack[-1] = TrustedCall(kind, args, is_new=opcode == newobj)
                else:
                    raise UnsafeMetadataError(f"The pickle calls {kind.name!r}, which is only data here.")
            elif opcode == empty_dict:
                if not budget:
                    break
                budget -= 1
                push(PickledDict())
            elif opcode == mark:
                if len(marks) >= MAX_MARKS:
                    raise UnsafeMetadataError(f"The pickle nests more than {MAX_MARKS} containers.")
                marks.append(stack)
                is_dict = bool(stack) and type(stack[-1]) is PickledDict
                stack = []
                push, pop = stack.append, stack.pop
                # a row begins so; each of them would be thirty turns of this loop
                if is_dict and data[pos] == binget and data[pos + 2] == empty_tuple and len(marks) < MAX_MARKS:
                    found = rows_at(data, pos, end, memo, budget // 3)  # each makes three containers
                    if found is not None:
                        rows, pos = found
                        budget -= 3 * len(rows)
                        long_nbytes += rows.nbytes
                        if long_nbytes > most_nbytes:
                            raise _too_much(most_nbytes)
                        push(rows)
                        push(None)
            elif opcode in extensions:
                items = stack
                moved += len(items)
                stack = marks.pop()
                push, pop = stack.append, stack.pop
                target = stack[-1]
                if type(target) is PickledDict and opcode == setitems and not len(items) & 1:
                    target.extend(items)
                else:
                    _extend(target, items, are_pairs=opcode == setitems)
            elif opcode == build:
                state = pop()
                target = stack[-1]
                if not isinstance(target, Instance) or target.state is not None:
                    raise UnsafeMetadataError("The pickle changes the state of something that it has not just made.")
                if state is None:
                    raise MetadataError("The pickle sets a state of None.")
                target.state = state
            elif opcode == short_binunicode:
                stop = pos + 1 + data[pos]
                push(str(data[pos + 1 : stop], "utf-8", "surrogatepass"))
                if stop - pos > _LONG_NBYTES:
                    long_nbytes += sys.getsizeof(stack[-1])
                    if long_nbytes > most_nbytes:
                        raise _too_much(most_nbytes)
                pos = stop
            elif opcode == binint2:
                push(data[pos] | data[pos + 1] << 8)
                pos += 2
            elif opcode in _CONSTANTS:
                push(_CONSTANTS[opcode])
            elif opcode in _FIXED:
                width, read = _FIXED[opcode]
                push(read(data[pos : pos + width]))
                pos += width
            elif opcode == _TUPLE:
                if not budget:
                    break
                budget -= 1
                items = stack
                moved += len(items)
                stack = marks.pop()
                push, pop = stack.append, stack.pop
                push(tuple(items))
            elif opcode == _EMPTY_LIST:
                if not budget:
                    break
                budget -= 1
                push(PickledList())
            elif opcode == _APPEND:
                last = pop()
                _extend(stack[-1], [last], are_pairs=False)
            elif opcode == _SETITEM:
                pair = [stack[-2], stack[-1]]
                del stack[-2:]
                _extend(stack[-1], pair, are_pairs=True)
            elif opcode == _TUPLE3:
                if not budget:
                    break
                budget -= 1
                triple = tuple(stack[-3:])
                del stack[-2:]
                stack[-1] = triple
            elif opcode == _STACK_GLOBAL:
                last = pop()
                stack[-1] = find(stack[-1], last)
            elif opcode == _GLOBAL:
                module, name, pos = _global_lines(data, pos)
                push(find(module, name))
            elif opcode in _COUNTED:
                width, read = _COUNTED[opcode]
                stop = pos + width + int.from_bytes(data[pos : pos + width], "little")
                # a slice, and text of four bytes a character
                if long_nbytes + 5 * (min(stop, end) - pos) > most_nbytes:
                    raise _too_much(most_nbytes)
                push(read(data[pos + width : stop]))
                long_nbytes += sys.getsizeof(stack[-1])
                pos = stop
            elif opcode in _PUTS:
                width = 1 if opcode == _BINPUT else 4
                _put(memo, int.from_bytes(data[pos : pos + width], "little"), stack[-1])
                pos += width
            elif opcode == _FRAME:
                if int.from_bytes(data[pos : pos + 8], "little") > end - pos - 8:
                    raise MetadataError("The pickle ends before its last frame does: it was cut off.")
                pos += 8
            elif opcode == _PROTO:
                if not 2 <= data[pos] <= 5:
                    raise MetadataError(f"The pickle has protocol {data[pos]}; 2 to 5 are understood.")
                pos += 1
            elif opcode == _STOP:
                if marks or len(stack) != 1 or pos != end:
                    raise MetadataError("The pickle does not end with its one value.")
                return stack[0]
            else:
                raise _refused_opcode(data, opcode, pos)
        else:
            continue
        break
    raise UnsafeMetadataError("The pickle makes more containers than its size allows.")


def _too_much(most_nbytes: int) -> UnsafeMetadataError:
    return UnsafeMetadataError(
        f"`.metadata` describes more than fits the {most_nbytes} bytes of memory that it may take. If it is genuine, "
        "pass a larger metadata_limit_nbytes=."
    )


def _extend(target: object, items: list[Any], *, are_pairs: bool) -> None:
    if are_pairs and len(items) % 2:
        raise MetadataError("This is not a pickle of DCP's metadata: a key has no value.")
    if type(target) is (PickledDict if are_pairs else PickledList):
        target.extend(items)
    elif type(target) is TrustedCall:
        kept = target.dict_items if are_pairs else target.list_items
        kept.extend(items)
    else:
        raise UnsafeMetadataError("The pickle adds items to something that is not a list or dict of its own.")


def _put(memo: list[Any], index: int, value: Any) -> None:
    """Picklers number what they memoize from zero on, so a slot further on is only there to make the memo large."""
    if index > len(memo):
        raise UnsafeMetadataError(f"The pickle uses memo slot {index}, and has filled {len(memo)}.")
    memo[index : index + 1] = [value]


def _global_lines(data: bytes, pos: int) -> tuple[str, str, int]:
    lines = []
    for _ in range(2):
        stop = data.find(b"\n", pos, pos + _MAX_NAME_NBYTES)
        if stop < 0:
            raise MetadataError("The pickle has a name without an end: it was cut off, or is not a pickle.")
        lines.append(data[pos:stop].decode())
        pos = stop + 1
    return lines[0], lines[1], pos


def _refused_global(name: str) -> UnsafeMetadataError:
    shown = name if len(name) <= 200 else name[:200] + "..."
    return UnsafeMetadataError(
        f"`.metadata` names the global {shown!r}, which is never imported while reading.{TRUST_ADVICE}"
    )


def _refused_opcode(data: bytes, opcode: int, pos: int) -> MetadataError:
    if opcode == _INST:
        module, name, _ = _global_lines(data, pos)
        return _refused_global(f"{module}.{name}")
    known = next((known.name for known in pickletools.opcodes if known.code == chr(opcode)), None)
    if known is None:
        return MetadataError(f"This is not a pickle of DCP's metadata: byte {pos - 1} is {opcode:#04x}, not an opcode.")
    return UnsafeMetadataError(f"The pickle uses the opcode {known}, which DCP's metadata has no use for.")
