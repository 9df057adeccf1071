"""However large a `.metadata` claims to be, and whatever is in it: reading it takes three times its limit at most."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dcp_nvcomp import ConfigurationError, NvcompReader, load, open_checkpoint, save
from dcp_nvcomp.errors import MetadataError, UnsafeMetadataError
from dcp_nvcomp.format.metadata.roots import read_root
from dcp_nvcomp.format.metadata.serialization import parse_metadata
from dcp_nvcomp.loading.reader import MAX_METADATA_NBYTES
from dcp_nvcomp.storage.open import open_filesystem

MIB = 1 << 20


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def _peak() -> int:
    return tracemalloc.get_traced_memory()[1]


def _sparse(path: Path, nbytes: int, head: bytes = b"") -> Path:
    (path / ".metadata").write_bytes(head)
    os.truncate(path / ".metadata", nbytes)
    return path


def _until(nbytes: int, *parts: bytes) -> bytes:
    """Return a pickle that repeats the last part until it has this size."""
    *begin, again = parts
    head = b"\x80\x04" + b"".join(begin)
    return head + again * ((nbytes - len(head)) // len(again))


_NBYTES = 3 * MIB
_LIMIT_NBYTES = 4 * MIB
_EMOJI = "\U0001f600".encode()
HOSTILE = {
    "nothing": lambda: _until(_NBYTES, b"N"),
    "numbers": lambda: _until(_NBYTES, b"M\xff\xff"),
    "floats": lambda: _until(_NBYTES, b"Gabcdefgh"),
    "short texts": lambda: _until(_NBYTES, b"\x8c\x02ab"),
    "wide texts": lambda: _until(_NBYTES, b"\x8c\xff" + _EMOJI + b"a" * 251),
    "long wide texts": lambda: _until(_NBYTES, b"X\x00\x00\x04\x00" + _EMOJI + b"a" * ((1 << 18) - 4)),
    "one wide text": lambda: _until(_NBYTES, b"X\x00\x00\x20\x00" + _EMOJI, b"a"),
    "long bytes": lambda: _until(_NBYTES, b"B\x00\x00\x04\x00" + b"a" * (1 << 18)),
    "the memo": lambda: _until(_NBYTES, b"N", b"\x94"),
    "what is in the memo": lambda: _until(_NBYTES, b"]\x94", b"h\x00"),
    "dicts": lambda: _until(_NBYTES, b"}NNs"),
    "lists": lambda: _until(_NBYTES, b"](NNNNe"),
    "nested tuples": lambda: _until(_NBYTES, b")", b"\x85NN"),
    "a long list": lambda: _until(_NBYTES, b"](", b"N") + b"e.",
    "a long tuple": lambda: _until(_NBYTES, b"(", b"N") + b"t.",
    "a long dict": lambda: _until(_NBYTES, b"}(", b"NN") + b"u.",
    "marks": lambda: _until(_NBYTES, *[b"](" + b"N" * 1000] * 60, b"N"),
}


# Of these the tree is small enough; they are no metadata.
_FITS = ("long bytes", "floats")


@pytest.mark.ci
@pytest.mark.parametrize("kind", HOSTILE)
def test_what_unfolds_is_refused(kind: str, traced: None) -> None:
    data = HOSTILE[kind]()
    tracemalloc.reset_peak()
    with pytest.raises(MetadataError) as caught:
        parse_metadata(data, path="run/.metadata", limit_nbytes=_LIMIT_NBYTES)
    assert _peak() < 3 * _LIMIT_NBYTES
    assert len(str(caught.value)) < 300
    if kind not in _FITS:
        assert "bytes of memory that it may take. If it is genuine, pass a larger metadata_limit" in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"\x80\x04c" + b"a" * _NBYTES, b"\x80\x04i" + b"a\n" + b"b" * _NBYTES], ids=["GLOBAL", "INST"]
)
def test_names_without_an_end(data: bytes, traced: None) -> None:
    before = tracemalloc.get_traced_memory()[0]  # pytest may have made a copy of the parameter
    tracemalloc.reset_peak()
    with pytest.raises(MetadataError, match="a name without an end"):
        parse_metadata(data, path="run/.metadata", limit_nbytes=_LIMIT_NBYTES)
    assert _peak() - before < MIB


def test_genuine_metadata_is_far_from_it(tmp_path: Path, traced: None) -> None:
    save({f"layers.{i}.weight": torch.zeros(2, 3) for i in range(500)}, tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    limit_nbytes = 10 * len(data)
    parse_metadata(data, path="x", limit_nbytes=limit_nbytes)
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    parse_metadata(data, path="x", limit_nbytes=limit_nbytes)
    assert _peak() - before < 3 * limit_nbytes


def test_a_sparse_file_that_is_no_pickle_fails_at_its_beginning(tmp_path: Path, traced: None) -> None:
    _sparse(tmp_path, MAX_METADATA_NBYTES - 1)
    with pytest.raises(MetadataError, match="does not begin like a pickle"):
        NvcompReader(tmp_path).read_metadata()
    assert _peak() < 200 * MIB


@pytest.mark.parametrize("nbytes", [MAX_METADATA_NBYTES + 1, 1 << 40])
def test_a_larger_file_is_not_read(tmp_path: Path, traced: None, nbytes: int) -> None:
    _sparse(tmp_path, nbytes, b"\x80\x04")
    with pytest.raises(
        MetadataError, match=rf"^It has {nbytes} bytes, and at most {MAX_METADATA_NBYTES} are"
    ) as caught:
        load({"w": torch.zeros(3)}, tmp_path, no_dist=True)
    assert caught.value.path == str(tmp_path / ".metadata")
    assert _peak() < 200 * MIB


@pytest.mark.parametrize("head", [b"", b"\x80\x04"])
def test_both_attempts_at_a_file_fit_the_limit(tmp_path: Path, traced: None, head: bytes) -> None:
    _sparse(tmp_path, 100 * MIB, head)
    with pytest.raises(MetadataError):
        read_root(open_filesystem(tmp_path), ".metadata", limit_nbytes=100 * MIB)
    assert _peak() < 150 * MIB, "one copy of the file at a time, and little else"


def test_what_the_first_attempt_made_is_gone_at_the_second(tmp_path: Path, traced: None) -> None:
    (tmp_path / ".metadata").write_bytes(_until(_NBYTES, b"N"))
    tracemalloc.reset_peak()
    with pytest.raises(UnsafeMetadataError):
        read_root(open_filesystem(tmp_path), ".metadata", limit_nbytes=_LIMIT_NBYTES)
    assert _peak() < 3 * _LIMIT_NBYTES


def test_options(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path, no_dist=True)
    nbytes = (tmp_path / ".metadata").stat().st_size
    for limit in (0, -1, 1.5, True, None):
        with pytest.raises(ConfigurationError, match="metadata_limit_nbytes="):
            NvcompReader(tmp_path, metadata_limit_nbytes=limit)  # type: ignore[arg-type]
    message = rf"^It has {nbytes} bytes, and at most {nbytes - 1} are .* larger metadata_limit_nbytes="
    for call in (
        lambda limit: load({"w": torch.zeros(3)}, tmp_path, no_dist=True, metadata_limit_nbytes=limit),
        lambda limit: open_checkpoint(tmp_path, metadata_limit_nbytes=limit).close(),
    ):
        with pytest.raises(UnsafeMetadataError, match=message) as caught:  # no damage: a run must not pass it by
            call(nbytes - 1)
        assert caught.value.path == str(tmp_path / ".metadata")
        call(nbytes)


_PROGRAM = """
import resource, sys
from dcp_nvcomp import NvcompReader
from dcp_nvcomp.errors import MetadataError
reader = NvcompReader(sys.argv[1], metadata_limit_nbytes=int(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    reader.read_metadata()
except MetadataError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("head", [b"", b"\x80\x04"])
@pytest.mark.parametrize("nbytes", [256 * MIB, 2000 * MIB])
def test_a_process_that_reads_a_sparse_file(tmp_path: Path, head: bytes, nbytes: int) -> None:
    _sparse(tmp_path, 2000 * MIB, head)
    arguments = [sys.executable, "-c", _PROGRAM, str(tmp_path), str(nbytes)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) * 1024 < 3 * nbytes
