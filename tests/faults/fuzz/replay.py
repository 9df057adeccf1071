"""Replays the corpus, without atheris, under the same limits: `python -m tests.faults.fuzz.replay`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator

import torch

from .corpus import corpus_inputs
from .limits import Limits
from .seeds import SEEDS
from .targets import TARGETS


def inputs(target: str) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of what is replayed: the seeds and the corpus."""
    for number, data in enumerate(SEEDS[target]):
        yield f"seed {number}", data
    yield from corpus_inputs(target).items()


def main() -> None:
    """Exit status 1 where an input does what it must not do."""
    warnings.simplefilter("ignore")  # torch's, of odd pickles
    torch.set_num_threads(1)
    limits, count, failed = Limits(refresh=1), 0, 0
    for target, run in TARGETS.items():
        for name, data in inputs(target):
            count += 1
            try:
                limits.run(run, data)
            except Exception as error:  # that is what is looked for
                failed += 1
                print(f"{target} {name}: {type(error).__name__}: {error}")
    print(f"{count} inputs, {failed} findings")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
