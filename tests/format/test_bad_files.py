"""Each way in which a data file can be bad has a named error; none gives wrong values, hangs, or takes memory."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import pytest

from dcp_nvcomp.errors import (
    CheckpointError,
    CorruptDataError,
    FormatError,
    TruncatedFileError,
    UnknownCodecError,
    UnsupportedVersionError,
    WrongMagicError,
)
from dcp_nvcomp.format.framing import check_header, decode_trailer
from tests.cpu_time import within_cpu_seconds
from tests.effort import sampled
from tests.format.forgery import MAGIC, SMALL_CONTENTS, Forgery, small_forgery
from tests.format.library import PATH, read_file, read_footer

Spoil = Callable[[Forgery], Any]


def override(name: str, value: Any) -> Spoil:
    return lambda forgery: forgery.overrides.update({name: value})


def header(data: bytes) -> Spoil:
    return lambda forgery: setattr(forgery, "header", data)


def described(key: str, value: Any) -> Spoil:
    return lambda forgery: forgery.description.update({key: value})


def record(index: int, **fields: Any) -> Spoil:
    return lambda forgery: forgery.description["records"][index].update(fields)


def without(*path: Any) -> Spoil:
    def spoil(forgery: Forgery) -> None:
        at = forgery.description
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]

    return spoil


def codec(chain: int, index: int, **fields: Any) -> Spoil:
    return lambda forgery: forgery.description["codecs"][chain][index]["configuration"].update(fields)


def codec_chain(chain: int, value: Any) -> Spoil:
    return lambda forgery: forgery.description["codecs"].__setitem__(chain, value)


def row(column: str, index: int, change: Callable[[int], int]) -> Spoil:
    """Change one number of the tables."""

    def spoil(forgery: Forgery) -> None:
        columns = {
            "encoded_nbytes": [len(one[0]) for one in forgery.rows],
            "flags": [one[1] for one in forgery.rows],
            "slices": forgery.slices,
        }
        values = list(columns[column])
        values[index] = change(values[index])
        forgery.overrides[column] = values

    return spoil


def both(*spoils: Spoil) -> Spoil:
    return lambda forgery: [spoil(forgery) for spoil in spoils]


def add_record(**fields: Any) -> Spoil:
    return lambda forgery: forgery.description["records"].append(fields)


def derived_from(base: Any, *, of: str = "float32", **fields: Any) -> Spoil:
    """Two records instead of all, the second of them derived from record `base`; `fields` are of the first."""

    def spoil(forgery: Forgery) -> None:
        planes = [{"name": "planes", "configuration": {"float_nbytes": 2, "coded": []}}]
        forgery.description["codecs"] = [planes, [{"name": "derived", "configuration": {}}]]
        weight = {"fqn": "w", "shape": [4], "dtype": "bfloat16", "block_shape": [4], "codec": 0, **fields}
        master = {"fqn": "m", "shape": [4], "dtype": of, "block_shape": [4], "codec": 1}
        forgery.description["records"] = [weight, master if base is None else {**master, "base": base}]

    return spoil


ZSTD = {"name": "zstd", "configuration": {"slice_nbytes": 48}}
BYTES = {"name": "bytes", "configuration": {}}
ANS: dict[str, Any] = {
    "name": "ans",
    "configuration": {"slice_nbytes": 48, "data_type": "|u1", "nvcomp_version": "6.0"},
}
HUGE = 1 << 60

FRAMING: dict[str, tuple[Any, ...]] = {
    "magic at the start": (header(b"\x89PNGxx\r\n" + bytes(8)), WrongMagicError, "does not begin"),
    "another version in the header": (header(MAGIC + struct.pack("<II", 2, 0)), UnsupportedVersionError, "version 2"),
    "reserved bytes of the header": (header(MAGIC + struct.pack("<II", 1, 1)), CorruptDataError, "must be zero"),
    "magic at the end": (override("magic", MAGIC), WrongMagicError, "does not end"),
    "another version in the trailer": (override("version", 7), UnsupportedVersionError, "version 7"),
    "version zero": (override("version", 0), UnsupportedVersionError, "version 0"),
    "footer_offset too small": (override("footer_offset", 16), TruncatedFileError, "according to its trailer"),
    "footer_offset beyond the file": (
        override("footer_offset", (1 << 64) - 1),
        TruncatedFileError,
        "according to its trailer",
    ),
    "footer_nbytes too large": (override("footer_nbytes", 1 << 63), TruncatedFileError, "according to its trailer"),
    "json_nbytes too large": (override("json_nbytes", 1 << 40), TruncatedFileError, "trailer"),
    "json_nbytes too small": (override("json_nbytes", 20), "JSON can't be read"),
    "footer CRC": (override("footer_crc", 12345), CorruptDataError, "footer fails its CRC"),
    "invalid JSON": (override("json", b"{" * 40), "JSON can't be read"),
    "JSON nested without end": (override("json", b"[" * 200_000), "JSON can't be read"),
    "JSON that is not text": (override("json", b'{"a": "\xff\xfe"}'), "JSON can't be read"),
    "JSON that is no object": (override("json", b"[1, 2, 3]"), "not an object"),
    "a number of 10,000 digits": (override("json", b'{"blocks": ' + b"9" * 10_000 + b"}"), "JSON"),
}

TABLES: dict[str, tuple[Any, ...]] = {
    "more blocks than the table": (described("blocks", 6), "tables do not have the size"),
    "fewer blocks than the table": (described("blocks", 4), "tables do not have the size"),
    "negative blocks": (both(described("blocks", -1), described("slices", 30)), "tables do not have the size"),
    "huge blocks": (described("blocks", HUGE), "tables do not have the size"),
    "blocks as text": (described("blocks", "5"), "tables do not have the size"),
    "blocks as true": (described("blocks", True), "tables do not have the size"),
    "blocks as a float": (described("blocks", 5.0), "tables do not have the size"),
    "no slices": (without("slices"), "tables do not have the size"),
    "blocks traded for slices": (both(described("blocks", 4), described("slices", 10)), "more blocks than its table"),
    "block sums too small": (row("encoded_nbytes", 0, lambda n: n - 16), "the footer begins at"),
    "block sums too large": (row("encoded_nbytes", 4, lambda n: n + 16), "the footer begins at"),
    "block sizes beyond the file": (row("encoded_nbytes", 1, lambda n: 0xFFFFFFF0), "the footer begins at"),
    "block sizes not of 16": (
        both(row("encoded_nbytes", 0, lambda n: n - 8), described("data_offset", 72)),
        "multiples of 16",
    ),
    "unknown flags": (row("flags", 0, lambda n: 5), "unknown flags"),
    "a negative sign that is not packed": (row("flags", 1, lambda n: 2), "unknown flags"),
    "flags on plain bytes": (row("flags", 2, lambda n: 1), "unknown flags"),
    "packed, though the rest is coded": (codec(0, 0, coded=["rest"]), "unknown flags"),
    "too few slices": (codec(1, 1, slice_nbytes=1024), "slice table"),
    "too many slices": (codec(1, 1, slice_nbytes=256), "slice table"),
    "a slice larger than it decodes to": (row("slices", 0, lambda n: 49), CorruptDataError, "slice"),
    "a slice beyond its block": (row("slices", 3, lambda n: 512), CorruptDataError, "slice"),
    "an empty slice": (row("slices", 0, lambda n: 0), CorruptDataError, "does not decode"),
    "a slice cut short": (row("slices", 0, lambda n: n - 1), CorruptDataError, "does not decode"),
    "a deflate slice cut short": (row("slices", 3, lambda n: n - 1), CorruptDataError, "decode"),
    "a slice with a byte too many": (row("slices", 0, lambda n: n + 1), CorruptDataError, "does not decode"),
    "encoded CRC": (override("encoded_crc", [1, 2, 3, 4, 5]), CorruptDataError, "stored bytes fail their CRC"),
    "uncompressed CRC": (
        override("uncompressed_crc", [1, 2, 3, 4, 5]),
        CorruptDataError,
        "decoded bytes fail their CRC",
    ),
}

FIELDS: dict[str, tuple[Any, ...]] = {
    "an unknown feature": (described("features", ["deltas"]), UnsupportedVersionError, "deltas"),
    "no features": (without("features"), UnsupportedVersionError, "features"),
    "features that are no list": (described("features", ""), UnsupportedVersionError, "features"),
    "a known feature and an unknown one": (
        described("features", ["rowcol", "deltas"]),
        UnsupportedVersionError,
        "deltas",
    ),
    "a feature that is a list": (described("features", [["rowcol"]]), UnsupportedVersionError, "features"),
    "no save_id": (without("save_id"), "save_id must be text"),
    "file_id as a number": (described("file_id", 5), "file_id must be text"),
    "a negative rank": (described("rank", -1), "rank must be"),
    "no data_offset": (without("data_offset"), "data_offset must be"),
    "a negative data_offset": (described("data_offset", -16), "data_offset must be"),
    "a huge data_offset": (described("data_offset", 1 << 62), "the footer begins at"),
    "an absurd data_offset": (described("data_offset", 10**4300 - 16), "data_offset must be"),
    "records that are no list": (described("records", {}), "records must be a list"),
    "a record that is no object": (lambda f: f.description["records"].insert(0, 5), "not an object"),
    "no records": (described("records", []), "0 blocks, its table 5"),
    "a record missing": (without("records", 6), "4 blocks, its table 5"),
    "a record too many": (
        add_record(fqn="x", shape=[1], dtype="int8", block_shape=[1], codec=2),
        "more blocks than its table",
    ),
    "derived from nothing": (derived_from(None), "base must be an integer"),
    "derived from itself": (derived_from(1), "base must be an earlier record"),
    "derived from a later record": (derived_from(2), "base must be an earlier record"),
    "derived from record -1": (derived_from(-1), "base must be an integer"),
    "derived from a record that is not there": (derived_from(100), "base must be an earlier record"),
    "derived from true": (derived_from(True), "base must be an integer"),
    "derived from other elements": (derived_from(0, dtype="float16"), "earlier record of bfloat16"),
    "derived from another shape": (derived_from(0, shape=[5]), "with the same blocks"),
    "derived from other blocks": (derived_from(0, block_shape=[2]), "with the same blocks"),
    "derived from a pack": (derived_from(0, kind="pack"), "base must be an earlier record"),
    "derived bfloat16": (derived_from(0, of="bfloat16"), "codec can't be that of bfloat16"),
    "no fqn": (without("records", 0, "fqn"), "fqn must be text"),
    "fqn as a number": (record(0, fqn=1), "fqn must be text"),
    "an unknown kind": (record(0, kind="sparse"), "kind 'sparse' is unknown"),
    "kind as a list": (record(0, kind=["pack"]), "is unknown"),
    "depends_on another save": (record(0, depends_on=["3" * 32]), UnsupportedVersionError, "depends on another save"),
    "an unknown dtype": (record(0, dtype="float128"), "dtype 'float128' is unknown"),
    "dtype as a list": (record(0, dtype=["int8"]), "is unknown"),
    "no dtype": (without("records", 0, "dtype"), "dtype None is unknown"),
    "planes of another width": (record(0, dtype="float32"), "codec can't be that of float32"),
    "planes of integers": (record(0, dtype="int16"), "codec can't be that of int16"),
    "another dtype of the same width": (record(1, dtype="int32"), "slice table"),
    "no shape": (without("records", 0, "shape"), "shape must be a list"),
    "shape as a number": (record(1, shape=100), "shape must be a list"),
    "a negative shape": (record(1, shape=[-100]), "shape holds -100"),
    "a shape of true": (record(1, shape=[True]), "shape holds True"),
    "a shape of floats": (record(1, shape=[100.0]), "shape holds 100.0"),
    "65 dimensions": (record(1, shape=[1] * 65, block_shape=[1] * 65), "at most 64"),
    "a shape of 2^60": (record(1, shape=[HUGE]), "more blocks than its table"),
    "a shape of 2^60 in one block": (record(1, shape=[HUGE], block_shape=[HUGE]), "larger than"),
    "a shape of 2^63": (record(1, shape=[1 << 63], block_shape=[1]), "shape holds"),
    "2^120 elements": (record(1, shape=[HUGE, HUGE], block_shape=[1, 1]), "more than 2.62 elements"),
    "2^3720 elements": (record(1, shape=[1 << 62] * 60, block_shape=[1] * 60), "more than 2.62 elements"),
    "a block of 16 MiB and a bit": (record(1, shape=[(2 << 20) + 1], block_shape=[(2 << 20) + 1]), "blocks are larger"),
    "block_shape of zero": (record(1, block_shape=[0]), "block_shape holds 0"),
    "a negative block_shape": (record(1, block_shape=[-1]), "block_shape holds -1"),
    "no block_shape": (without("records", 1, "block_shape"), "block_shape must be a list"),
    "block_shape of other dimensions": (record(0, block_shape=[8]), "differ in their number"),
    "offsets of other dimensions": (record(0, offsets=[4]), "differ in their number"),
    "global_shape of other dimensions": (record(0, global_shape=[16, 8, 1]), "differ in their number"),
    "negative offsets": (record(0, offsets=[-4, 0]), "offsets holds -4"),
    "a shard outside of its tensor": (record(0, offsets=[5, 0]), "reaches out of its global tensor"),
    "a shard far outside of its tensor": (record(0, offsets=[HUGE, 0]), "reaches out of its global"),
    "codec beyond the list": (record(0, codec=3), "not in the list of codecs"),
    "a negative codec": (record(0, codec=-1), "not in the list of codecs"),
    "codec as true": (record(0, codec=True), "not in the list of codecs"),
    "no codec": (without("records", 0, "codec"), "not in the list of codecs"),
    "a bytes item of two dimensions": (record(6, shape=[21, 10], block_shape=[21, 10]), "one dimension"),
    "a bytes item of floats": (record(6, dtype="float32", block_shape=[512]), "must be uint8"),
    "a pack of two dimensions": (record(2, shape=[2, 3], block_shape=[2, 3]), "one dimension"),
    "a member before its pack": (record(0, pack=[2, 0]), "earlier pack"),
    "a member of itself": (record(3, pack=[3, 0]), "earlier pack"),
    "a member of no pack": (record(3, pack=[0, 0]), "earlier pack"),
    "a member of record 2^60": (record(3, pack=[HUGE, 0]), "earlier pack"),
    "a pack of packs": (add_record(kind="pack", shape=[2], pack=[2, 0]), "earlier pack"),
    "a member that reaches out of its pack": (record(4, pack=[2, 2]), "reaches out of its pack"),
    "a member far out of its pack": (record(3, pack=[2, HUGE]), "reaches out of its pack"),
    "a huge member": (record(3, shape=[HUGE], pack=[2, 0]), "reaches out of its pack"),
    "a negative place in a pack": (record(3, pack=[2, -1]), "non-negative integers"),
    "a place in a pack that is a float": (record(3, pack=[2, 0.0]), "non-negative integers"),
    "a pack that is a number": (record(3, pack=2), "non-negative integers"),
    "a bytes item in a pack of floats": (
        record(4, kind="bytes", shape=[5], offsets=[0], global_shape=[5]),
        "can't lie in a pack of float32",
    ),
    "an unknown codec": (codec_chain(1, [BYTES, {**ZSTD, "name": "lz5"}]), UnknownCodecError, "lz5"),
    "an unknown codec that no record uses": (
        lambda f: f.description["codecs"].append([{"name": "lz5", "configuration": {}}]),
        UnknownCodecError,
        "lz5",
    ),
    "codecs that are no list": (described("codecs", {}), "codecs must be a list"),
    "a chain without codecs": (codec_chain(1, []), "one or two codecs"),
    "a chain of three": (codec_chain(1, [BYTES, ZSTD, ZSTD]), "one or two codecs"),
    "a chain that begins with a coder": (codec_chain(1, [ZSTD]), "array -> bytes codec"),
    "a chain the wrong way round": (codec_chain(1, [ZSTD, BYTES]), "array -> bytes codec"),
    "a chain of two array codecs": (codec_chain(1, [BYTES, BYTES]), "array -> bytes codec"),
    "planes coded by nothing": (
        codec_chain(0, [{"name": "planes", "configuration": {"float_nbytes": 2, "coded": ["exponent"]}}]),
        "no coder",
    ),
    "ans after planes": (
        codec_chain(0, [{"name": "planes", "configuration": {"float_nbytes": 2, "coded": []}}, ANS]),
        "must follow codec 'bytes'",
    ),
    "ans with a number for its data type": (
        codec_chain(1, [BYTES, {"name": "ans", "configuration": {**ANS["configuration"], "data_type": 5}}]),
        "must be text",
    ),
    "a codec that is text": (codec_chain(1, ["bytes"]), "must be an object"),
    "a codec without configuration": (codec_chain(1, [{"name": "bytes"}]), "must be an object"),
    "planes of three bytes": (codec(0, 0, float_nbytes=3), "must be 2, 4 or 8"),
    "planes of zero bytes": (codec(0, 0, float_nbytes=0), "must be 2, 4 or 8"),
    "planes of 2.0 bytes": (codec(0, 0, float_nbytes=2.0), "must be an integer"),
    "an unknown plane": (codec(0, 0, coded=["mantissa"]), "must list some of"),
    "coded as text": (codec(0, 0, coded="exponent"), "must list some of"),
    "slice_nbytes of zero": (codec(0, 1, slice_nbytes=0), "multiple of 16"),
    "slice_nbytes of 40": (codec(0, 1, slice_nbytes=40), "multiple of 16"),
    "negative slice_nbytes": (codec(0, 1, slice_nbytes=-16), "multiple of 16"),
    "slice_nbytes of 16 MiB and a bit": (codec(0, 1, slice_nbytes=(16 << 20) + 16), "multiple of 16"),
    "slice_nbytes of 2^60": (codec(0, 1, slice_nbytes=HUGE), "multiple of 16"),
    "slice_nbytes as true": (codec(0, 1, slice_nbytes=True), "must be an integer"),
    "no slice_nbytes": (without("codecs", 0, 1, "configuration", "slice_nbytes"), "must be an integer"),
}

ALL = {**FRAMING, **TABLES, **FIELDS}


@pytest.mark.parametrize("what", list(ALL))
def test_each_way_a_file_can_be_bad(what: str) -> None:
    spoil, *errors, message = ALL[what]
    forgery = small_forgery()
    spoil(forgery)
    data = forgery.build()
    with within_cpu_seconds(1), pytest.raises(CheckpointError, match=message) as caught:
        read_file(data)
    assert type(caught.value) is (errors[0] if errors else FormatError)
    if not isinstance(caught.value, CorruptDataError):
        assert caught.value.path == PATH


@pytest.mark.parametrize("data_offset", [0, 8, 72])
def test_blocks_begin_behind_the_header_at_a_multiple_of_16(data_offset: int) -> None:
    # all sums come out: only where the first block begins is wrong
    forgery = small_forgery()
    forgery.description["data_offset"] = data_offset
    data = bytearray(forgery.build())
    if data_offset == 0:
        front = b"".join(encoded for encoded, _, _ in forgery.rows)
        forgery.header, forgery.overrides["footer_offset"] = b"", len(front)
        data = bytearray(forgery.build())
    with pytest.raises(CheckpointError):
        read_file(bytes(data))


def test_truncated_at_every_length() -> None:
    data = small_forgery().build()
    for length in sampled(range(len(data)), 7):
        with pytest.raises((TruncatedFileError, WrongMagicError)):
            read_file(data[:length])


def test_grown_by_any_few_bytes() -> None:
    data = small_forgery().build()
    for more in (b"\0", b"\n", bytes(16), data[-40:], data):
        with pytest.raises(CheckpointError):
            read_file(data + more)


@pytest.mark.parametrize("verify", ["stored", "full"])
def test_every_byte_flipped(verify: str) -> None:
    data = small_forgery().build()
    draw = random.Random(7)
    errors = 0
    positions = sampled(range(len(data)), 7)
    for position in positions:
        for mask in (0xFF, 1 << draw.randrange(8)):
            damaged = bytearray(data)
            damaged[position] ^= mask
            try:
                assert read_file(bytes(damaged), verify=verify) == SMALL_CONTENTS
            except CheckpointError:
                errors += 1
    assert errors == 2 * len(positions)  # every byte of a file is under some check


def test_unverified_damage_stays_inside_the_error_tree() -> None:
    """verify="off" may return wrong values, never crash."""
    data = small_forgery().build()
    for position in range(64, 64 + sum(len(one[0]) for one in small_forgery().rows)):
        damaged = bytearray(data)
        damaged[position] ^= 0xFF
        try:
            found = read_file(bytes(damaged), verify="off")
        except CheckpointError:
            continue
        assert {key: value[:4] for key, value in found.items()} == {key: v[:4] for key, v in SMALL_CONTENTS.items()}


def test_a_header_or_trailer_that_is_too_short() -> None:
    for length in (0, 7, 15):
        with pytest.raises(TruncatedFileError):
            check_header((MAGIC + struct.pack("<II", 1, 0))[:length], path=PATH)
    with pytest.raises(TruncatedFileError):
        decode_trailer(bytes(39), path=PATH, file_nbytes=39)


def test_errors_say_where() -> None:
    forgery = small_forgery()
    forgery.overrides["footer_crc"] = 0
    data = forgery.build()
    with pytest.raises(CorruptDataError) as caught:
        read_footer(data)
    offset = len(forgery.header) + 48 + sum(len(one[0]) for one in forgery.rows)
    assert caught.value.byte_range == (offset, len(data))
