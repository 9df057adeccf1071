"""The command line of the acceptance run."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.gpu_acceptance.build import build_cpu_kernels
from benchmarks.gpu_acceptance.runner import FILE_NAME, Runner
from benchmarks.gpu_acceptance.steps import STEPS
from benchmarks.measuring import invocation

# Ten minutes, less what comes before and after.
_SECONDS = 560.0
_BUILD_SECONDS = 60.0
_STAND_IN_SECONDS = 2400.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_acceptance", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=f"receives {FILE_NAME}")
    parser.add_argument("--stand-in", action="store_true", help="run it small, on the CPU stand-in for a GPU")
    parser.add_argument("--seconds", type=float, help=f"the time for all steps ({_SECONDS:.0f} on a GPU)")
    names = [step.name for step in STEPS]
    parser.add_argument("--step", action="append", choices=names, help="only this step; may be repeated")
    options = parser.parse_args()
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    # nothing here touches the GPU: whatever it does, this process must go on
    facts = invocation([*["--stand-in"] * options.stand_in, *[f"--step {name}" for name in options.step or ()]])
    facts["command"] = facts["command"].replace("-m benchmarks", "-m benchmarks.gpu_acceptance --out DIR")
    say(build_cpu_kernels(_BUILD_SECONDS))
    seconds = options.seconds or (_STAND_IN_SECONDS if options.stand_in else _SECONDS)
    runner = Runner(options.out, facts, stand_in=options.stand_in, seconds=seconds, say=say)
    result = runner.run([step for step in STEPS if options.step is None or step.name in options.step])
    statuses = [step["status"] for step in result["steps"].values()]
    say(f"{statuses.count('passed')} steps passed, {statuses.count('failed')} failed: {options.out / FILE_NAME}")
    sys.exit("failed" in statuses)


if __name__ == "__main__":
    main()
