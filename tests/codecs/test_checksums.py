"""CRC32C with the processor's own instructions, against the package crc32c and RFC 3720."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from crc32c import crc32c

from dcp_nvcomp.codecs import encoded
from tests.engines.guard_pages import GuardPages

Checksum = Callable[..., int]
KIB = 1 << 10

# around what each loop takes: 8 bytes, 256 folded, three parts of 1 KiB, and twice those
LENGTHS = [*range(300), 511, 512, 513, 767, 768, 769, 1023, 3071, 3072, 3073, 6143, 6144, 6145, 100_001, 1 << 20]


@pytest.fixture(params=["checksum", "checksum_by_crc32"])
def compiled(request: pytest.FixtureRequest) -> Checksum:
    # compiled where there is a C compiler, and for x86-64
    found: Checksum = getattr(pytest.importorskip("dcp_nvcomp.codecs._checksums"), request.param)
    return found


def test_examples_of_the_rfc(compiled: Checksum) -> None:
    assert compiled(b"123456789") == 0xE3069283
    assert compiled(bytes(32)) == 0x8A9136AA
    assert compiled(b"\xff" * 32) == 0x62A8AB43
    assert compiled(bytes(range(32))) == 0x46DD794E
    assert compiled(b"") == 0 and compiled(b"", 12345) == 12345


def test_all_lengths_and_alignments(compiled: Checksum) -> None:
    random = np.random.default_rng(1)
    data = random.integers(0, 256, max(LENGTHS) + 64).astype(np.uint8)
    for number, length in enumerate(LENGTHS):
        for start in (0, 1, 1 + number % 63):
            part = data[start : start + length].data
            for before in (0, 0xFFFFFFFF, int(random.integers(1 << 32))):
                assert compiled(part, before) == crc32c(part, before), (start, length, before)


def test_parts_follow_each_other(compiled: Checksum) -> None:
    data = np.random.default_rng(2).integers(0, 256, 20_000).astype(np.uint8)
    for at in (0, 1, 255, 3072, 9999, 20_000):
        assert compiled(data[at:], compiled(data[:at])) == crc32c(data.data)


def test_a_flipped_bit_is_seen(compiled: Checksum) -> None:
    data = bytearray(np.random.default_rng(3).bytes(4096))
    whole = compiled(data)
    for bit in range(0, 8 * len(data), 7):
        data[bit // 8] ^= 1 << bit % 8
        assert compiled(data) != whole
        data[bit // 8] ^= 1 << bit % 8
    assert compiled(data) == whole


@pytest.mark.parametrize("at_end", [True, False])
def test_nothing_outside_is_read(compiled: Checksum, at_end: bool) -> None:
    pages = GuardPages()
    for length in (1, 7, 8, 63, 255, 256, 300, 511, 512, 1000, 3071, 3072, 5000):
        data = pages.allocate(length, at_end=at_end)
        data[:] = 5
        assert compiled(data) == crc32c(data.tobytes())


def test_the_compiled_one_is_used_where_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("dcp_nvcomp.codecs._checksums")
    assert encoded._checksums is module
    data = np.arange(5000, dtype=np.uint8)
    expected = crc32c(data.data, 7)
    for found in (module, None):
        monkeypatch.setattr(encoded, "_checksums", found)
        assert encoded.checksum(data, 7) == encoded.checksum(data.data, 7) == encoded.checksum(data.tobytes(), 7)
        assert encoded.checksum(data, 7) == expected


def test_without_the_module_the_package_does_it() -> None:
    code = (
        "import sys; sys.modules['dcp_nvcomp.codecs._checksums'] = None\n"
        "from dcp_nvcomp.codecs import encoded\n"
        "assert encoded._checksums is None and encoded.checksum(b'123456789') == 0xE3069283"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
