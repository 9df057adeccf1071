"""bench: measure a storage and this machine, and say what pays.

codec_rates.py     what each codec does here, without a storage
storage_rates.py   what the storage does, without a codec
trials.py          both together, compressed and plain
model.py           what follows for a state of any size
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcp_nvcomp.choosing.codec_rates import CodecRates, measure_codec
from dcp_nvcomp.choosing.model import Model, Prediction, break_even_rate
from dcp_nvcomp.choosing.sample_state import sample_state
from dcp_nvcomp.choosing.storage_rates import StorageRates, measure_storage, removing
from dcp_nvcomp.choosing.trials import Trial, run_trial
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.options import check_seconds, check_thread_count
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.saving.writer import NvcompWriter
from dcp_nvcomp.storage.base import Filesystem
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
            "storage": self.storage.to_json(),
            "codecs": [rates.to_json() for rates in self.codecs.values()],
            "trials": [trial.to_json() for trial in self.trials.values()],
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
    with contextlib.closing(open_filesystem(path, storage_options=options)) as filesystem:
        filesystem.create_directory()
        with removing(lambda: _remove(filesystem)):
            found = _measured(filesystem, path, options, seconds, threads, device, say)
    return replace(found, url=without_secrets(base))


def _remove(filesystem: Filesystem) -> None:
    filesystem.remove(filesystem.list_names())
    filesystem.remove_directory()


def _check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        words = str(error).partition("\n")[0]
        raise ConfigurationError(f"device={device!r} can't be used here: {words}") from error


def _measured(
    filesystem: Filesystem,
    path: str,
    options: dict[str, Any],
    seconds: float,
    threads: int,
    device: str,
    say: Callable[[str], None],
) -> Bench:
    say("storage")
    budget = NvcompWriter(".", thread_count=threads).host_memory_budget
    storage = measure_storage(filesystem, threads=threads, memory_budget=budget, seconds=seconds * _STORAGE_PART)
    sample = sample_state(min(_SAMPLE_NBYTES, max(_LEAST_NBYTES, int(seconds * 20e6))), device=device)
    codecs: dict[str, CodecRates] = {}
    for codec in CODECS:
        say(f"codec {codec}")
        codecs[codec] = measure_codec(sample, codec, threads=threads, seconds=seconds * _MACHINE_PART / len(CODECS))
    del sample
    each = seconds * (1 - _MACHINE_PART - _STORAGE_PART) / 2
    nbytes = _trial_nbytes(filesystem, storage, codecs["none"], threads, budget, each)
    state = sample_state(nbytes, device=device)
    trials = {}
    for codec in ("auto", "none"):
        say(f"saves and loads of {nbytes / 1e6:.0f} MB with {codec}")
        trials[codec] = run_trial(
            filesystem, path, state, codec, threads=threads, seconds=each, storage_options=options
        )
    return Bench(path, threads, device, codecs, storage, trials)


def _trial_nbytes(
    filesystem: Filesystem, storage: StorageRates, plain: CodecRates, threads: int, budget: int, seconds: float
) -> int:
    """Return the size of the trials: worth as many streams as a large state has, if there is time for that."""
    wanted = filesystem.output_streams(threads, budget) * storage.file_nbytes
    rate = 1 / (1 / min(storage.write_rates.values()) + 1 / plain.encode_rate)
    return max(_LEAST_NBYTES, min(wanted, int(rate * seconds / _TRIAL_SAVES)))
