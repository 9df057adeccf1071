"""bench: measure a storage and this machine, and say what pays.

Encoding and writing overlap. So a save takes what does not grow with the state, and the longer of the two times a
factor, which whole saves show: they share cores. A load is the same with decoding and reading.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_nvcomp.advising.measuring import (
    CodecRates,
    StorageRates,
    Trial,
    measure_codec,
    measure_storage,
    removing,
    run_trial,
    sample_state,
)
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.options import check_seconds, check_thread_count
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.open import open_filesystem

CODECS = ("auto", "planes-zstd", "planes-deflate", "zstd", "none")
_MACHINE_PART, _STORAGE_PART = 0.25, 0.25  # of the time; the rest is for the trials
_SAMPLE_NBYTES = 128 << 20
_LEAST_NBYTES = 12 << 20
_LARGE_NBYTES = 1 << 60
_TRIAL_SAVES = 4  # about: a save that is not measured, one that is, one to be loaded, and loads


@dataclass(frozen=True)
class Prediction:
    """Expected times of one rank's state.

    Attributes:
        codec: name of the codec.
        state_nbytes: size of the state in memory.
        stored_nbytes: size of its data files.
        save_seconds: time of a synchronous save.
        load_seconds: time of a load that finds nothing in a cache.
        save_bound: `encode` or `write`: what takes most of the save.
        load_bound: `decode` or `read`.
    """

    codec: str
    state_nbytes: int
    stored_nbytes: int
    save_seconds: float
    load_seconds: float
    save_bound: str
    load_bound: str


@dataclass(frozen=True)
class Bench:
    """What was measured, and what follows from it.

    Attributes:
        url: the storage; without a password, if its URL has one.
        threads: how many encode and decode.
        device: where the sample state was.
        codecs: rates of each codec on this machine, by name.
        storage: rates of the storage.
        trials: whole saves and loads, with `auto` and with `none`, by name.
    """

    url: str
    threads: int
    device: str
    codecs: dict[str, CodecRates]
    storage: StorageRates
    trials: dict[str, Trial]

    @property
    def break_even_rate(self) -> float | None:
        """Bytes a second that a storage takes of each rank, below which compression saves time.

        None if it does at any rate, 0 if it does at none.
        """
        auto, none = self.codecs["auto"], self.codecs["none"]
        slower = self._factors("auto")[0] / self._factors("none")[0]
        if slower * none.ratio < auto.ratio and slower * none.encode_rate > auto.encode_rate:
            return auto.encode_rate / slower / none.ratio
        compressed, plain = (self.predict(_LARGE_NBYTES, codec).save_seconds for codec in ("auto", "none"))
        return None if compressed < plain else 0.0

    @property
    def sentence(self) -> str:
        """The break-even rate in words."""
        rate = self.break_even_rate
        if rate is None:
            return "compression saves time at any rate of the storage here"
        if not rate:
            return "compression saves no time here, whatever the storage takes"
        return f"compression saves time below {rate / 1e9:.2g} GB/s a rank here"

    def predict(self, state_nbytes: int, codec: str = "auto", *, ratio: float | None = None) -> Prediction:
        """Return the times to expect of a state.

        Args:
            state_nbytes: size of one rank's state in memory.
            codec: one of those that were measured.
            ratio: of that state; by default the sample's.

        Raises:
            ConfigurationError: the codec was not measured.
        """
        if codec not in self.codecs:
            raise ConfigurationError(f"codec={codec!r} was not measured, only {', '.join(self.codecs)}.")
        rates, (save_factor, load_factor) = self.codecs[codec], self._factors(codec)
        stored_nbytes = state_nbytes / (rates.ratio if ratio is None else ratio)
        encode, write = state_nbytes / rates.encode_rate, stored_nbytes / self.storage.write_rate(state_nbytes)
        decode, read = state_nbytes / rates.decode_rate, stored_nbytes / self.storage.read_rate
        trial = self._trial(codec)
        return Prediction(
            codec,
            state_nbytes,
            round(stored_nbytes),
            trial.empty_save_seconds + save_factor * max(encode, write),
            trial.empty_load_seconds + load_factor * max(decode, read),
            "encode" if encode > write else "write",
            "decode" if decode > read else "read",
        )

    def _trial(self, codec: str) -> Trial:
        return self.trials["none" if codec == "none" else "auto"]

    def _factors(self, codec: str) -> tuple[float, float]:
        """Return how many times as long a trial's save and load took as the longer of the two things they do."""
        trial = self._trial(codec)
        rates, stored_nbytes = self.codecs[trial.codec], trial.nbytes / trial.ratio
        save = max(trial.nbytes / rates.encode_rate, stored_nbytes / self.storage.write_rate(trial.nbytes))
        load = max(trial.nbytes / rates.decode_rate, stored_nbytes / self.storage.read_rate)
        # a trial of next to nothing may be faster than the empty one by chance
        return (
            min(max((trial.save_seconds - trial.empty_save_seconds) / save, 0.1), 10.0),
            min(max((trial.load_seconds - trial.empty_load_seconds) / load, 0.1), 10.0),
        )

    def to_json(self, *state_nbytes: int) -> dict[str, Any]:
        """Return all of it as JSON values. Keys are only ever added to this document; `schema` changes if one must go.

        Args:
            *state_nbytes: sizes of states to predict.
        """
        return {
            "schema": 1,
            "url": self.url,
            "threads": self.threads,
            "device": self.device,
            "storage": {
                "write_rates": _rates_json(self.storage.write_rates),
                "read_rates": _rates_json(self.storage.read_rates),
                "file_seconds": self.storage.file_seconds,
                "publish_seconds": self.storage.publish_seconds,
            },
            "codecs": [vars(rates) for rates in self.codecs.values()],
            "trials": [vars(trial) for trial in self.trials.values()],
            "break_even_rate": self.break_even_rate,
            "sentence": self.sentence,
            "predictions": [vars(self.predict(nbytes, codec)) for nbytes in state_nbytes for codec in self.codecs],
        }


