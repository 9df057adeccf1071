"""From measured rates to the seconds of a save or load of any size: arithmetic only.

Encoding and writing overlap: seconds = fixed + factor * (longer + shared * shorter), where a trial shows `shared`,
which is 0 if they do not disturb each other and 1 if one follows the other; what is left then is the `factor`. A load
is the same with decoding and reading.
"""

from __future__ import annotations

from dataclasses import dataclass

_LARGE_NBYTES = 1 << 60


@dataclass(frozen=True)
class StorageRates:
    """What a storage does for one rank; rates are bytes a second with so many streams or reads at once."""

    write_rates: dict[int, float]  # with one, and with as many as a save uses
    read_rates: dict[int, float]  # with one, and with as many as a load uses
    file_seconds: float  # to make a file of one byte, durably
    publish_seconds: float  # to publish a small file, as a commit does
    file_nbytes: int  # state of so many bytes is worth another stream
    streams: tuple[
        int, ...
    ] = ()  # how many a save uses at most with one thread, with two, ...; empty if it is the same

    def write_rate(self, state_nbytes: int, *, threads: int | None = None) -> float:
        """Return the rate for a state of this size, which may be too small for all streams."""
        most = max(self.write_rates)
        if threads is not None and self.streams:
            most = min(most, self.streams[min(threads, len(self.streams)) - 1])
        streams = max(1, min(most, state_nbytes // self.file_nbytes))
        low = max(known for known in self.write_rates if known <= streams)
        high = min(known for known in self.write_rates if known >= streams)
        slow, fast = self.write_rates[low], self.write_rates[high]
        return slow if low == high else slow + (fast - slow) * (streams - low) / (high - low)

    @property
    def read_rate(self) -> float:
        return self.read_rates[max(self.read_rates)]


@dataclass(frozen=True)
class CodecRates:
    """What a codec does with the sample state on this machine, without a storage; rates are bytes of state a second."""

    codec: str
    threads: int
    ratio: float
    encode_rate: float
    decode_rate: float


@dataclass(frozen=True)
class Trial:
    """Median times of whole saves and loads with one codec; the empty ones show what does not grow with the state."""

    codec: str
    nbytes: int
    ratio: float
    save_seconds: float
    load_seconds: float
    empty_save_seconds: float
    empty_load_seconds: float


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
class Overlap:
    """How two things that go on at the same time slow each other down."""

    factor: float  # how much longer both together take than the rest of this says
    shared: float  # which part of the shorter one comes on top of the longer one

    @classmethod
    def of(cls, measured: float, one: float, other: float) -> Overlap:
        """Return how they did, from the time of both together and of each alone."""
        longer, shorter = max(one, other), min(one, other)
        if longer < measured <= longer + shorter:
            return cls(1.0, (measured - longer) / shorter)
        shared = 0.0 if measured <= longer else 1.0
        # a trial of next to nothing may be faster than the empty one by chance
        return cls(min(max(measured / (longer + shared * shorter), 0.1), 10.0), shared)

    def seconds(self, one: float, other: float) -> float:
        """Return the time of both together, from that of each alone."""
        return self.factor * (max(one, other) + self.shared * min(one, other))


@dataclass(frozen=True)
class Model:
    """One codec at one storage."""

    rates: CodecRates
    storage: StorageRates
    trial: Trial  # with this codec, or with the one that is nearest to it
    trial_rates: CodecRates  # of the trial's codec

    def predict(self, state_nbytes: int, *, ratio: float | None = None) -> Prediction:
        if ratio is None:
            ratio = self.rates.ratio
        encode, write, decode, read = self._seconds(self.rates, state_nbytes, ratio)
        saving, loading = self._overlaps()
        return Prediction(
            self.rates.codec,
            state_nbytes,
            round(state_nbytes / ratio),
            self.trial.empty_save_seconds + saving.seconds(encode, write),
            self.trial.empty_load_seconds + loading.seconds(decode, read),
            "encode" if encode > write else "write",
            "decode" if decode > read else "read",
        )

    def byte_seconds(self, write_seconds: float) -> float:
        """Return what a byte of a large state takes in a save."""
        saving, _ = self._overlaps()
        return saving.seconds(1 / self.rates.encode_rate, write_seconds / self.rates.ratio)

    def _overlaps(self) -> tuple[Overlap, Overlap]:
        trial = self.trial
        encode, write, decode, read = self._seconds(self.trial_rates, trial.nbytes, trial.ratio)
        return (
            Overlap.of(trial.save_seconds - trial.empty_save_seconds, encode, write),
            Overlap.of(trial.load_seconds - trial.empty_load_seconds, decode, read),
        )

    def _seconds(self, rates: CodecRates, nbytes: int, ratio: float) -> tuple[float, float, float, float]:
        stored = nbytes / ratio
        return (
            nbytes / rates.encode_rate,
            stored / self.storage.write_rate(nbytes),
            nbytes / rates.decode_rate,
            stored / self.storage.read_rate,
        )


def break_even_rate(compressed: Model, plain: Model) -> float | None:
    """Return the rate of a storage, for each rank, below which a compressed save of a large state takes less time."""

    def gain(write_seconds: float) -> float:
        return plain.byte_seconds(write_seconds) - compressed.byte_seconds(write_seconds)

    # between these a gain is a straight line, and beyond the last: where encoding takes as long as writing
    bends = sorted((0.0, *(model.rates.ratio / model.rates.encode_rate for model in (compressed, plain))))
    crossings = []
    for low, high in zip(bends, (*bends[1:], 2 * bends[-1]), strict=True):
        at_low, at_high = gain(low), gain(high)
        if at_low != at_high:
            crossing = low + (high - low) * at_low / (at_low - at_high)
            if low <= crossing and (crossing <= high or low == bends[-1]):
                crossings.append(crossing)
    here = 1 / plain.storage.write_rate(_LARGE_NBYTES)
    if gain(here) > 0:
        faster = [crossing for crossing in crossings if 0 < crossing < here]
        return 1 / max(faster) if faster else None
    slower = [crossing for crossing in crossings if crossing >= here]
    return 1 / min(slower) if slower else 0.0
