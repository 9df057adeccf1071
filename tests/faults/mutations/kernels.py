"""What threads of a GPU rest on: every barrier and every atomic of the kernels, found in their sources, and order.

Under ThreadSanitizer (tests/engines/emulation) each has to be missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.faults.mutations import Mutation, read

ROOT = Path(__file__).parents[3]
KERNELS = "dcp_nvcomp/engines/cuda/kernels"
ORDERS = Path(__file__).with_suffix(".diff")

# Barriers, atomics and fences, and what else has such a name.
_CALL = re.compile(r"\b(__sync\w*|__threadfence\w*|__\w+_sync|atomic\w+)\s*\(")
# They exchange values between threads, so that a kernel without one would not be the same kernel with a race.
_EXCHANGES = re.compile(r"__syncthreads_(count|or|and)|__\w+_sync")
_OPERATORS = {"atomicAdd": "+=", "atomicOr": "|=", "atomicXor": "^=", "atomicAnd": "&="}


def synchronisation(text: str) -> list[re.Match[str]]:
    """Return the calls in a source that synchronise threads, comments left out."""
    code = re.sub(r"//.*", lambda comment: " " * len(comment[0]), text)
    return [call for call in _CALL.finditer(code) if not _EXCHANGES.fullmatch(call[1])]


def _without(text: str, call: re.Match[str]) -> Iterator[tuple[str, int, str]]:
    """What can stand there instead: in words, where the call ends, the other text."""
    end, arguments = _arguments(text, call.end())
    if call[1] == "__syncthreads":
        yield "no __syncthreads", end, "(void)0"
        yield "__syncwarp for __syncthreads", end, "__syncwarp()"
    elif call[1] == "__syncwarp":
        yield "no __syncwarp", end, "(void)0"
    elif call[1] not in _OPERATORS:
        raise ValueError(f"nothing is known that could stand in the place of {call[1]}")
    else:
        at, value = arguments
        yield f"plain {call[1]}", end, f"(*({at}) {_OPERATORS[call[1]]} ({value}))"


def _arguments(text: str, start: int) -> tuple[int, list[str]]:
    """The end of a call, and its arguments; `start` is behind its parenthesis."""
    depth, arguments = 1, [""]
    for at in range(start, len(text)):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at + 1, [argument.strip() for argument in arguments]
        if depth == 1 and text[at] == ",":
            arguments.append("")
        else:
            arguments[-1] += text[at]
    raise ValueError("a parenthesis is not closed")


def _mutations(path: Path) -> Iterator[Mutation]:
    text = path.read_text()
    for call in synchronisation(text):
        for words, end, new in _without(text, call):
            begin, line = call.start(), text.count("\n", 0, call.start()) + 1
            while text.count(text[begin:end]) > 1:  # as many lines before it as make it the only one
                begin = text.rfind("\n", 0, begin - 1) + 1
            yield Mutation(
                row=f"races: {path.name}:{line}: {words}",
                file=str(path.relative_to(ROOT)),
                old=text[begin:end],
                new=text[begin : call.start()] + new,
                tests=_tests(path.name),
            )


def _tests(name: str) -> str:
    module = re.split(r"[_.]", name)[0]
    return f"tests/engines/emulation/test_races.py -k test_unchanged[{module}]"


MUTATIONS = (
    *(mutation for path in sorted((ROOT / KERNELS).glob("*.cu")) for mutation in _mutations(path)),
    *read(ORDERS),
)