def _rates_json(rates: Mapping[int, float]) -> list[dict[str, float]]:
    return [{"streams": streams, "rate": rate} for streams, rate in rates.items()]


def bench(
    url: str | os.PathLike[str],
    *,
    seconds: float = 40.0,
    threads: int | None = None,
    device: str = "cpu",
    storage_options: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Measure a storage and this machine.

    Args:
        url: a local path or any fsspec URL. A directory of its own is made there, and removed again.
        seconds: about how long to measure. A slow storage takes longer: each step is done once at least.
        threads: how many encode and decode; by default as many as `NvcompWriter` uses.
        device: where the sample state is, such as `cuda`.
        storage_options: for the fsspec filesystem, such as `endpoint_url` and `key` for S3.
        say: called with what is being measured.

    Returns:
        Rates, and a model of saves and loads.

    Raises:
        ConfigurationError: an option is unknown or has an invalid value.
        StorageError: the storage refuses or fails.
    """
    check_seconds("seconds", seconds)
    threads = check_thread_count(threads)
    _check_device(device)
    options = dict(storage_options or {})
    base = os.fspath(url)
    path = f"{base if base.endswith(('://', '/')) else base + '/'}dcp-nvcomp-bench-{uuid.uuid4().hex[:12]}"
    budget = NvcompWriter(".", thread_count=threads).options.host_memory_budget

    with contextlib.closing(open_filesystem(path, storage_options=options)) as filesystem:

        def remove() -> None:
            filesystem.remove(filesystem.list_names())
            filesystem.remove_directory()

        filesystem.create_directory()
        with removing(remove):
            say("storage")
            storage = measure_storage(
                filesystem, threads=threads, memory_budget=budget, seconds=seconds * _STORAGE_PART
            )
            sample = sample_state(min(_SAMPLE_NBYTES, max(_LEAST_NBYTES, int(seconds * 20e6))), device=device)
            codecs = {}
            for codec in CODECS:
                say(f"codec {codec}")
                each = seconds * _MACHINE_PART / len(CODECS)
                codecs[codec] = measure_codec(sample, codec, threads=threads, seconds=each)
            del sample
            each = seconds * (1 - _MACHINE_PART - _STORAGE_PART) / 2
            # worth as many streams as a large state has, if there is time for that
            wanted = filesystem.output_streams(threads, budget) * storage.file_nbytes
            rate = 1 / (1 / min(storage.write_rates.values()) + 1 / codecs["none"].encode_rate)
            state = sample_state(max(_LEAST_NBYTES, min(wanted, int(rate * each / _TRIAL_SAVES))), device=device)
            nbytes = sum(tensor.nbytes for tensor in state.values())
            trials = {}
            for codec in ("auto", "none"):
                say(f"saves and loads of {nbytes / 1e6:.0f} MB with {codec}")
                trials[codec] = run_trial(
                    filesystem, path, state, codec, threads=threads, seconds=each, storage_options=options
                )
    return Bench(without_secrets(base), threads, device, codecs, storage, trials)


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        words = str(error).partition("\n")[0]
        raise ConfigurationError(f"device={device!r} can't be used here: {words}") from error
