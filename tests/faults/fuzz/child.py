"""One target under libFuzzer, which ends the process: `python -m tests.faults.fuzz.child TARGET FLAGS...`."""

from __future__ import annotations

import random
import sys
import warnings

import atheris
import torch  # not instrumented: it is large, and not what is tested


def main() -> None:
    """Never returns."""
    name, *flags = sys.argv[1:]
    warnings.simplefilter("ignore")  # torch's, of odd pickles
    torch.set_num_threads(1)
    with atheris.instrument_imports(include=["dcp_nvcomp", "torch._weights_only_unpickler"]):
        from .limits import Limits
        from .mutators import MUTATORS
        from .targets import TARGETS
    target, mutate, limits = TARGETS[name], MUTATORS[name], None

    def one(data: bytes) -> None:
        nonlocal limits
        if limits is None:  # libFuzzer has its own memory by now
            limits = Limits()
        limits.run(target, data)

    def mutated(data: bytes, limit: int, seed: int) -> bytes:
        return mutate(data, limit, random.Random(seed), atheris.Mutate)

    atheris.Setup([sys.argv[0], *flags], one, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
