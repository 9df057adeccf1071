"""The steps of the acceptance run, most telling first: the time may end before they do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STEPS", "Step"]


@dataclass(frozen=True)
class Step:
    """Some probes that belong together.

    Attributes:
        name: its key in the JSON.
        about: what it finds out.
        module: has `probes(host)`, which yields pairs of a name and a function without arguments.
        seconds: the time that its processes may take together.
        probe_seconds: the time that one probe may take; a process that exceeds it is killed, and another one goes on
            with the next probe.
        alone: True if each probe gets a process of its own, because a GPU may not survive it.
        may_fail: True if its probes find out what happens, whatever that is.
    """

    name: str
    about: str
    module: str
    seconds: float
    probe_seconds: float
    alone: bool = False
    may_fail: bool = False


def _step(name: str, about: str, seconds: float, probe_seconds: float, **more: bool) -> Step:
    return Step(name, about, f"benchmarks.gpu_acceptance.{name}", seconds, probe_seconds, **more)


STEPS = (
    _step("versions", "What is installed, what imports, what compiles, what the GPU is", 90, 60),
    _step("kernels", "Every kernel against its reference", 60, 40),
    _step("codecs", "Every codec in both directions against the CPU engine, in batches of many sizes", 90, 40),
    _step("checkpoints", "A large save and load, beside stock DCP and a plain pinned copy", 120, 80),
    _step("asynchronous", "`async_save`: how long training waits, beside a plain pinned copy", 70, 40),
    _step("raw", "The coders alone, by slice size and count", 60, 30),
    _step("engine", "The engine without files, by batch size, with a profile", 90, 45),
    _step("suite", "The tests of the engines on the GPU, but for the hostile ones", 150, 60),
    _step("nvcomp", "nvCOMP as it is: sizes, synchrony, the GIL, scratch memory", 40, 25),
    _step("repeats", "Twenty saves and loads, and the memory that stays reserved", 60, 50),
    _step("memory", "Out of device memory", 60, 30, alone=True),
    _step("sanitizer", "The kernels under compute-sanitizer", 100, 50),
    _step("ranks", "Two ranks on one GPU", 60, 50),
    _step("hostile", "Frames that no encoder wrote, through the engine", 80, 20, alone=True),
    _step("hardware", "The decompression engine of Blackwell GPUs", 40, 30),
    _step("undefined", "Frames that no encoder wrote, given to nvCOMP itself", 70, 20, alone=True, may_fail=True),
)
