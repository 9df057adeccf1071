"""`rowcol`: every bit comes back, both kernels make the same bytes, and no file makes them read or write elsewhere."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dcp_nvcomp.codecs import CodecChain, Deflate, Planes, RowCol, Zstd, registry
from dcp_nvcomp.codecs.base import ELEMENT_TYPES, U8, EncodedBlock, ScratchArrays
from dcp_nvcomp.codecs.registry import chain_from_json
from dcp_nvcomp.codecs.transforms import rowcol, rowcol_numpy
from dcp_nvcomp.codecs.transforms.rowcol_numpy import ESCAPES_SHIFT, NARROW_ROWS, PREDICTED, predicted_nbytes
from dcp_nvcomp.engines.cpu import CpuEngine
from dcp_nvcomp.errors import ConfigurationError, CorruptDataError, FormatError
from tests.effort import examples

from .rowcol_floats import HOSTILE, KINDS, floats_of, hostile
from .sanitizers import compile_sanitized, run_sanitized

DRAWN = settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True, params=["_rowcol", "rowcol_numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Every test here runs with the kernels in numpy, and, where they are compiled, with those in C."""
    module: ModuleType = pytest.importorskip(f"dcp_nvcomp.codecs.transforms.{request.param}")
    monkeypatch.setattr(rowcol, "kernels", module)
    return module


