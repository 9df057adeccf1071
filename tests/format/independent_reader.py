"""Reads a data file with numpy, zstandard, zlib and crc32c alone. From docs/format.md, not from the package's code.

`read_data_file(data)` gives `{(fqn, offsets): (kind, dtype, shape, global_shape, elements)}`, `elements` as bytes in C
order. All CRCs are checked. Chains with `ans` raise: that bitstream is not open. It is no fortress: a footer made by
hand can make it raise anything.
"""

import json
import struct
import zlib

import numpy as np
import zstandard
from crc32c import crc32c

MAGIC = b"\x89DCPNV\r\n"
ELEMENT_NBYTES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float4_e2m1fn_x2": 1}
ELEMENT_NBYTES |= {f"{sign}int{8 * nbytes}": nbytes for sign in ("", "u") for nbytes in (1, 2, 4, 8)}
ELEMENT_NBYTES |= {f"float8_{kind}": 1 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")}
ELEMENT_NBYTES |= {f"complex{8 * nbytes}": nbytes for nbytes in (4, 8, 16)}


def check(good, what):
    if not good:
        raise ValueError(what)


def read_footer(data):
    check(len(data) >= 56 and data[:16] == MAGIC + struct.pack("<II", 1, 0), "header")
    footer_offset, footer_nbytes, json_nbytes, version, footer_crc, magic = struct.unpack("<QQQII8s", data[-40:])
    check(magic == MAGIC[::-1] and version == 1, "trailer")
    check(footer_offset + footer_nbytes + 40 == len(data), "trailer: footer and trailer do not end the file")
    footer = data[footer_offset:-40]
    check(crc32c(footer + data[-40:-12]) == footer_crc, "footer_crc")
    info = json.loads(footer[:json_nbytes])
    check(set(info["features"]) <= {"rowcol", "derived"}, "features")
    tables = np.frombuffer(footer, "<u4", offset=-(-json_nbytes // 8) * 8)
    check(len(tables) == 4 * info["blocks"] + info["slices"], "tables")
    columns, slice_table = np.split(tables, [4 * info["blocks"]])
    check(info["data_offset"] + int(columns[: info["blocks"]].sum()) == footer_offset, "block sums")
    return info, columns.reshape(4, -1).T.tolist(), slice_table.tolist()


def unpack_rest(packed, n, negative):  # eight floats in seven bytes -> a byte per float
    m = n // 8
    carriers = packed[: 7 * m].reshape(7, m)
    spread = (carriers >> 7 << np.arange(7, dtype=np.uint8)[:, None]).sum(axis=0, dtype=np.uint8)
    return np.concatenate([packed[: 7 * m], spread, packed[7 * m :]]) & 0x7F | np.uint8(negative << 7)


def unpredict(planes, columns, sizes, flags, n):  # `rest` and `exponent` of rowcol -> those of planes
    symbols, where = planes["exponent"].astype(int), np.arange(n)
    row, column, escaped, signs, nibbles = np.split(planes["rest"], np.cumsum(sizes)[:-1])
    check((symbols == 0).sum() == flags >> 8, "escapes")
    row, added = (row[:2], row[2:].astype(int)) if flags & 8 else (row, np.zeros(len(row) // 2, int))
    row = (row.copy().view("<u2") + added)[where // columns]
    values = (symbols - 64 + row + column.view("i1")[where % columns]) % 2048
    values[symbols == 0] = escaped.copy().view("<u2") % 2048
    negative = signs[where % len(signs)] >> where // len(signs) & 1 if len(signs) else flags >> 1 & 1
    nibbles = nibbles[where % len(nibbles)] >> where // len(nibbles) * 4 & 15
    return {**planes, "rest": (negative << 7 | values % 8 << 4 | nibbles).astype("u1"), "exponent": values >> 3}


def join_planes(planes, w, n):  # -> the bytes of n floats of w bytes
    top = planes["rest"].astype(np.uint16)
    top = (top & 0x7F) | planes["exponent"].astype(np.uint16) << 7 | (top & 0x80) << 8
    high = top.astype("<u2").view(np.uint8).reshape(n, 2)
    return np.concatenate([planes["low"].reshape(n, w - 2), high], axis=1).reshape(-1)


def underive(low, high, flags, base):  # -> the bytes of the floats
    if flags:
        (positions, exceptions), high = np.split(high, [4 * (flags >> 8)]), base.view("<u2") - (low >> 15)
        high[positions.view("<u4")] = exceptions.view("<u2")
    return np.stack([low, high.view("<u2")], axis=1).reshape(-1).view(np.uint8)


def decode_block(block, flags, nbytes, chain, slice_rows, base):
    """One encoded block -> its elements' bytes; takes as many rows from the iterator `slice_rows` as it has slices."""
    first, configuration = chain[0]["name"], chain[0]["configuration"]
    coder = chain[1]["name"] if chain[1:] else None
    check(len(chain) <= 2 and coder in (None, "zstd", "deflate"), f"cannot decode {coder}")
    if first == "bytes":
        check(flags == 0, "flags")
        lengths, coded = {"data": nbytes}, {"data"} if coder else set()
    elif first == "derived":
        lengths, coded = {"low": nbytes // 2, "high": 6 * (flags >> 8) if flags else nbytes // 2}, set()
        check(flags & 0xFF == 4 * (flags > 0) and lengths["high"] <= nbytes // 2, "flags")
    else:
        w, coded, predicted = configuration["float_nbytes"], configuration.get("coded", ["exponent"]), flags & 4
        allowed = flags & 0xF3 in (0, 1, 3) and (flags < 4 or (predicted and first == "rowcol"))
        check(first in ("planes", "rowcol") and allowed and not (flags and "rest" in coded), "codec or flags")
        n = nbytes // w
        lengths = {"low": n * (w - 2), "rest": n - n // 8 * (flags & 1), "exponent": n}
        if predicted:
            columns = configuration["columns"]
            rows = -(-n // columns)
            sizes = [
                2 + rows if flags & 8 else 2 * rows,
                columns,
                flags >> 8 << 1,
                0 if flags & 1 else -(-n // 8),
                -(-n // 2),
            ]
            lengths["rest"] = sum(sizes)
            check(lengths["rest"] <= n, "rest")
    position, planes = 0, {}
    for name, length in lengths.items():
        step = chain[1]["configuration"]["slice_nbytes"] if name in coded else max(length, 1)
        parts = []
        for start in range(0, length, step):
            want = min(step, length - start)
            have = next(slice_rows) if name in coded else want
            part = block[position : position + have]
            if have != want:
                zstd = zstandard.ZstdDecompressor()
                part = zstd.decompress(part, want) if coder == "zstd" else zlib.decompress(part, -15, want)
            check(len(part) == want and have <= want, "slice")
            parts.append(part)
            position += -(-have // 16) * 16
        planes[name] = np.frombuffer(b"".join(parts), np.uint8)
    if "data" in planes:
        return planes["data"]
    if first == "derived":
        return underive(planes["low"].view("<u2"), planes["high"], flags, base)
    if predicted:
        planes = unpredict(planes, columns, sizes, flags, n)
    elif flags & 1:
        planes["rest"] = unpack_rest(planes["rest"], n, flags >> 1)
    return join_planes(planes, w, n)


def read_data_file(data):
    info, block_table, slice_table = read_footer(data)
    block_rows, slice_rows, position = iter(block_table), iter(slice_table), info["data_offset"]
    decoded_records, found = [], {}  # the first by record index: members refer to their pack
    for record in info["records"]:
        check(record.get("depends_on", []) == [], "depends_on")
        shape, kind = record["shape"], record.get("kind", "tensor")
        if "pack" in record:
            pack, first = record["pack"]
            dtype, elements = decoded_records[pack]
            nbytes = ELEMENT_NBYTES[dtype]
            out = elements.reshape(-1)[first * nbytes : (first + np.prod(shape, dtype=int)) * nbytes]
        else:
            dtype, box, chain = record["dtype"], record["block_shape"], info["codecs"][record["codec"]]
            nbytes = ELEMENT_NBYTES[dtype]
            out = np.empty([*shape, nbytes], np.uint8)
            for cell in np.ndindex(*(-(-size // step) for size, step in zip(shape, box, strict=True))):
                where = tuple(slice(i * step, (i + 1) * step) for i, step in zip(cell, box, strict=True))
                encoded_nbytes, flags, encoded_crc, uncompressed_crc = next(block_rows)
                block = data[position : position + encoded_nbytes]
                check(crc32c(block) == encoded_crc, "encoded_crc")
                base = decoded_records[record["base"]][1][where].reshape(-1) if "base" in record else None
                decoded = decode_block(block, flags, out[where].size, chain, slice_rows, base)
                check(crc32c(decoded) == uncompressed_crc, "uncompressed_crc")
                out[where] = decoded.reshape(out[where].shape)
                position += encoded_nbytes
        decoded_records.append((dtype, out))
        if kind != "pack":
            offsets = tuple(record.get("offsets", [0] * len(record.get("global_shape", shape))))
            global_shape = tuple(record.get("global_shape", shape))
            found[record["fqn"], offsets] = (kind, dtype, tuple(shape), global_shape, out.tobytes())
    check(next(block_rows, None) is None and next(slice_rows, None) is None, "rows are left over")
    return found
