"""Whole blocks of planes and literals: the bytes that the engine makes in steps, from rows wherever they lie."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import CodecChain, Planes, RowCol, Zstd
from dcp_nvcomp.codecs import registry as module
from dcp_nvcomp.codecs.base import U8, BlockRow, EncodedBlock
from dcp_nvcomp.codecs.registry import PlanesLiterals, planes_literals
from dcp_nvcomp.codecs.transforms.rowcol_numpy import ESCAPES_SHIFT, PREDICTED, predicted_nbytes
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.errors import CorruptDataError
from tests.effort import THOROUGH, examples

from . import rowcol_floats
from .rowcol_floats import KINDS as ROWCOL
from .sanitizers import run_sanitized

pytest.importorskip("dcp_nvcomp.codecs._planes_literals")

DRAWN = settings(max_examples=examples(100), deadline=None)
KINDS = {"mixed": lambda floats: floats, "positive": np.abs, "negative": lambda floats: -np.abs(floats), "noise": None}
FLOATS = {2: np.float16, 4: np.float32, 8: np.float64}


def chain_of(width: int, slice_nbytes: int = 128 << 10) -> CodecChain:
    return CodecChain(Planes(width), Zstd(slice_nbytes, literals_only=True))


def floats_of(random: np.random.Generator, rows: int, columns: int, width: int, kind: str) -> U8:
    """Rows of trained floats, as bytes; or of any bytes, whose exponents do not get shorter."""
    signed = KINDS[kind]
    if signed is None:
        return random.integers(0, 256, (rows, columns * width), np.uint8)
    floats = signed(random.standard_normal((rows, columns)) * 0.02).astype(FLOATS[width])
    return np.asarray(floats.view(np.uint8).reshape(rows, columns * width))


def room(chain: CodecChain, rows: U8, widths: Sequence[int]) -> memoryview:
    return memoryview(bytearray(sum(chain.max_encoded_nbytes(len(rows) * width) for width in widths)))


def encoded(rows: U8, widths: tuple[int, ...], chain: CodecChain) -> list[EncodedBlock]:
    """The blocks, coded whole."""
    whole, out = planes_literals(chain), room(chain, rows, widths)
    assert whole is not None
    done = whole.encode(rows, widths, out)
    assert done is not None
    blocks, end = done
    assert end <= len(out)
    assert bytes(out[end - len(blocks[-1].data) : end]) == bytes(blocks[-1].data)
    return blocks


def in_steps(monkeypatch: pytest.MonkeyPatch) -> CpuEngine:
    """An engine for which nothing was compiled."""
    monkeypatch.setattr(module, "kernels", None)
    return CpuEngine()


@st.composite
def cases(draw: st.DrawFn) -> tuple[U8, tuple[int, ...], CodecChain]:
    """Rows, the widths of the blocks, and a chain none of whose slices is libzstd's."""
    width, slice_nbytes = draw(st.sampled_from([2, 4, 8])), draw(st.sampled_from([1024, 2048, 128 << 10]))
    height = draw(st.integers(1, 40))
    # each block a multiple of 1024 floats
    step = 1024 // np.gcd(1024, height)
    columns = [int(step) * count for count in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))]
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    rows = floats_of(random, height, sum(columns), width, draw(st.sampled_from(sorted(KINDS))))
    if draw(st.booleans()):  # rows of a wider matrix, at an odd place
        whole = np.zeros((height, rows.shape[1] + 37), np.uint8)
        whole[:, 13 : 13 + rows.shape[1]] = rows
        rows = whole[:, 13 : 13 + rows.shape[1]]
    return rows, tuple(width * count for count in columns), chain_of(width, slice_nbytes)


@DRAWN
@given(cases())
def test_the_bytes_are_those_made_in_steps(case: tuple[U8, tuple[int, ...], CodecChain]) -> None:
    rows, widths, chain = case
    blocks, start = encoded(rows, widths, chain), 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        engine = in_steps(monkeypatch)
        for block, width in zip(blocks, widths, strict=True):
            data = np.ascontiguousarray(rows[:, start : start + width]).reshape(-1)
            expected = engine.encode(data, chain, room(chain, data[np.newaxis], [data.size]))
            assert (bytes(block.data), block.row) == (bytes(expected.data), expected.row)
            assert block.uncompressed_nbytes == data.size
            start += width