@pytest.fixture(params=["whole", "in steps"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CpuEngine:
    """An engine with what is compiled for whole blocks, and one without."""
    if request.param == "in steps":
        monkeypatch.setattr(registry, "kernels", None)
    return CpuEngine()


def split(codec: RowCol, raw: U8) -> tuple[int, list[U8]]:
    outputs = [np.full(plane.nbytes, 0xAA, np.uint8) for plane in codec.layout(raw.size, 0, True)]
    flags = codec.split(raw, outputs)
    layout = codec.layout(raw.size, flags, True)
    return flags, [array[: plane.nbytes] for array, plane in zip(outputs, layout, strict=True)]


def merged(codec: RowCol, planes: list[U8], flags: int, nbytes: int) -> U8:
    out = np.full(nbytes, 0x55, np.uint8)
    codec.merge(planes, flags, out, ScratchArrays())
    return out


def chain_of(width: int, columns: int) -> CodecChain:
    return CodecChain(RowCol(width, columns), Zstd(literals_only=True))


def encoded(raw: U8, chain: CodecChain, engine: CpuEngine | None = None) -> EncodedBlock:
    most = chain.max_encoded_nbytes(raw.size)
    block = (engine or CpuEngine()).encode(raw, chain, memoryview(bytearray(most)))
    assert len(block.data) <= most
    return block


cases = {
    "width": st.sampled_from([2, 4]),
    "rows": st.integers(0, 60),
    "columns": st.integers(1, 90),
    "last": st.integers(0, 89),
    "kind": st.sampled_from(KINDS),
    "seed": st.integers(0, 1 << 30),
}


@DRAWN
@given(**cases)
def test_every_bit_comes_back(width: int, rows: int, columns: int, last: int, kind: str, seed: int) -> None:
    count = rows * columns + min(last, columns - 1)
    raw = floats_of(np.random.default_rng(seed), count, columns, width, kind)
    codec = RowCol(width, columns)
    flags, planes = split(codec, raw)
    assert codec.check_flags(flags)
    whole = codec.layout(raw.size, 0, True)
    assert all(len(plane) <= most.nbytes for plane, most in zip(planes, whole, strict=True))
    assert merged(codec, planes, flags, raw.size).tobytes() == raw.tobytes()


@DRAWN
@given(**cases)
def test_both_kernels_make_the_same(width: int, rows: int, columns: int, last: int, kind: str, seed: int) -> None:
    compiled = pytest.importorskip("dcp_nvcomp.codecs.transforms._rowcol")
    count = rows * columns + min(last, columns - 1)
    raw, codec, made = floats_of(np.random.default_rng(seed), count, columns, width, kind), RowCol(width, columns), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (compiled, rowcol_numpy):
            monkeypatch.setattr(rowcol, "kernels", module)
            flags, planes = split(codec, raw)
            made.append((flags, [plane.tobytes() for plane in planes]))
    assert made[0] == made[1]


def split_planes(rows: int, columns: int, value: int, short: int, apart: int = 120) -> tuple[U8, U8]:
    """Return planes `rest` and `exponent` of positive floats whose 11 bits are about `value`, the last row shorter."""
    random = np.random.default_rng(1)
    values = value + random.integers(-apart // 2, apart // 2, (rows, 1)) + random.integers(-60, 60, columns)
    values = np.clip(values + random.integers(-4, 5, (rows, columns)), 0, 2047).reshape(-1)[: rows * columns - short]
    return ((values & 7) << 4 | random.integers(0, 16, values.size)).astype(np.uint8), (values >> 3).astype(np.uint8)


def predicted_by(module: ModuleType, planes: tuple[U8, U8], columns: int) -> tuple[int, bytes, bytes]:
    rest, exponent = (plane.copy() for plane in planes)
    flags = module.predict_planes(rest, exponent, columns, 1)
    nbytes = predicted_nbytes(rest.size, columns, flags) if flags else rest.size
    return flags, rest[:nbytes].tobytes(), exponent.tobytes()


# Rows longer and columns taller than what is summed in 16 bits, with values up to the highest, those of infinities; and
# as many rows as a predicted block can have, and one more.
WIDE = [
    *((rows, columns, value) for rows, columns in ((8, 4096), (64, 2000), (300, 512)) for value in (860, 2000)),
    *((4, 65536, 300), (65535, 5, 1000), (65536, 5, 1000)),
]


@pytest.mark.parametrize(("rows", "columns", "value"), WIDE)
def test_both_kernels_make_the_same_of_large_matrices(rows: int, columns: int, value: int) -> None:
    compiled = pytest.importorskip("dcp_nvcomp.codecs.transforms._rowcol")
    for short in (0, columns // 3):
        planes = split_planes(rows, columns, value, short)
        made = [predicted_by(module, planes, columns) for module in (compiled, rowcol_numpy)]
        assert made[0] == made[1]
        assert bool(made[0][0]) == (rows <= 65535)


SANITIZED = """
made = []
for rest, exponent, columns in pickle.load(open(sys.argv[2], "rb")):
    rest, exponent = bytearray(rest), bytearray(exponent)
    made.append((kernels.predict_planes(rest, exponent, columns, 1), bytes(rest), bytes(exponent)))
restored = []
for packed, symbols, columns, flags in pickle.load(open(sys.argv[3], "rb")):
    rest, exponent = bytearray(len(symbols)), bytearray(len(symbols))
    kernels.restore_planes(packed, symbols, rest, exponent, columns, flags)
    restored.append((bytes(rest), bytes(exponent)))
pickle.dump((made, restored), open(sys.argv[4], "wb"))
"""


@pytest.mark.ci
@pytest.mark.parametrize("kernels", ["rowcol_numpy"], indirect=True)  # once
@pytest.mark.usefixtures("kernels")
def test_under_sanitizers(tmp_path: Path) -> None:
    cases = [(*split_planes(*shape, shape[1] // 3), shape[1]) for shape in WIDE]
    cases += [(*split_planes(60, 100, 900, 0, apart), 100) for apart in (240, 300, 1000)]
    expected = [predicted_by(rowcol_numpy, (rest, exponent), columns) for rest, exponent, columns in cases]
    packed = [
        (rest, symbols, case[2], flags) for (flags, rest, symbols), case in zip(expected, cases, strict=True) if flags
    ]
    (tmp_path / "cases").write_bytes(pickle.dumps([(bytes(rest), bytes(exponent), c) for rest, exponent, c in cases]))
    (tmp_path / "packed").write_bytes(pickle.dumps(packed))
    paths = [tmp_path / name for name in ("cases", "packed", "made")]
    run_sanitized(SANITIZED, compile_sanitized(tmp_path, "transforms/_rowcol.c"), *paths)
    made, restored = pickle.loads(paths[2].read_bytes())
    assert [
        (flags, rest[: len(e[1])], exponent) for (flags, rest, exponent), e in zip(made, expected, strict=True)
    ] == expected
    originals = [(bytes(rest), bytes(exponent)) for (rest, exponent, _), e in zip(cases, expected, strict=True) if e[0]]
    assert restored == originals


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize(("count", "columns"), [(6000, 75), (6001, 75), (4096, 1), (100, 4096), (4096, 4096), (1, 1)])
def test_bits_that_no_training_makes(width: int, count: int, columns: int, kind: str, engine: CpuEngine) -> None:
    raw, chain = hostile(count, columns, width, kind), chain_of(width, columns)
    block, out = encoded(raw, chain, engine), np.empty_like(raw)
    engine.decode(block.data, block.row, chain, out, verify="full")
    assert out.tobytes() == raw.tobytes()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("kind", ["moments", "signed", "negative", "escapes", "escapes below"])
def test_what_rows_and_columns_predict_gets_smaller(width: int, kind: str) -> None:
    raw = floats_of(np.random.default_rng(1), 128 * 256, 256, width, kind)
    block = encoded(raw, chain_of(width, 256))
    assert block.row.flags & PREDICTED
    assert (block.row.flags >> ESCAPES_SHIFT > 0) == ("escapes" in kind)
    assert block.row.flags & 3 == {"signed": 0, "negative": 3}.get(kind, 1)
    assert np.array_equal(merged(RowCol(width, 256), split(RowCol(width, 256), raw)[1], block.row.flags, raw.size), raw)
    planes = encoded(raw, CodecChain(Planes(width), Zstd(literals_only=True)))
    assert len(block.data) < (0.94 if width == 4 else 0.88) * len(planes.data)


@pytest.mark.parametrize(("apart", "narrow"), [(100, True), (255, True), (256, False), (1500, False)])
@pytest.mark.parametrize("negative", [False, True])
def test_rows_take_a_byte_each_where_they_are_not_too_far_apart(
    engine: CpuEngine, apart: int, narrow: bool, negative: bool
) -> None:
    random = np.random.default_rng(1)
    rows = np.array([300, 300 + apart, *random.integers(300, 301 + apart, 98)])
    values = rows[:, None] + random.integers(-3, 4, (100, 128))
    values[:2] = rows[:2, None]  # whose means are exactly these
    raw = (values << 20 | random.integers(0, 1 << 20, values.shape)).astype(np.uint32).reshape(-1)
    raw |= np.uint32(negative) << np.uint32(31)
    block, out = encoded(raw.view(np.uint8), chain_of(4, 128), engine), np.empty(raw.nbytes, np.uint8)
    assert block.row.flags & (NARROW_ROWS | PREDICTED) == (NARROW_ROWS * narrow | PREDICTED)
    engine.decode(block.data, block.row, chain_of(4, 128), out, verify="full")
    assert out.tobytes() == raw.tobytes()


@pytest.mark.parametrize("width", [2, 4])
def test_a_block_for_which_it_does_not_pay_is_one_of_planes(width: int) -> None:
    random = np.random.default_rng(1)
    for raw in (floats_of(random, 128 * 256, 256, width, "noise"), floats_of(random, 300, 256, width, "moments")):
        ours, planes = (
            encoded(raw, chain_of(width, 256)),
            encoded(raw, CodecChain(Planes(width), Zstd(literals_only=True))),
        )
        assert (bytes(ours.data), ours.row) == (bytes(planes.data), planes.row)


@DRAWN
@given(**cases)
def test_whole_blocks_are_those_made_in_steps(
    kernels: ModuleType, width: int, rows: int, columns: int, last: int, kind: str, seed: int
) -> None:
    count = rows * columns + min(last, columns - 1) + 1024
    raw, chain = floats_of(np.random.default_rng(seed), count, columns, width, kind), chain_of(width, columns)
    block = encoded(raw, chain)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(registry, "kernels", None)
        expected, steps = encoded(raw, chain), CpuEngine()
    assert (bytes(block.data), block.row) == (bytes(expected.data), expected.row)
    for engine in (CpuEngine(), steps):
        out = np.empty_like(raw)
        engine.decode(block.data, block.row, chain, out, verify="full")
        assert out.tobytes() == raw.tobytes()


def test_blocks_beside_each_other_have_vectors_of_their_own() -> None:
    pytest.importorskip("dcp_nvcomp.codecs._planes_literals")
    matrix = floats_of(np.random.default_rng(1), 64 * 700, 700, 4, "escapes").reshape(64, 2800)
    chain, widths, engine = chain_of(4, 256), (1024, 1024, 752), CpuEngine()  # the last one wraps
    out = memoryview(bytearray(sum(chain.max_encoded_nbytes(64 * width) for width in widths)))
    blocks, _ = engine.encode_beside(matrix, widths, chain, out)
    assert [bool(block.row.flags & PREDICTED) for block in blocks][:2] == [True, True]
    for block, start, width in zip(blocks, (0, 1024, 2048), widths, strict=True):
        expected = encoded(np.ascontiguousarray(matrix[:, start : start + width]).reshape(-1), chain)
        assert (bytes(block.data), block.row) == (bytes(expected.data), expected.row)
    into = np.zeros_like(matrix)
    assert engine.decode_beside([(block.data, block.row) for block in blocks], widths, chain, into, verify="full")
    assert np.array_equal(into, matrix)


def test_other_coders_code_it_too(engine: CpuEngine) -> None:
    raw = floats_of(np.random.default_rng(1), 6000, 75, 4, "escapes")
    for coder in (Zstd(1024, level=1), Deflate(2048), Zstd(256, literals_only=True)):
        chain, out = CodecChain(RowCol(4, 75), coder), np.empty_like(raw)
        block = encoded(raw, chain, engine)
        engine.decode(block.data, block.row, chain, out, verify="full")
        assert block.row.flags & PREDICTED
        assert out.tobytes() == raw.tobytes()


# ---- what files can say ----


def places(raw: U8, columns: int, flags: int) -> dict[str, int]:
    """A byte of each part of an encoded block of fp32 with both signs."""
    count = raw.size // 4
    rest = 2 * count  # the low plane is before
    rows = -(-count // columns)
    rows_nbytes = 2 + rows if flags & NARROW_ROWS else 2 * rows
    ends = np.cumsum([rest, rows_nbytes, columns, 2 * (flags >> ESCAPES_SHIFT), (count + 7) // 8])
    names = ("rows", "columns", "escapes", "signs", "nibbles")
    return {"low": 5, **{name: int(end) + 1 for name, end in zip(names, ends, strict=True)}, "symbols": -100}


@pytest.mark.parametrize("where", ["low", "rows", "columns", "escapes", "signs", "nibbles", "symbols"])
def test_a_bit_that_flipped_is_found(engine: CpuEngine, where: str) -> None:
    raw, chain = floats_of(np.random.default_rng(3), 8192, 128, 4, "escapes"), chain_of(4, 128)
    raw.view(np.uint32)[::3] |= 0x8000_0000
    block, out = encoded(raw, chain), np.empty_like(raw)
    assert block.row.flags & PREDICTED
    assert block.row.flags & 1 == 0
    data = bytearray(block.data)
    data[places(raw, 128, block.row.flags)[where]] ^= 4
    with pytest.raises(CorruptDataError, match="The stored bytes fail their CRC"):
        engine.decode(memoryview(data), block.row, chain, out, verify="stored")
    fixed = block.row._replace(encoded_crc=crc32c(bytes(data)))
    with pytest.raises(CorruptDataError):
        engine.decode(memoryview(data), fixed, chain, out, verify="full")


@pytest.mark.parametrize("more", [-1, 1, 100, 1 << 20, (1 << 24) - 100])
@pytest.mark.parametrize("verify", ["off", "full"])
def test_another_number_of_escapes_is_refused(engine: CpuEngine, more: int, verify: str) -> None:
    raw, chain = floats_of(np.random.default_rng(3), 8192, 128, 4, "escapes"), chain_of(4, 128)
    block = encoded(raw, chain)
    assert block.row.flags >> ESCAPES_SHIFT > 1
    flags = block.row.flags + (more << ESCAPES_SHIFT)
    for data in (block.data, memoryview(bytes(block.data) + bytes(64 << 20))):  # as long as they say, too
        row = block.row._replace(flags=flags, encoded_crc=crc32c(data))
        with pytest.raises(CorruptDataError):
            engine.decode(data, row, chain, np.empty_like(raw), verify=verify)


def test_symbols_of_zero_that_are_not_escapes_are_refused(kernels: ModuleType) -> None:
    """Or values would be read from behind the escapes."""
    symbols, flags = np.zeros(4096, np.uint8), PREDICTED | 1 | 3 << ESCAPES_SHIFT
    packed = np.zeros(predicted_nbytes(4096, 64, flags), np.uint8)
    rest, exponent = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
    assert kernels.restore_planes(packed, symbols, rest, exponent, 64, flags) is False
    symbols[3:] = 1
    assert kernels.restore_planes(packed, symbols, rest, exponent, 64, flags) is True


def test_a_rest_that_is_longer_than_its_floats_are_many_is_refused() -> None:
    """Nobody writes it: `planes` are shorter."""
    symbols, flags = np.zeros(4096, np.uint8), PREDICTED | 1 | 4096 << ESCAPES_SHIFT
    packed = np.zeros(predicted_nbytes(4096, 64, flags), np.uint8)
    with pytest.raises(CorruptDataError, match="escaped floats"):
        merged(RowCol(2, 64), [packed, symbols], flags, 8192)


@DRAWN
@given(st.integers(0, 1 << 30), st.sampled_from([0, 1, 3, 8, 9, 11]))
def test_any_vectors_symbols_and_escapes_decode_alike(seed: int, signs: int) -> None:
    compiled = pytest.importorskip("dcp_nvcomp.codecs.transforms._rowcol")
    random = np.random.default_rng(seed)
    count, columns = int(random.integers(1, 3000)), int(random.integers(1, 200))
    symbols = random.integers(0, 256, count, np.uint8)
    flags = signs | PREDICTED | int(np.count_nonzero(symbols == 0)) << ESCAPES_SHIFT
    packed, made = random.integers(0, 256, predicted_nbytes(count, columns, flags), np.uint8), []
    for module in (compiled, rowcol_numpy):
        rest, exponent = np.full(count, 0xAA, np.uint8), np.full(count, 0xAA, np.uint8)
        assert module.restore_planes(packed, symbols, rest, exponent, columns, flags)
        made.append((rest.tobytes(), exponent.tobytes()))
    assert made[0] == made[1]


@pytest.mark.parametrize("wrong", ["rest", "exponent", "packed", "columns of 0", "too many columns"])
def test_kernels_refuse_sizes_that_do_not_fit(kernels: ModuleType, wrong: str) -> None:
    flags = PREDICTED | 1
    arrays = {"packed": np.zeros(predicted_nbytes(64, 8, flags), np.uint8), "symbols": np.ones(64, np.uint8)}
    arrays |= {"rest": np.zeros(64, np.uint8), "exponent": np.zeros(64, np.uint8)}
    columns = {"columns of 0": 0, "too many columns": (1 << 20) + 1}.get(wrong, 8)
    if wrong in arrays:
        arrays[wrong] = np.zeros(63, np.uint8)
    with pytest.raises(ValueError, match="not those of this block"):
        kernels.restore_planes(*arrays.values(), columns, flags)
    if wrong != "packed":
        with pytest.raises(ValueError, match="not those of this block"):
            kernels.predict_planes(arrays["rest"], arrays["exponent"], columns, 3)


@pytest.mark.parametrize(
    "configuration",
    [
        *({"float_nbytes": width, "columns": 8} for width in (0, 1, 8, "4", None, True, 4.0)),
        *({"float_nbytes": 4, "columns": columns} for columns in (0, -1, (1 << 20) + 1, 1 << 70, "8", None, True, 8.0)),
        {"float_nbytes": 4},
        {},
    ],
)
def test_configurations_that_are_refused(configuration: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="Codec 'rowcol' has"):
        chain_from_json(
            [{"name": "rowcol", "configuration": configuration}, CodecChain(Planes(4), Zstd()).to_json()[1]]
        )


@pytest.mark.parametrize("arguments", [(8, 8), (4, 0), (4, 2.5), (4, (1 << 20) + 1), (4, True)])
def test_mistakes_are_told(arguments: tuple[int, int]) -> None:
    with pytest.raises(ConfigurationError, match="columns from 1 to 1048576"):
        RowCol(*arguments)


def test_it_needs_a_coder() -> None:
    with pytest.raises(FormatError, match="no coder"):
        chain_from_json([{"name": "rowcol", "configuration": {"float_nbytes": 4, "columns": 8}}])


def test_the_chain_is_what_the_footer_says() -> None:
    chain = chain_of(4, 300)
    assert chain_from_json(chain.to_json()).array_to_bytes == chain.array_to_bytes


def test_flags_that_it_can_have() -> None:
    codec = RowCol(4, 8)
    assert {flags for flags in range(256) if codec.check_flags(flags)} == {0, 1, 3, 4, 5, 7, 12, 13, 15}
    assert codec.check_flags(0xFFFF_FF04)
    assert not codec.check_flags(0x100)
    assert not codec.check_flags(0x102)


def test_it_is_for_two_types_of_floats() -> None:
    fitting = {(name, width) for name, kind in ELEMENT_TYPES.items() for width in (2, 4) if RowCol(width, 8).fits(kind)}
    assert fitting == {("bfloat16", 2), ("float32", 4)}
