"""bench: what it measures, what it predicts from that, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import ConfigurationError, StorageError
from dcp_nvcomp.advising.bench import CODECS, Bench, bench
from dcp_nvcomp.advising.measuring import (
    CodecRates,
    StorageRates,
    Trial,
    measure_codec,
    repeated_seconds,
    sample_state,
)
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem

from ..cli.checkpoints import run

STORAGE = StorageRates({1: 100e6, 4: 400e6}, {1: 200e6, 16: 800e6}, 0.01, 0.02, 64 << 20)


def rates(codec: str, ratio: float, encode: float, decode: float) -> CodecRates:
    return CodecRates(codec, 2, ratio, encode, decode)


def trial(codec: str, ratio: float, save: float, load: float, *, fixed: float = 0.5) -> Trial:
    return Trial(codec, 256 << 20, ratio, save + fixed, load + fixed, fixed, fixed)


def made(auto_encode: float = 2e9, none_encode: float = 5e9) -> Bench:
    """Return a bench of round numbers whose trials took just as long as the model says without a slowdown."""
    nbytes = 256 << 20
    codecs = {
        "auto": rates("auto", 1.25, auto_encode, 4e9),
        "none": rates("none", 1.0, none_encode, 8e9),
    }
    trials = {
        name: trial(
            name,
            one.ratio,
            max(nbytes / one.encode_rate, nbytes / one.ratio / 400e6),
            max(nbytes / one.decode_rate, nbytes / one.ratio / 800e6),
        )
        for name, one in codecs.items()
    }
    return Bench("memory://", 2, "cpu", codecs, STORAGE, trials)


def test_encoding_and_writing_overlap() -> None:
    found = made()
    one = found.predict(10**9)
    assert one.save_bound == "write" and one.load_bound == "read"
    assert one.save_seconds == pytest.approx(0.5 + 10**9 / 1.25 / 400e6)
    assert one.load_seconds == pytest.approx(0.5 + 10**9 / 1.25 / 800e6)
    assert found.predict(10**9, "none").save_seconds == pytest.approx(0.5 + 10**9 / 400e6)
    slow = made(auto_encode=200e6).predict(10**9)
    assert slow.save_bound == "encode" and slow.save_seconds == pytest.approx(0.5 + 10**9 / 200e6)


def test_a_state_that_is_too_small_for_all_streams() -> None:
    assert STORAGE.write_rate(1000) == 100e6
    assert STORAGE.write_rate(128 << 20) == pytest.approx(200e6)
    assert STORAGE.write_rate(1 << 40) == 400e6
    local = replace(STORAGE, streams=(1, 2, 4))
    assert [local.write_rate(1 << 40, threads=threads) for threads in (1, 2, 3)] == [100e6, 200e6, 400e6]
    assert STORAGE.write_rate(1 << 40, threads=1) == 400e6


def test_what_the_parts_do_to_each_other_is_in_the_prediction() -> None:
    ideal = (256 << 20) / 1.25 / 400e6
    found = replace(made(), trials={"auto": trial("auto", 1.25, 2 * ideal, 3.0)})
    assert found.predict(10**9).save_seconds == pytest.approx(0.5 + 2 * 10**9 / 1.25 / 400e6)


def test_another_ratio_and_another_codec() -> None:
    found = made()
    assert found.predict(10**9, ratio=2.0).stored_nbytes == 5 * 10**8
    assert found.predict(10**9, ratio=2.0).save_seconds < found.predict(10**9).save_seconds
    with pytest.raises(ConfigurationError, match="'ans' was not measured"):
        found.predict(1, "ans")


def test_the_break_even_rate_is_where_both_saves_take_as_long() -> None:
    found = made()
    assert found.break_even_rate == pytest.approx(2e9)
    assert found.sentence == "compression saves time below 2 GB/s a rank here"
    auto, none = found.codecs["auto"], found.codecs["none"]
    for rate, compressed_is_faster in ((1.9e9, True), (2.1e9, False)):
        compressed = max(1 / auto.encode_rate, 1 / auto.ratio / rate)
        plain = max(1 / none.encode_rate, 1 / rate)
        assert (compressed < plain) == compressed_is_faster
    assert made(auto_encode=6e9).sentence == "compression saves time at any rate of the storage here"
    never = replace(found, trials={**found.trials, "auto": replace(found.trials["auto"], save_seconds=9.0)})
    assert never.break_even_rate == 0 and never.sentence.startswith("compression saves no time here")


@pytest.mark.parametrize("storage", [100e6, 400e6, 1.5e9, 2.5e9, 10e9])
@pytest.mark.parametrize("auto_encode", [300e6, 2e9, 6e9])
@pytest.mark.parametrize(("auto_slower", "none_slower"), [(1.0, 1.0), (1.3, 1.0), (1.9, 1.1), (1.2, 2.5), (0.8, 1.0)])
def test_the_sentence_says_what_the_prediction_says(
    storage: float, auto_encode: float, auto_slower: float, none_slower: float
) -> None:
    found = made(auto_encode)
    found = replace(found, storage=replace(found.storage, write_rates={1: storage}))
    trials = {}
    for codec, slower in (("auto", auto_slower), ("none", none_slower)):
        one = found.trials[codec]
        longer = max(one.nbytes / found.codecs[codec].encode_rate, one.nbytes / one.ratio / storage)
        trials[codec] = replace(one, save_seconds=one.empty_save_seconds + slower * longer)
    found = replace(found, trials=trials)
    compressed, plain = (found.predict(10**13, codec).save_seconds for codec in ("auto", "none"))
    rate = found.break_even_rate
    if rate is not None and abs(compressed / plain - 1) > 1e-6:
        assert (compressed < plain) == (storage < rate)
    elif rate is None:
        assert compressed < plain


def test_the_sample_is_coded_like_a_real_state() -> None:
    pytest.importorskip("safetensors")
    from benchmarks.states import build_state

    for kind in ("model", "grad", "exp_avg", "exp_avg_sq"):
        ratios = []
        for state in (sample_state(1), build_state(12 << 20)):
            part = {name: t for name, t in state.items() if name.startswith(f"{kind}.") and t.dim() == 2}
            ratios.append(measure_codec(part, "auto", threads=1, seconds=0.001).ratio)
        assert ratios[0] == pytest.approx(ratios[1], rel=0.015), kind


def test_a_sample_has_the_size_that_was_asked_for() -> None:
    state = sample_state(60 << 20, unique_nbytes=12 << 20)
    assert sum(tensor.nbytes for tensor in state.values()) == 60 << 20
    storages = {tensor.data_ptr() for tensor in state.values()}
    assert len(storages) == len(state) == 20
    assert torch.equal(state["model.layers.4.weight"], state["model.layers.0.weight"])


def test_the_first_run_is_not_measured() -> None:
    runs: list[str] = []
    assert repeated_seconds(lambda: runs.append("run"), 0.0, before=lambda: runs.append("before")) >= 0
    assert runs == ["before", "run"] * 2


def test_bench_measures_and_leaves_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    found = bench(tmp_path, seconds=0.01, threads=1, say=said.append)
    assert list(tmp_path.iterdir()) == []
    assert found.url == str(tmp_path) and found.threads == 1
    assert tuple(found.codecs) == CODECS and list(found.trials) == ["auto", "none"]
    assert found.codecs["auto"].ratio > 1.25 > 1.1 > found.codecs["none"].ratio > 0.99
    assert all(one.encode_rate > 0 and one.decode_rate > 0 for one in found.codecs.values())
    assert found.storage.publish_seconds > 0 and set(found.storage.write_rates) == {1}
    assert found.storage.streams == (1,)
    assert said[0] == "storage" and any("auto" in text for text in said)


def test_a_storage_that_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StorageError):
        bench(tmp_path / "file", seconds=0.01)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ETIMEDOUT])
def test_the_first_failure_is_reported(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that is gone can't be tidied up; one that does not answer is not asked again."""
    asked = []

    def failing(what: str) -> Callable[..., Any]:
        def fail(*arguments: Any) -> Any:
            asked.append(what)
            error = StorageError(f"Could not {what}.")
            error.errno = number
            raise error

        return fail

    for name, what in (("open_output", "write"), ("list_files", "list"), ("remove", "remove")):
        monkeypatch.setattr(PosixFilesystem, name, failing(what))
    with pytest.raises(StorageError, match="Could not write"):
        bench(tmp_path, seconds=0.01)
    assert asked == (["write"] if number == errno.ETIMEDOUT else ["write", "remove", "list"])


