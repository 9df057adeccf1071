"""What docs/performance.md and docs/performance/gpu.md say of GPUs, made of the JSON of benchmarks.gpu_acceptance."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu_acceptance.results import TABLES

__all__ = ["RESULT_NAME", "checked_result", "gpu_section", "gpu_summary"]

RESULT_NAME = "gpu-acceptance.json"

_NO_SUMMARY = """**Nothing on this page was measured on a GPU.** The CUDA engine is written, its kernels compile for \
sm_80, sm_90 and sm_100 and run on a CPU in the tests, but it has not run on a GPU yet; see \
[The GPU](performance/gpu.md)."""

_NO_SECTION = """There are no figures yet, and the defaults that depend on them (slice sizes, batch sizes, two engines \
per device) are guesses based on nvCOMP's documentation. They will be the result of one run on a GPU:

```
python -m benchmarks.gpu_acceptance --out DIR
```

It first checks that everything is right, then measures the coders alone by slice size and count, the engine by batch \
size, staging beside a plain pinned copy, and saves and loads beside stock DCP. CONTRIBUTING.md says what it needs. \
`make bench SUITE=gpu` and `make bench SUITE=slices` measure some of this at greater length."""

_STATUSES = {"passed": "passed", "failed": "**failed**", "observed": "observed", "skipped": "skipped"}

# Renders a table of a suite's results: its name, and the columns, none for all.
TableText = Callable[[str], str]


def checked_result(results: Path) -> Mapping[str, Any] | None:
    """Return the result of the run on a GPU, None if there was none.

    Raises:
        ValueError: it is of the stand-in, or knows no GPU.
    """
    path = results / RESULT_NAME
    if not path.exists():
        return None
    result: Mapping[str, Any] = json.loads(path.read_text())
    if result["stand_in"]:
        raise ValueError(f"{path.name} is of a run on the CPU stand-in: documents are about runs on a GPU only.")
    if "gpu" not in result.get("machine", {}):
        raise ValueError(f"{path.name} names no GPU: run the step `versions` too.")
    return result


def gpu_summary(results: Path) -> str:
    """Return the sentence at the head of the page.

    Args:
        results: the folder of the results.
    """
    result = checked_result(results)
    if result is None:
        return _NO_SUMMARY
    return f"Measurements on a GPU are of one run on an {result['machine']['gpu']}; see [The GPU](performance/gpu.md)."


def gpu_section(results: Path, table: TableText) -> str:
    """Return the section on GPUs.

    Args:
        results: the folder of the results.
        table: renders a table by name.
    """
    result = checked_result(results)
    if result is None:
        return _NO_SECTION
    parts = [_sentence(result), "\n".join(_steps(result))]
    parts += _problems(result)
    parts += [table(name) for name in TABLES if name in result["tables"]]
    parts += _targets(result)
    return "\n\n".join(parts)


def _sentence(result: Mapping[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    packages = [name for name in versions if name in ("torch", "zstandard") or "nvcomp" in name or "cupy" in name]
    about = ", ".join(f"{name} {versions[name]}" for name in packages)
    where = f"an {machine['gpu']} with {machine['gpu_memory_nbytes'] / 2**30:.0f} GiB, {machine['cores']} cores"
    text = f"Measured on {result['date'][:10]} with `{result['command']}` on {where}; {about}."
    return f"{text} States are normal values whose scale differs from row to row: ratios are not those of real ones."


def _steps(result: Mapping[str, Any]) -> Iterator[str]:
    yield "| step | what it finds out | probes passed | |"
    yield "| --- | --- | ---: | --- |"
    for name, step in result["steps"].items():
        probes = step["probes"].values()
        passed = sum(probe["status"] == "passed" for probe in probes)
        status = _STATUSES.get(step["status"], step["status"])
        yield f"| {name} | {step['about']} | {passed} of {len(probes)} | {status} |"


def _problems(result: Mapping[str, Any]) -> list[str]:
    """Return a list of all that did not pass, if there is something."""
    lines = []
    for name, step in result["steps"].items():
        if step["status"] == "failed":
            statuses = [found["status"] for found in step["probes"].values()]
            lines += [
                f"- {name}, {probe}: {found['status']}, {_first_line(found)}"
                for probe, found in step["probes"].items()
                if found["status"] not in ("passed", "skipped", "not run")
            ]
            if "not run" in statuses:
                lines.append(f"- {name}: {statuses.count('not run')} not run")
    return ["What did not pass:\n\n" + "\n".join(lines)] if lines else []


def _first_line(found: Mapping[str, Any]) -> str:
    text = (found.get("error") or found.get("reason") or "no reason is known").strip() or "no reason is known"
    return text.splitlines()[0][:200].replace("|", "/")


def _targets(result: Mapping[str, Any]) -> list[str]:
    if not result["checks"]:
        return []
    lines = ["| target | measured | asked for | |", "| --- | ---: | ---: | --- |"]
    for check in result["checks"]:
        met = "met" if check["met"] else "**not met**"
        lines.append(f"| {check['what']} | {check['value']:.2f} | >= {check['bound']:.4g} | {met} |")
    return ["\n".join(lines)]
