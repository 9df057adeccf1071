"""Joins the JSON files of an acceptance run that was made in parts, on one kind of GPU, into one.

python -m benchmarks.gpu_acceptance.merge PART.json ... --out benchmarks/results/gpu-acceptance.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_acceptance.results import checks_of, tables_of
from benchmarks.gpu_acceptance.steps import STEPS

__all__ = ["main", "merged"]


def merged(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the result whose steps are those of all parts, a later part's in the place of an earlier one's.

    Raises:
        ValueError: the parts are not of one GPU, or none has the step `versions`, which names it.
    """
    gpus = {part["machine"]["gpu"] for part in parts if "gpu" in part.get("machine", {})}
    if len(gpus) != 1:
        raise ValueError(f"The parts are of these GPUs, and should be of one: {sorted(gpus)}.")
    if len({part["stand_in"] for part in parts}) != 1:
        raise ValueError("Some parts are of the stand-in, others of a GPU.")
    first = next(part for part in parts if "gpu" in part.get("machine", {}))
    found = {name: _published(step) for part in parts for name, step in part["steps"].items()}
    steps = {step.name: found[step.name] for step in STEPS if step.name in found}
    tables = tables_of(steps)
    command = first["command"].partition(" --step")[0]
    return {
        **first,
        "command": command,
        "complete": all(part["complete"] for part in parts),
        "steps": steps,
        "tables": tables,
        "checks": checks_of(tables),
        "notes": [note for part in parts for note in part["notes"]],
    }


def _published(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step without what its processes printed, and tracebacks: they name the paths of a machine.

    One that was under way when its part ended has failed, and its last probe timed out.
    """
    probes = {name: {key: one[key] for key in one if key != "trace"} for name, one in step["probes"].items()}
    cut = {"status": "timed out", "reason": "the time of the run was up"}
    probes = {name: cut if one["status"] == "running" else one for name, one in probes.items()}
    status = step["status"]
    if status == "not run" and any(one["status"] != "not run" for one in probes.values()):
        status = "failed"
    return {**{key: step[key] for key in step if key != "output"}, "status": status, "probes": probes}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    options = parser.parse_args()
    result = merged([json.loads(part.read_text()) for part in options.parts])
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
