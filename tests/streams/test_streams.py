"""Streams in compressed files: what torch.save and others write comes back byte for byte, from any place."""

from __future__ import annotations

import contextlib
import io
import json
import mmap
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.two_tensor import TwoTensor

from dcp_nvcomp import NvcompReader, load_compressed_checkpoint
from dcp_nvcomp.errors import CheckpointError, CorruptDataError, FormatError, UnsafeObjectError
from dcp_nvcomp.format.data_file import find_data_file, read_footer
from dcp_nvcomp.format.names import STREAM_KEY
from dcp_nvcomp.saving.lone_file import write_file
from dcp_nvcomp.streams import writer
from dcp_nvcomp.streams.pieces import LENGTH_NBYTES, boxes_of_run
from dcp_nvcomp.streams.reader import PlainReader, StreamIndex, StreamReader
from dcp_nvcomp.streams.writer import StreamWriter
from tests.checkpoints import flip
from tests.states import assert_same

BIG = torch.randn(300, 999, generator=torch.Generator().manual_seed(1))


def state() -> dict[str, Any]:
    """Return large and small tensors of many kinds, and views that share memory."""
    generator = torch.Generator().manual_seed(0)
    floats = torch.randn(600, 700, generator=generator)
    return {
        "fp32": floats,
        "bf16": floats[:300].bfloat16(),
        "rows of another": BIG[10:200],
        "columns of it": BIG[:, 3:5],
        "transposed": floats.t(),
        "conjugate": torch.randn(20_000, dtype=torch.complex64, generator=generator).conj(),
        "negative": torch.randn(20_000, dtype=torch.complex64, generator=generator).imag,
        "fp8": floats[:200].to(torch.float8_e4m3fn),
        "unknown to the format": torch.zeros(70_000, dtype=torch.uint8).view(torch.bits8),
        "integers": {"deep": [torch.arange(30_000), (torch.arange(70_000) % 251).to(torch.uint8)]},
        "small": torch.ones(5),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "value": {"a": 1},
    }


def saved(value: Any) -> bytes:
    """Return what torch.save writes."""
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def open_stream(path: Path) -> StreamReader:
    """Open a file of `StreamWriter`."""
    reader = NvcompReader(path.parent)
    filesystem = reader.open_storage()
    nbytes = filesystem.file_nbytes(path.name)
    assert nbytes is not None
    file = find_data_file(filesystem, path.name, nbytes)
    return StreamReader(filesystem, StreamIndex.read(filesystem, file, reader.load_options), reader.load_options)


def compress(path: Path, value: Any, **options: Any) -> Path:
    """Let torch.save write a value into a compressed file."""
    with StreamWriter(path, value, **options) as stream:
        torch.save(value, stream)  # type: ignore[arg-type]
    return path


def fqns(path: Path) -> list[str]:
    """Return the keys of a file's records."""
    reader = NvcompReader(path.parent)
    filesystem = reader.open_storage()
    file = find_data_file(filesystem, path.name, path.stat().st_size)
    return [record.fqn for record in read_footer(filesystem, file).records if record.fqn]


def test_what_torch_saves_comes_back(tmp_path: Path) -> None:
    value = state()
    expected = saved(value)
    path = compress(tmp_path / "a.pt", value)
    assert path.stat().st_size < 0.9 * len(expected)
    with open_stream(path) as stream:
        assert stream.readall() == expected
        assert stream.read(5) == b""
        stream.seek(0)
        assert_same(torch.load(stream, weights_only=True), value)  # type: ignore[arg-type]
    del value["unknown to the format"]
    assert_same(load_compressed_checkpoint(compress(tmp_path / "b.pt", value)), value)
    assert "integers.deep.0" in fqns(path) and "fp32" in fqns(path)


def test_any_range_comes_back(tmp_path: Path) -> None:
    value = state()
    expected = saved(value)
    draw = random.Random(0)
    with open_stream(compress(tmp_path / "a.pt", value)) as stream:
        for _ in range(150):
            start, nbytes = draw.randrange(len(expected) + 9), draw.choice([1, 3, 100, 70_001, 1 << 20])
            assert stream.seek(start) == stream.tell() == start
            assert stream.read(nbytes) == expected[start : start + nbytes]
        assert stream.seek(-10, io.SEEK_END) == len(expected) - 10
        assert stream.seek(4, io.SEEK_CUR) == len(expected) - 6
        with pytest.raises(ValueError, match="negative"):
            stream.seek(-1)


def test_a_range_reads_only_the_blocks_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {str(number): torch.randn(1 << 20) for number in range(4)}
    expected = saved(value)
    with open_stream(compress(tmp_path / "a.pt", value)) as stream:
        read, plain = list[int](), type(stream._filesystem).read_into

        def counting(self: Any, name: str, start: int, buffer: memoryview) -> None:
            read.append(len(buffer))
            plain(self, name, start, buffer)

        monkeypatch.setattr(type(stream._filesystem), "read_into", counting)
        start = len(expected) // 2
        stream.seek(start)
        assert stream.read(1000) == expected[start : start + 1000]
    assert 0 < sum(read) < 2 << 20