@DRAWN
@given(cases(), st.sampled_from(["stored", "full", "off"]))
def test_rows_come_back(case: tuple[U8, tuple[int, ...], CodecChain], verify: str) -> None:
    rows, widths, chain = case
    given_blocks = [(block.data, block.row) for block in encoded(rows, widths, chain)]
    into = np.full((len(rows), rows.shape[1] + 10), 0xAA, np.uint8)
    assert CpuEngine().decode_beside(given_blocks, widths, chain, into[:, 5:-5], verify=verify)
    assert np.array_equal(into[:, 5:-5], rows)
    assert (into[:, :5] == 0xAA).all()
    assert (into[:, -5:] == 0xAA).all()


def test_one_block_of_rows_comes_back_in_steps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, chain = floats_of(np.random.default_rng(1), 32, 256, 4, "mixed"), chain_of(4)
    (block,) = encoded(rows, (1024,), chain)
    into = np.full((32, 1024 + 10), 0xAA, np.uint8)
    in_steps(monkeypatch).decode(block.data, block.row, chain, into[:, 5:-5], verify="full")
    assert np.array_equal(into[:, 5:-5], rows)
    assert (into[:, -5:] == 0xAA).all()


@pytest.mark.parametrize("nbytes", [1024, 4096 + 8, 3 * 512, 3 * 512 - 2, 12288 + 3 * 64, 20000])
@pytest.mark.parametrize("rows", [64, 65])
def test_the_sum_is_the_librarys(rows: int, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, (rows, nbytes), np.uint8)
    (block,) = encoded(data, (nbytes,), chain_of(2, 1 << 20))
    assert block.row.uncompressed_crc == crc32c(data.tobytes())
    assert block.row.encoded_crc == crc32c(bytes(block.data))


def test_a_short_slice_is_left_to_the_engine() -> None:
    rows, chain = floats_of(np.random.default_rng(1), 1, 2048 + 1000, 4, "mixed"), chain_of(4, 2048)
    whole, out = planes_literals(chain), room(chain, rows, (rows.size,))
    assert whole is not None
    assert whole.encode(rows, (rows.size,), out) is None
    block, into = CpuEngine().encode(rows[0], chain, out), np.zeros_like(rows)
    outcome = whole.decode([(block.data, block.row)], (rows.size,), into, verify="full")
    assert (outcome.decoded, outcome.is_foreign) == (False, False)
    CpuEngine().decode(block.data, block.row, chain, into[0], verify="full")
    assert np.array_equal(into, rows)


def test_a_strip_with_a_short_block_is_coded_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, chain = floats_of(np.random.default_rng(1), 8, 1024 + 8, 4, "mixed"), chain_of(4)
    out, widths, whole = room(chain, rows, (4096, 32)), (4096, 32), []
    encode = PlanesLiterals.encode
    monkeypatch.setattr(PlanesLiterals, "encode", lambda self, *given: whole.append(encode(self, *given)) or whole[-1])
    blocks, end = CpuEngine().encode_beside(rows, widths, chain, out)
    assert [done is not None for done in whole] == [False, True, False]
    assert end == sum(len(block.data) for block in blocks)
    given_blocks, into = [(block.data, block.row) for block in blocks], np.zeros_like(rows)
    assert not CpuEngine().decode_beside(given_blocks, widths, chain, into, verify="full")
    CpuEngine().decode(*given_blocks[0], chain, into[:, :4096], verify="full")
    CpuEngine().decode(*given_blocks[1], chain, into[:, 4096:], verify="full")
    assert np.array_equal(into, rows)


def test_frames_made_elsewhere_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = floats_of(np.random.default_rng(1), 1, 1 << 16, 4, "mixed")
    chain, tries = CodecChain(Planes(4), Zstd(level=1)), []
    assert planes_literals(chain) is None
    block = CpuEngine().encode(rows[0], chain, room(chain, rows, (rows.size,)))
    engine, decode = CpuEngine(), PlanesLiterals.decode
    monkeypatch.setattr(PlanesLiterals, "decode", lambda *args, **more: tries.append(1) or decode(*args, **more))
    for _ in range(17):
        into = np.zeros_like(rows[0])
        engine.decode(block.data, block.row, chain, into, verify="full")
        assert np.array_equal(into, rows[0])
    assert len(tries) == 2, "one of 16"
    # the two chains look the same in a footer, and in one file both may occur
    (ours,) = encoded(rows, (rows.size,), chain_of(4))
    for _ in range(17):
        engine.decode(ours.data, ours.row, chain, into, verify="full")
    assert len(tries) > 2


@pytest.mark.parametrize("chain", [
    CodecChain(Planes(4, ()), Zstd(literals_only=True)),
    CodecChain(Planes(4, ("exponent", "rest")), Zstd(literals_only=True)),
    CodecChain(Planes(4)),
])  # fmt: skip
def test_other_chains_are_coded_in_steps(chain: CodecChain) -> None:
    assert planes_literals(chain) is None
    assert planes_literals(chain, decoding=True) is None


