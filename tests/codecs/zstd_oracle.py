"""A decoder of Zstandard frames without sequences, written from RFC 8878 alone: an oracle beside libzstd.

Written to be read, and to be strict: whatever the RFC demands of a frame is checked. It shares no code and no table
with what it judges. Streams that are read backwards become strings of "0" and "1", in the order in which they are read.

It knows blocks and literals of all types. Frames that need something else (sequences, a dictionary, a checksum) are
refused with `UnsupportedFrame`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Block", "InvalidFrame", "UnsupportedFrame", "blocks_of", "decode"]

_MAGIC: Final = bytes.fromhex("28B52FFD")
_MAX_BLOCK_NBYTES: Final = 128 << 10
_MAX_CODE_NBITS: Final = 11
_MAX_WEIGHTS_LOG: Final = 6


class InvalidFrame(ValueError):
    """A frame that the RFC forbids."""


class UnsupportedFrame(ValueError):
    """A frame that uses what this decoder has no code for."""


@dataclass(frozen=True)
class Block:
    """One decoded block."""

    content: bytes  # its bytes
    kind: str  # "raw", "rle" or "compressed"
    literals: str = ""  # of a compressed block: "raw", "rle", "huffman" or "treeless"
    weights: str = ""  # of Huffman literals: "listed" or "fse"
    nbits: Mapping[int, int] = field(default_factory=dict)  # the length of each symbol's code


@dataclass(frozen=True)
class _Huffman:
    symbols: dict[str, tuple[int, int]]  # by the next `max_nbits` bits: a symbol, and how many of them are its code
    max_nbits: int
    weights: str
    nbits: Mapping[int, int]


def decode(frame: bytes) -> bytes:
    """Return the content of one frame, with nothing after it."""
    return b"".join(block.content for block in blocks_of(frame))


def blocks_of(frame: bytes) -> list[Block]:
    """Return the decoded blocks of one frame, with nothing after it."""
    source = _Source(frame)
    _demand(source.take(4) == _MAGIC, "no magic number")
    window_nbytes, content_nbytes = _frame_header(source)
    blocks: list[Block] = []
    huffman, is_last = None, False
    while not is_last:
        header = source.number(3)
        is_last, kind, nbytes = bool(header & 1), header >> 1 & 3, header >> 3
        limit = min(window_nbytes, _MAX_BLOCK_NBYTES)
        _demand(nbytes <= limit, f"a block of {nbytes} bytes, more than {limit}")
        if kind == 0:
            block = Block(source.take(nbytes), "raw")
        elif kind == 1:
            block = Block(source.take(1) * nbytes, "rle")
        else:
            _demand(kind == 2, "a block of the reserved type")
            block, huffman = _compressed_block(_Source(source.take(nbytes)), huffman, limit)
        blocks.append(block)
    source.finish("the frame")
    total = sum(len(block.content) for block in blocks)
    _demand(content_nbytes in (None, total), f"{total} bytes of content where the header says {content_nbytes}")
    return blocks


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvalidFrame(otherwise)


class _Source:
    """Bytes read from the first to the last."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = bytes(data), 0

    def take(self, nbytes: int) -> bytes:
        taken = self._data[self._at : self._at + nbytes]
        _demand(len(taken) == nbytes, f"{len(taken)} bytes where {nbytes} are needed")
        self._at += nbytes
        return taken

    def number(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def rest(self) -> bytes:
        return self.take(len(self._data) - self._at)

    def finish(self, of: str) -> None:
        _demand(self._at == len(self._data), f"{len(self._data) - self._at} bytes after {of}")


def _frame_header(source: _Source) -> tuple[int, int | None]:
    """Return the window's size and the content's, None where it is unknown (3.1.1.1)."""
    descriptor = source.number(1)
    is_single = bool(descriptor & 1 << 5)
    _demand(not descriptor & 1 << 4, "the unused bit is set, which encoders must not do")
    _demand(not descriptor & 1 << 3, "the reserved bit is set")
    if descriptor & 1 << 2:
        raise UnsupportedFrame("a content checksum")
    window_nbytes = 0
    if not is_single:
        window = source.number(1)
        window_base = 1 << 10 + (window >> 3)
        window_nbytes = window_base + window_base // 8 * (window & 7)
    if source.number((0, 1, 2, 4)[descriptor & 3]):
        raise UnsupportedFrame("a dictionary")
    field_nbytes = (1 if is_single else 0, 2, 4, 8)[descriptor >> 6]
    content_nbytes = source.number(field_nbytes) + (256 if field_nbytes == 2 else 0) if field_nbytes else None
    if is_single:
        assert content_nbytes is not None
        window_nbytes = content_nbytes
    return window_nbytes, content_nbytes


def _compressed_block(source: _Source, huffman: _Huffman | None, limit: int) -> tuple[Block, _Huffman | None]:
    """Return the block, and the Huffman table that a later block may refer to (3.1.1.3)."""
    first = source.number(1)
    kind, size_format = first & 3, first >> 2 & 3
    if kind < 2:
        field_nbytes = (1, 2, 1, 3)[size_format]
        field = first | source.number(field_nbytes - 1) << 8
        nbytes = field >> (3 if field_nbytes == 1 else 4)
        _demand(nbytes <= limit, f"{nbytes} literals, more than {limit}")
        content = source.take(nbytes) if kind == 0 else source.take(1) * nbytes
        block = Block(content, "compressed", ("raw", "rle")[kind])
    else:
        field_nbytes, size_nbits = ((3, 10), (3, 10), (4, 14), (5, 18))[size_format]
        field = (first | source.number(field_nbytes - 1) << 8) >> 4
        nbytes, coded_nbytes = field & (1 << size_nbits) - 1, field >> size_nbits
        _demand(nbytes <= limit, f"{nbytes} literals, more than {limit}")
        literals = _Source(source.take(coded_nbytes))
        if kind == 2:
            huffman = _huffman_table(*_weights(literals))
        if huffman is None:
            raise InvalidFrame("no Huffman table, and none before")
        streams = _one_stream(literals, nbytes) if size_format == 0 else _four_streams(literals, nbytes)
        content = b"".join(_decode_stream(stream, count, huffman) for stream, count in streams)
        block = Block(content, "compressed", ("huffman", "treeless")[kind - 2], huffman.weights, huffman.nbits)
    if source.number(1):
        raise UnsupportedFrame("sequences")
    source.finish("the sequences")
    return block, huffman


def _one_stream(literals: _Source, nbytes: int) -> Iterator[tuple[bytes, int]]:
    yield literals.rest(), nbytes


def _four_streams(literals: _Source, nbytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield each stream and its number of symbols (4.2.2 and 3.1.1.3.1.6)."""
    _demand(nbytes >= 6, f"{nbytes} literals, too few for four streams")
    lengths = [literals.number(2) for _ in range(3)]
    quarter = (nbytes + 3) // 4
    for length in lengths:
        yield literals.take(length), quarter
    yield literals.rest(), nbytes - 3 * quarter


def _backward_bits(stream: bytes) -> str:
    """Return a stream's bits, the last one first, without padding and end mark."""
    _demand(stream != b"" and stream[-1] != 0, "a stream without an end mark")
    return f"{int.from_bytes(stream, 'little'):b}"[1:]


def _decode_stream(stream: bytes, count: int, huffman: _Huffman) -> bytes:
    """Return `count` symbols, which must be all of the stream (4.2.2)."""
    bits = _backward_bits(stream)
    padded = bits + "0" * huffman.max_nbits
    symbols, nbits, at, decoded = huffman.symbols, huffman.max_nbits, 0, bytearray()
    for _ in range(count):
        window = padded[at : at + nbits]
        _demand(len(window) == nbits, "a stream ends too early")
        symbol, used = symbols[window]
        decoded.append(symbol)
        at += used
    _demand(at == len(bits), f"{at} bits used of a stream of {len(bits)}")
    return bytes(decoded)


def _huffman_table(weights: Sequence[int], how: str) -> _Huffman:
    """Return the table of all weights but the last symbol's, which follows from the others (4.2.1)."""
    listed = sum(1 << weight >> 1 for weight in weights)
    _demand(listed > 0, "no symbol but the last")
    max_nbits = listed.bit_length()
    left = (1 << max_nbits) - listed
    _demand(left & left - 1 == 0, "weights that no last one completes to a power of two")
    _demand(max_nbits <= _MAX_CODE_NBITS, f"codes of {max_nbits} bits")
    weights = [*weights, left.bit_length()]
    _demand(1 in weights, "no symbol of weight 1")
    ordered = sorted((weight, symbol) for symbol, weight in enumerate(weights) if weight)
    # in this order each symbol has the next 2^(weight - 1) of all windows, which begin with its code
    owners = [(symbol, max_nbits + 1 - weight) for weight, symbol in ordered for _ in range(1 << weight - 1)]
    windows = {f"{at:0{max_nbits}b}": owner for at, owner in enumerate(owners)}
    return _Huffman(windows, max_nbits, how, dict(owners))


def _weights(literals: _Source) -> tuple[list[int], str]:
    """Return the weights of all symbols but the last, and how they were written (4.2.1.1)."""
    header = literals.number(1)
    if header < 128:
        return _fse_weights(literals.take(header)), "fse"
    count = header - 127
    weights = [nibble for byte in literals.take((count + 1) // 2) for nibble in (byte >> 4, byte & 15)]
    return weights[:count], "listed"


def _fse_weights(data: bytes) -> list[int]:
    """Return weights from one stream with two states that take turns (4.2.1.2)."""
    log, probabilities, header_nbytes = _distribution(data, _MAX_WEIGHTS_LOG)
    table = _fse_table(log, probabilities)
    bits = _backward_bits(data[header_nbytes:])
    _demand(len(bits) >= 2 * log, "no bits for two states")
    states, at, turn = [int(bits[:log], 2), int(bits[log : 2 * log], 2)], 2 * log, 0
    weights = []
    while True:
        symbol, nbits, baseline = table[states[turn]]
        weights.append(symbol)
        if nbits > len(bits) - at:
            weights.append(table[states[1 - turn]][0])
            _demand(len(weights) <= 255, f"{len(weights)} weights")
            return weights
        states[turn] = baseline + int("0" + bits[at : at + nbits], 2)
        at += nbits
        turn = 1 - turn
        _demand(len(weights) <= 255, "more than 255 weights")


def _distribution(data: bytes, max_log: int) -> tuple[int, list[int], int]:
    """Return the accuracy log, the probability of each symbol (-1 is "less than 1"), and the bytes used (4.1.1)."""
    number, at = int.from_bytes(data, "little"), 4
    log = (number & 15) + 5
    _demand(log <= max_log, f"an accuracy log of {log}")
    left, probabilities = 1 << log, list[int]()
    while left:
        nbits = (left + 1).bit_length()
        short_values = (1 << nbits) - 1 - (left + 1)  # the lowest ones take a bit less
        value = number >> at & (1 << nbits - 1) - 1
        if value < short_values:
            at += nbits - 1
        else:
            value = number >> at & (1 << nbits) - 1
            value -= short_values if value >= 1 << nbits - 1 else 0
            at += nbits
        probabilities.append(value - 1)
        left -= abs(value - 1)
        repeat = 3 if value == 1 else 0
        while repeat == 3:
            repeat = number >> at & 3
            probabilities += [0] * repeat
            at += 2
        _demand(at <= 8 * len(data), "a distribution that does not end")
    _demand(len(probabilities) <= 256, f"a distribution of {len(probabilities)} symbols")
    _demand(sum(map(bool, probabilities)) >= 2, "a distribution of one symbol")
    return log, probabilities, (at + 7) // 8


def _fse_table(log: int, probabilities: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return for each state its symbol, and the next state's number of bits and baseline (4.1.1)."""
    size = 1 << log
    symbols: list[int | None] = [None] * size
    rare = [symbol for symbol, probability in enumerate(probabilities) if probability == -1]
    for place, symbol in enumerate(rare, 1):
        symbols[size - place] = symbol
    step = (size >> 1) + (size >> 3) + 3
    free = [state for state in (k * step % size for k in range(size)) if symbols[state] is None]
    common = [symbol for symbol, probability in enumerate(probabilities) for _ in range(probability)]
    for state, symbol in zip(free, common, strict=True):
        symbols[state] = symbol
    table = [(0, 0, 0)] * size
    for symbol in set(symbols):
        assert symbol is not None
        states = [state for state in range(size) if symbols[state] == symbol]
        shares = 1 << (len(states) - 1).bit_length()
        doubled = shares - len(states)  # the lowest states, which come last in the order of baselines
        widths = [2 * size // shares] * doubled + [size // shares] * (len(states) - doubled)
        baseline = 0
        shared = [*zip(states, widths, strict=True)]
        for state, width in shared[doubled:] + shared[:doubled]:
            table[state] = (symbol, width.bit_length() - 1, baseline)
            baseline += width
    return table