PRINTED = """\
memory://, 2 threads, state on cpu

storage               streams      rate
write                       1  100 MB/s
write                       4  400 MB/s
read                        1  200 MB/s
read                       16  800 MB/s
publish a small file              20 ms

codec  ratio     encode     decode
auto   1.250  2.00 GB/s  4.00 GB/s
none   1.000  5.00 GB/s  8.00 GB/s

 state  codec  stored      save      load  bound by
  1 GB  auto   800 MB     2.5 s     1.5 s  write, read
  1 GB  none     1 GB     3.0 s     1.8 s  write, read
700 GB  auto   560 GB  23.3 min  11.7 min  write, read
700 GB  none   700 GB  29.2 min  14.6 min  write, read

compression saves time below 2 GB/s a rank here
At this storage a save of 700 GB a rank takes 20% less time with auto than with none.
"""


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of round numbers, not of this machine's; what it measures is tested above."""
    asked: list[Any] = []
    monkeypatch.setattr(
        "dcp_nvcomp.advising.bench.bench", lambda url, **options: (asked.append((url, options)), made())[1]
    )
    status, output, _ = run(
        "bench", "/scratch", "--seconds", "9", "--parameters", "70e9", "--state", "1GB", "-o", "a=1"
    )
    assert (status, output) == (0, PRINTED)
    url, options = asked[0]
    assert url == "/scratch" and options["seconds"] == 9.0 and options["storage_options"] == {"a": 1}
    status, output, _ = run("bench", "memory://bench", "--state", "500MB", "--json")
    document = json.loads(output)
    assert status == 0 and document["schema"] == 1
    assert {one["state_nbytes"] for one in document["predictions"]} == {500_000_000}
    assert set(document["predictions"][0]) == set(vars(made().predict(1)))


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        *(((f"--state={size}",), 2, "is not a size") for size in ("GB", "-1GB", "0GB", "5 parsecs")),
        (("--parameters", "inf"), 2, "--parameters"),
        *((("--device", name), 1, f"device={name!r} can't be used here") for name in ("tpu", "meta", "cuda:99")),
    ],
)
def test_invalid_options(tmp_path: Path, options: tuple[str, ...], status: int, says: str) -> None:
    found, output, error = run("bench", str(tmp_path), "--seconds", "0.01", *options)
    assert (found, output) == (status, "") and says in error
    assert not list(tmp_path.iterdir())