def damaged(block: EncodedBlock, bit: int) -> memoryview:
    data = bytearray(block.data)
    data[bit // 8] ^= 1 << bit % 8
    return memoryview(data)


@DRAWN
@given(st.integers(0, (1 << 40)), st.integers(0, 2))
def test_a_bit_that_flipped_is_found(place: int, which: int) -> None:
    rows, chain, widths = floats_of(np.random.default_rng(2), 16, 768, 4, "positive"), chain_of(4, 2048), (1024,) * 3
    blocks = encoded(rows, widths, chain)
    given_blocks = [(block.data, block.row) for block in blocks]
    given_blocks[which] = damaged(blocks[which], place % (8 * len(blocks[which].data))), blocks[which].row
    engine, into = CpuEngine(), np.zeros_like(rows)
    assert not engine.decode_beside(given_blocks, widths, chain, into, verify="stored")
    with pytest.raises(CorruptDataError, match="The stored bytes fail their CRC"):
        engine.decode(*given_blocks[which], chain, into[:, :1024], verify="stored")
    # unchecked, it decodes to something else or is refused, and with the right sum of the wrong bytes it is found too
    stored = blocks[which].row._replace(encoded_crc=crc32c(bytes(given_blocks[which][0])))
    try:
        engine.decode(given_blocks[which][0], stored, chain, into[:, :1024], verify="full")
    except CorruptDataError:
        return
    assert np.array_equal(into[:, :1024], rows[:, which * 1024 : (which + 1) * 1024])  # padding


def test_decoded_bytes_that_are_not_those_saved_are_found() -> None:
    rows, chain = floats_of(np.random.default_rng(2), 16, 512, 4, "mixed"), chain_of(4)
    one, other = encoded(rows, (1024, 1024), chain)
    wrong, into = other.row._replace(uncompressed_crc=other.row.uncompressed_crc ^ 1), np.zeros_like(rows)
    blocks = [(one.data, one.row), (other.data, wrong)]
    assert CpuEngine().decode_beside(blocks, (1024, 1024), chain, into, verify="stored")
    assert not CpuEngine().decode_beside(blocks, (1024, 1024), chain, into, verify="full")
    with pytest.raises(CorruptDataError, match="The decoded bytes fail their CRC"):
        CpuEngine().decode(other.data, wrong, chain, into[:, 1024:], verify="full")


def forged(random: np.random.Generator, block: EncodedBlock) -> tuple[bytes, int, tuple[int, ...], int, int]:
    """An encoded block and its rows of the tables as no encoder writes them, its sum right most of the time."""
    data, row = bytearray(block.data), block.row
    for _ in range(random.integers(0, 3)):
        data[random.integers(0, len(data))] = random.integers(0, 256)
    if random.integers(0, 3) == 0:
        data = data[: random.integers(0, len(data))]
    sizes = list(row.slice_nbytes)
    if random.integers(0, 2) == 0:
        at = int(random.integers(0, len(sizes)))
        near = max(0, sizes[at] + int(random.integers(-20, 20)))
        sizes[at] = (near, int(random.integers(0, 4096)), 1 << 62, (1 << 64) - 1)[int(random.integers(0, 4))]
    count = int(random.choice([len(sizes), len(sizes), len(sizes), random.integers(0, len(sizes)), 3 * len(sizes)]))
    sizes = (3 * sizes)[:count]
    flags = int(
        random.choice(
            [*2 * [row.flags], row.flags ^ 8, row.flags + 0x100, 0, 1, 2, 3, 4, 7, 8, 13, 0x304, 0xFFFFFF05, 0xFFFFFFFF]
        )
    )
    sum_of_data = crc32c(bytes(data)) ^ int(random.integers(0, 8) == 0)
    return bytes(data), flags, tuple(sizes), sum_of_data, row.uncompressed_crc


def all_escaped(width: int) -> tuple[bytes, int, tuple[int, ...], int, int]:
    """A predicted block of 1024 floats in rows of 16, all with the symbol zero, of which its flags say one."""
    flags = PREDICTED | 1 | 1 << ESCAPES_SHIFT
    nbytes = 1024 * (width - 2) + -(-predicted_nbytes(1024, 16, flags) // 16) * 16 + 1024
    return bytes(nbytes), flags, (1024,), crc32c(bytes(nbytes)), 0


SANITIZED = """
import numpy as np
made, forged = [], []
for rows, height, step, widths, width, slice_nbytes, columns, most in pickle.load(open(sys.argv[2], "rb")):
    # of exactly these lengths, on a heap that is watched
    source = np.frombuffer(bytearray(rows), np.uint8)
    matrix = np.lib.stride_tricks.as_strided(source, (height, sum(widths)), (step, 1))
    made.append([])
    out = bytearray(most)
    for start, stop, *row in kernels.encode_rows(matrix, widths, width, slice_nbytes, columns, out):
        made[-1].append((bytes(out[start:stop]), *row))
    try:
        kernels.encode_rows(matrix, widths, width, slice_nbytes, columns, bytearray(most - 1))
        raise AssertionError("There was less room than it takes")
    except ValueError:
        pass
    for wrong in (-1, (1 << 20) + 1):
        try:
            kernels.encode_rows(matrix, widths, width, slice_nbytes, wrong, out)
            raise AssertionError("So many columns need more room than was computed")
        except ValueError:
            pass
    try:
        kernels.encode_rows(matrix, widths, width, slice_nbytes + 1, columns, out)
        raise AssertionError("Slices that are no multiple of 16 need more room than was computed")
    except ValueError:
        pass
    into = np.frombuffer(bytearray(len(rows)), np.uint8)
    target = np.lib.stride_tricks.as_strided(into, matrix.shape, (step, 1))
    assert kernels.decode_rows(made[-1], widths, target, width, slice_nbytes, columns, True, True) == 0
    assert (target == matrix).all()
for blocks, widths, height, width, slice_nbytes, columns in pickle.load(open(sys.argv[3], "rb")):
    target = np.frombuffer(bytearray(height * sum(widths)), np.uint8).reshape(height, -1)
    for check_decoded in (True, False):
        given = [(bytearray(data), *row) for data, *row in blocks]
        forged.append(kernels.decode_rows(given, widths, target, width, slice_nbytes, columns, True, check_decoded))
pickle.dump((made, forged), open(sys.argv[4], "wb"))
"""


@pytest.mark.ci
def test_under_sanitizers(sanitized_planes_literals: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    cases, expected, forgeries = [], [], []
    for _ in range(1500 if THOROUGH else 60):
        width, slice_nbytes = int(random.choice([2, 4, 8])), int(random.choice([1024, 4096, 1 << 17]))
        height, gap = int(random.choice([1, 3, 8, 40])), int(random.choice([0, 0, 9]))
        columns = [1024 * int(count) for count in random.integers(1, 4, random.integers(1, 4))]
        rows, predicted = floats_of(random, height, sum(columns), width, str(random.choice(sorted(KINDS)))), 0
        widths, chain = tuple(width * count for count in columns), chain_of(width, slice_nbytes)
        if width < 8 and random.integers(0, 2):
            predicted = int(random.choice([1, 7, 64, 1024, 1000]))
            rows = rowcol_floats.floats_of(random, rows.size // width, predicted, width, str(random.choice(ROWCOL)))
            rows = rows.reshape(height, -1)
            chain = CodecChain(RowCol(width, predicted), Zstd(slice_nbytes, literals_only=True))
        padded = np.zeros((height, rows.shape[1] + gap), np.uint8)
        padded[:, : rows.shape[1]] = rows
        flat = padded.tobytes()[: padded.size - gap]
        most = len(room(chain, rows, widths))
        cases.append((flat, height, padded.shape[1], widths, width, slice_nbytes, predicted, most))
        expected.append(encoded(rows, widths, chain))
        for _ in range(4):
            forgeries.append(
                ([forged(random, block) for block in expected[-1]], widths, height, width, slice_nbytes, predicted)
            )
    forgeries += [([all_escaped(width)], (1024 * width,), 1, width, 1024, 16) for width in (2, 4)]
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    (tmp_path / "forgeries").write_bytes(pickle.dumps(forgeries))
    paths = [tmp_path / name for name in ("cases", "forgeries", "made")]
    run_sanitized(SANITIZED, sanitized_planes_literals, *paths)
    made, outcomes = pickle.loads(paths[2].read_bytes())
    for blocks, found in zip(expected, made, strict=True):
        for block, (data, flags, slices, encoded_crc, crc) in zip(blocks, found, strict=True):
            assert (data, BlockRow(flags, slices, encoded_crc, crc)) == (bytes(block.data), block.row)
    kernels = module.kernels
    assert outcomes[-4:] == [kernels.FOREIGN] * 4
    assert set(outcomes) == {kernels.DECODED, kernels.FOREIGN, kernels.STORED_CRC, kernels.DECODED_CRC}
