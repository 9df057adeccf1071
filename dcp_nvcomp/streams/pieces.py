"""The pieces of a stream, which come from outside: read and checked against docs/format.md. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.format.block_grid import Box, strides_of
from dcp_nvcomp.format.footer import Footer
from dcp_nvcomp.format.record import KIND_TENSOR

LITERALS: Final = -1
LENGTH_NBYTES: Final = 8  # of the length of the JSON text


class Piece(NamedTuple):
    """Bytes of a stream up to the next piece."""

    start: int  # in the stream
    number: int  # of the record, `LITERALS` for none
    offset: int  # in its bytes


def parse_pieces(
    text: bytes, literals_nbytes: int, footer: Footer, numbers: Mapping[str, int]
) -> tuple[int, list[Piece], list[int]]:
    """Return a stream's size, its pieces, and the numbers of its records in the footer."""
    described = parse_json(text)
    nbytes, names, rows = described["nbytes"], described["records"], described["pieces"]
    records = [numbers[name] for name in names]
    if any(footer.records[number].kind != KIND_TENSOR for number in records):
        raise ValueError("a record of it is no tensor")
    sizes = [footer.records[number].uncompressed_nbytes for number in records]
    pieces = [Piece(*row) for row in rows]
    if any(type(value) is not int for value in (nbytes, *(value for piece in pieces for value in piece))):
        raise TypeError("a number is no integer")
    ends = [*(piece.start for piece in pieces[1:]), nbytes] if pieces else []
    if (pieces[0].start if pieces else nbytes) != 0:
        raise ValueError("it does not begin at 0")
    for piece, end in zip(pieces, ends, strict=True):
        if not LITERALS <= piece.number < len(sizes):
            raise ValueError(f"piece {piece} is of no record")
        room = literals_nbytes if piece.number == LITERALS else sizes[piece.number]
        if piece.start >= end or not 0 <= piece.offset <= room - (end - piece.start):
            raise ValueError(f"piece {piece}, which ends at {end}, is not within {room} bytes")
    return nbytes, pieces, records


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that, one after the other, are the elements from `start` to `stop` of a tensor in C order.

    Examples:
        >>> [box.sizes for box in boxes_of_run((4, 10), 7, 33)]
        [(1, 3), (2, 10), (1, 3)]
    """
    strides, dims = strides_of(shape), len(shape)
    while start < stop:
        index = [start // stride % size for stride, size in zip(strides, shape, strict=True)]
        dim = max(dims - 1, 0)
        while dim > 0 and index[dim] == 0 and strides[dim - 1] <= stop - start:
            dim -= 1
        if not dims:
            yield Box((), ())
            return
        count = min(shape[dim] - index[dim], (stop - start) // strides[dim])
        yield Box(tuple(index), (*(1 for _ in range(dim)), count, *shape[dim + 1 :]))
        start += count * strides[dim]