def test_parts_of_wrapper_subclasses_keep_their_types(tmp_path: Path) -> None:
    value = {"w": TwoTensor(torch.randn(40_000), torch.randn(40_000))}  # type: ignore[no-untyped-call]
    path = compress(tmp_path / "a.pt", value)
    assert {"w.a", "w.b"} <= set(fqns(path))
    with open_stream(path) as stream:
        assert stream.readall() == saved(value)


@pytest.mark.parametrize("nbytes", [0, 1, 70_000, 3 << 20])
def test_bytes_of_no_tensor(tmp_path: Path, nbytes: int) -> None:
    data = random.Random(0).randbytes(nbytes)
    with StreamWriter(tmp_path / "a") as stream:
        buffer = bytearray(data)
        stream.write(buffer)
        buffer[:] = bytes(nbytes)  # what was written was copied
        stream.flush()
        stream.write(b"end")
    with open_stream(tmp_path / "a") as reader:
        assert reader.readall() == data + b"end"


def test_views_that_are_written_in_any_order(tmp_path: Path) -> None:
    """Parts of tensors, across their ends, and parts twice."""
    memory = torch.arange(200_000, dtype=torch.int64)
    raw = memory.view(torch.uint8).numpy()
    draw, expected = random.Random(3), bytearray()
    with StreamWriter(tmp_path / "a", {"a": memory}) as stream:
        for _ in range(30):
            start = draw.randrange(len(raw))
            stop = draw.randrange(start, len(raw))
            assert stream.write(raw[start:stop]) == stop - start
            expected += raw[start:stop].tobytes()
    with open_stream(tmp_path / "a") as reader:
        assert reader.readall() == expected


def test_memories_that_overlap(tmp_path: Path) -> None:
    """As those of arrays that are parts of another one."""
    array = np.arange(100_000)
    parts = [torch.from_numpy(array[start:stop]) for start, stop in [(0, 60_000), (30_000, 90_000), (40_000, 100_000)]]
    with StreamWriter(tmp_path / "a", parts) as stream:
        stream.write(array)
        stream.write(array[20_000:95_000])
    with open_stream(tmp_path / "a") as reader:
        assert reader.readall() == array.tobytes() + array[20_000:95_000].tobytes()


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    compress(tmp_path / "a.pt", {"w": torch.ones(3)})
    with pytest.raises(AttributeError, match="pickle"):
        compress(tmp_path / "a.pt", {"w": torch.ones(70_000), "f": lambda: None})
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]
    assert_same(load_compressed_checkpoint(tmp_path / "a.pt"), {"w": torch.ones(3)})


