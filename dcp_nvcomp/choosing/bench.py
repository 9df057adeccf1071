"""bench: measure a storage and this machine, and say what pays."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_nvcomp.choosing.measuring import measure_codec, measure_storage, removing, run_trial, sample_state
from dcp_nvcomp.choosing.model import CodecRates, Model, Prediction, StorageRates, Trial, break_even_rate
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.options import check_seconds, check_thread_count
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.open import open_filesystem

CODECS = ("auto", "planes-zstd", "planes-deflate", "zstd", "none")
_MACHINE_PART, _STORAGE_PART = 0.25, 0.25  # of the time; the rest is for the trials
_SAMPLE_NBYTES = 128 << 20
_LEAST_NBYTES = 12 << 20
_TRIAL_SAVES = 4  # about: a save that is not measured, one that is, one to be loaded, and loads


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
        return break_even_rate(self._model("auto"), self._model("none"))

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
        return self._model(codec).predict(state_nbytes, ratio=ratio)

    def _model(self, codec: str) -> Model:
        trial = self.trials["none" if codec == "none" else "auto"]
        return Model(self.codecs[codec], self.storage, trial, self.codecs[trial.codec])

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
                **{
                    name: [{"streams": streams, "rate": rate} for streams, rate in rates.items()]
                    for name, rates in (
                        ("write_rates", self.storage.write_rates),
                        ("read_rates", self.storage.read_rates),
                    )
                },
                "file_seconds": self.storage.file_seconds,
                "publish_seconds": self.storage.publish_seconds,
            },
            "codecs": [dict(vars(rates)) for rates in self.codecs.values()],
            "trials": [dict(vars(trial)) for trial in self.trials.values()],
            "break_even_rate": self.break_even_rate,
            "sentence": self.sentence,
            "predictions": [self.predict(nbytes, codec).to_json() for nbytes in state_nbytes for codec in self.codecs],
        }


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
