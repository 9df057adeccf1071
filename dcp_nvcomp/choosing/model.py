"""From measured rates to the seconds of a save or load of any size: arithmetic only.

Encoding and writing overlap, so a save takes as long as the longer of the two, and what does not grow with it:

    seconds = fixed + slowdown * max(state / encode rate, state / ratio / write rate)

`slowdown` is how much longer a trial took than this says without it: both share cores, and so does a server on the same
machine. A load is the same with decoding and reading.

With a storage that takes R bytes a second of each rank, and E the rate at which a codec encodes, which is less than the
rate at which bytes are stored as they are, a compressed save takes max(1/E, 1/(ratio R)) for each byte and a plain one
1/R. The first is the smaller one exactly if R < E: E is the break-even rate, whatever the ratio is.
"""

from __future__ import annotations

from dataclasses import dataclass

from dcp_nvcomp.choosing.codec_rates import CodecRates
from dcp_nvcomp.choosing.storage_rates import StorageRates
from dcp_nvcomp.choosing.trials import Trial

__all__ = ["Model", "Prediction", "break_even_rate"]


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

    def to_json(self) -> dict[str, object]:
        """Return all of it as JSON values."""
        return dict(vars(self))


@dataclass(frozen=True)
class Model:
    """One codec at one storage.

    Attributes:
        rates: of the codec on this machine.
        storage: of the storage.
        trial: whole saves and loads with this codec, or with the one that is nearest to it.
        trial_rates: of the trial's codec.
    """

    rates: CodecRates
    storage: StorageRates
    trial: Trial
    trial_rates: CodecRates

    def predict(self, state_nbytes: int, *, ratio: float | None = None) -> Prediction:
        """Return what to expect.

        Args:
            state_nbytes: size of one rank's state in memory.
            ratio: of that state; by default the sample's.
        """
        if ratio is None:
            ratio = self.rates.ratio
        encode, write, decode, read = self._seconds(self.rates, state_nbytes, ratio)
        return Prediction(
            self.rates.codec,
            state_nbytes,
            round(state_nbytes / ratio),
            self.trial.empty_save_seconds + self.save_slowdown * max(encode, write),
            self.trial.empty_load_seconds + self.load_slowdown * max(decode, read),
            "encode" if encode > write else "write",
            "decode" if decode > read else "read",
        )

    @property
    def save_slowdown(self) -> float:
        """How much longer a trial's save took than its longer part."""
        encode, write, _, _ = self._seconds(self.trial_rates, self.trial.nbytes, self.trial.ratio)
        return _slowdown(self.trial.save_seconds - self.trial.empty_save_seconds, max(encode, write))

    @property
    def load_slowdown(self) -> float:
        """How much longer a trial's load took than its longer part."""
        _, _, decode, read = self._seconds(self.trial_rates, self.trial.nbytes, self.trial.ratio)
        return _slowdown(self.trial.load_seconds - self.trial.empty_load_seconds, max(decode, read))

    def _seconds(self, rates: CodecRates, nbytes: int, ratio: float) -> tuple[float, float, float, float]:
        stored = nbytes / ratio
        return (
            nbytes / rates.encode_rate,
            stored / self.storage.write_rate(nbytes),
            nbytes / rates.decode_rate,
            stored / self.storage.read_rate,
        )


def _slowdown(measured: float, longer: float) -> float:
    # a trial of next to nothing may be faster than the empty one by chance
    return min(max(measured / longer, 0.1), 10.0)


def break_even_rate(compressed: CodecRates, plain: CodecRates) -> float | None:
    """Return the rate of a storage, for each rank, below which a compressed save takes less time; None if at any rate.

    Args:
        compressed: the codec.
        plain: the codec that stores bytes as they are.
    """
    return None if compressed.encode_rate >= plain.encode_rate else compressed.encode_rate