def test_an_interrupt_waits_for_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads memory that the caller is about to free."""
    going, went = threading.Event(), list[str]()

    def slowly(path: Any, tensors: Any, key: str, last: Any, **options: Any) -> Any:
        last()
        going.wait(60)
        went.append("read")

    monkeypatch.setattr(writer, "write_file", slowly)
    stream = StreamWriter(tmp_path / "a")
    stream.write(b"x")
    main = threading.get_ident()

    def interrupt() -> None:
        while not stream._is_closed:
            time.sleep(0.01)
        time.sleep(0.2)  # it waits for the thread by now
        signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.3)
        going.set()

    # a shell's background jobs, which a test run may be one of, ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    finally:
        signal.signal(signal.SIGINT, before)
    assert went == ["read"]
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"x")


@pytest.mark.parametrize("end", ["", "raise ValueError('the end')"])
def test_a_stream_that_is_left_open_does_not_keep_the_interpreter(tmp_path: Path, end: str) -> None:
    program = (
        f"import torch; from dcp_nvcomp.streams.writer import StreamWriter\nf = StreamWriter({str(tmp_path / 'a')!r})"
    )
    done = subprocess.run([sys.executable, "-c", f"{program}; f.write(b'x')\n{end}"], capture_output=True, timeout=60)
    assert done.returncode == (1 if end else 0), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_states_in_which_no_memory_is_found(tmp_path: Path) -> None:
    """What torch.save can save."""
    nested = torch.nested.nested_tensor([torch.randn(200, 300), torch.randn(100, 300)])
    deep: list[Any] = [torch.randn(40_000)]
    deep.append(deep)
    for value in ({"nested": nested}, deep):
        with torch.device("meta"), open_stream(compress(tmp_path / "a.pt", value)) as stream:
            assert stream.readall() == saved(value)


def test_every_flip_is_found(tmp_path: Path) -> None:
    value = {"w": torch.randn(40_000), "h": torch.randn(40_000).bfloat16(), "n": 5}
    path, expected = compress(tmp_path / "a.pt", value), saved(value)
    nbytes = path.stat().st_size
    for position in [*range(64), *range(64, nbytes, nbytes // 50), *range(nbytes - 64, nbytes)]:
        flip(path, position)
        with contextlib.suppress(CheckpointError), open_stream(path) as stream:
            assert stream.readall() == expected, position  # zeros between blocks belong to nothing
        flip(path, position)


def test_a_plain_file_is_read_into_the_buffer_before_its_bytes_are_freed(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(40 << 20)  # beyond what malloc ever keeps, so the memory is gone
    (tmp_path / "a").write_bytes(data)
    with PlainReader(NvcompReader(tmp_path).open_storage(), "a", len(data)) as stream:
        assert stream.readall() == data


def test_a_failed_read_lets_go_of_the_buffer(tmp_path: Path) -> None:
    value = {"w": torch.randn(400_000)}
    path = compress(tmp_path / "a.pt", value)
    flip(path, path.stat().st_size // 2)
    with open_stream(path) as stream:
        memory = mmap.mmap(-1, stream.nbytes)
        with pytest.raises(CorruptDataError) as caught, memoryview(memory) as view:
            stream.readinto(view)
        memory.close()  # BufferError if anything has a view of it
    assert "a.pt" in str(caught.value) and caught.value.fqn == "w"


HOSTILE: dict[str, Any] = {
    "a piece beyond its record": {"pieces": [[0, 0, 8]]},
    "one before it": {"pieces": [[0, 0, -8]]},
    "one of no record": {"pieces": [[0, 1, 0]]},
    "one of a record from behind": {"pieces": [[0, -2, 0]]},
    "a gap": {"pieces": [[8, 0, 0]]},
    "an empty piece": {"pieces": [[0, 0, 0], [0, 0, 0]]},
    "pieces backwards": {"pieces": [[0, 0, 0], [90, 0, 0], [40, 0, 0]]},
    "one beyond the end": {"pieces": [[0, 0, 0], [400_000, 0, 0]]},
    "numbers with a point": {"pieces": [[0, 0, 0.5]]},
    "a flag": {"pieces": [[0, False, 0]]},
    "too few numbers": {"pieces": [[0, 0]]},
    "no list": {"pieces": 5},
    "a size that is too large": {"nbytes": 1 << 60},
    "a negative size": {"nbytes": -1},
    "no size": {"nbytes": None},
    "another record": {"records": ["v"]},
    "the stream itself": {"records": [STREAM_KEY], "nbytes": 8},
    "no pieces": {"pieces": []},
    "literals that are not there": {"pieces": [[0, -1, 0]]},
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_invalid_pieces_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    described = {"nbytes": 400_000, "records": ["w"], "pieces": [[0, 0, 0]]}
    tensors = {"w": torch.randn(100_000)}

    def write(described: dict[str, Any]) -> Path:
        text = json.dumps(described).encode()
        write_file(tmp_path / "a", tensors, STREAM_KEY, lambda: len(text).to_bytes(LENGTH_NBYTES, "little") + text)
        return tmp_path / "a"

    with open_stream(write(described)) as stream:
        assert stream.readall() == tensors["w"].numpy().tobytes()
    with pytest.raises(FormatError, match="list of a stream's pieces is invalid"):
        open_stream(write({**described, **change}))


@pytest.mark.parametrize("last", [b"", b"\0", (1 << 62).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[["])
def test_a_list_that_is_cut_short_is_refused(tmp_path: Path, last: bytes) -> None:
    write_file(tmp_path / "a", {}, STREAM_KEY, lambda: last)
    with pytest.raises(FormatError, match="list of a stream's pieces is invalid"):
        open_stream(tmp_path / "a")


def test_another_file_has_no_stream(tmp_path: Path) -> None:
    write_file(tmp_path / "a", {"w": torch.ones(9)}, "other", lambda: b"x")
    with pytest.raises(FormatError, match="has no stream"):
        open_stream(tmp_path / "a")


def test_pieces_are_few(tmp_path: Path) -> None:
    """What torch.save writes in many small pieces is one."""
    path = compress(tmp_path / "a.pt", {str(number): torch.ones(number) for number in range(200)})
    with open_stream(path) as stream:
        index = stream._index
    assert len(index.pieces) == 1 and index.records == [] and len(index.literals) == index.nbytes


def test_code_in_a_stream_is_not_run(tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return (exec, ("raise SystemExit(3)",))

    path = compress(tmp_path / "a.pt", {"w": torch.ones(40_000), "code": Code()})
    with pytest.raises(UnsafeObjectError):
        load_compressed_checkpoint(path)


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_boxes_of_run(shape: list[int], data: st.DataObject) -> None:
    elements = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    start = data.draw(st.integers(0, elements.size))
    stop = data.draw(st.integers(start, elements.size))
    boxes = list(boxes_of_run(shape, start, stop))
    found = [elements[box.index].ravel() for box in boxes]
    assert np.concatenate([np.zeros(0, int), *found]).tolist() == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
