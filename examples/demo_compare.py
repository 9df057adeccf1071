"""The same state on the same machine through stock DCP, stock DCP with its zstd extension, and dcp_nvcomp.

    torchrun --nproc-per-node 4 examples/demo_compare.py --checkpoint runs/demo/step-200 --output compared.json

Loads a checkpoint of train_fsdp.py, saves it with each writer in turn, loads each back, and repeats that a few times.
All writers have their default options, fsync included; what is loaded has just been written, so it comes from the
page cache.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._extension import ZStandard  # stock's own; it has no public name
from train_fsdp import Training, add_model_arguments, end_distributed, fingerprint, load, start_distributed

from dcp_nvcomp import NvcompReader, NvcompWriter

COMPONENTS = ("model", "exp_avg", "exp_avg_sq", "the rest")
WRITERS: dict[str, Callable[[str], dcp.StorageWriter]] = {
    "dcp": dcp.FileSystemWriter,
    "dcp+zstd": lambda path: dcp.FileSystemWriter(path, _extensions=[ZStandard()]),
    "dcp_nvcomp": NvcompWriter,
}
READERS: dict[str, Callable[[str], dcp.StorageReader]] = {
    "dcp": dcp.FileSystemReader,
    "dcp+zstd": dcp.FileSystemReader,
    "dcp_nvcomp": NvcompReader,
}


def timed(action: Callable[[], Any], device: torch.device) -> float:
    """Seconds from the first rank's start to the last rank's end."""
    dist.barrier()
    start = time.perf_counter()
    action()
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def fill_with_zeros(state: dict[str, Any]) -> None:
    """So that what is there after a load has come from the load."""
    for value in state.values():
        if isinstance(value, dict):
            fill_with_zeros(value)
        elif isinstance(value, torch.Tensor):
            value.detach().zero_()


def component(fqn: str) -> str:
    name = "model" if fqn.startswith("train.model.") else fqn.rpartition(".")[2]
    return name if name in COMPONENTS else "the rest"


def inspect(checkpoint: str) -> list[dict[str, Any]]:
    """Return what `dcp-nvcomp inspect` reports for each key; it reads stock checkpoints too."""
    command = [sys.executable, "-m", "dcp_nvcomp", "inspect", checkpoint, "--json"]
    items: list[dict[str, Any]] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["items"]
    return items


def by_component(items: list[dict[str, Any]], field: str) -> dict[str, int]:
    totals = dict.fromkeys(COMPONENTS, 0)
    for item in items:
        totals[component(item["fqn"])] += item[field]
    return totals


def codecs_by_component(items: list[dict[str, Any]]) -> dict[str, str]:
    codecs: dict[str, set[str]] = {}
    for item in items:
        codecs.setdefault(component(item["fqn"]), set()).update(item["codecs"])
    return {name: ", ".join(sorted(names)) for name, names in codecs.items()}


def summarize(scratch: Path, seconds: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The first checkpoint of each writer, looked into, and the medians of the times."""
    directories = {name: scratch / name / "0" for name in WRITERS}
    items = {name: inspect(str(directory)) for name, directory in directories.items()}
    return {
        "uncompressed_nbytes": by_component(items["dcp_nvcomp"], "uncompressed_nbytes"),
        "codecs": codecs_by_component(items["dcp_nvcomp"]),
        "writers": {
            name: {
                "save_seconds": statistics.median(seconds[name]["save"]),
                "load_seconds": statistics.median(seconds[name]["load"]),
                "encoded_nbytes": by_component(items[name], "encoded_nbytes"),
                "directory_nbytes": sum(file.stat().st_size for file in directory.iterdir()),
            }
            for name, directory in directories.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--checkpoint", required=True, help="the state to measure with")
    parser.add_argument("--scratch", type=Path, required=True, help="an empty directory to save to")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    device = start_distributed()
    training = Training(device, width=arguments.width, depth=arguments.depth)
    load(training, arguments.checkpoint)
    expected = fingerprint(training.state_dict())

    seconds: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in WRITERS}
    for repeat in range(arguments.repeats):
        for name in WRITERS:
            path = str(arguments.scratch / name / str(repeat))
            state = {key: stateful.state_dict() for key, stateful in training.state_dict().items()}
            writer, reader = WRITERS[name](path), READERS[name](path)
            seconds[name]["save"].append(timed(partial(dcp.save, state, storage_writer=writer), device))
            fill_with_zeros(state)
            seconds[name]["load"].append(timed(partial(dcp.load, state, storage_reader=reader), device))
            assert fingerprint(state) == expected, f"{name} did not load what was saved"

    if dist.get_rank() == 0:
        setting = {"ranks": dist.get_world_size(), "repeats": arguments.repeats, "torch": torch.__version__}
        result = {**setting, **summarize(arguments.scratch, seconds)}
        arguments.output.write_text(json.dumps(result, indent=2))
        shutil.rmtree(arguments.scratch)
    end_distributed()


if __name__ == "__main__":
    main()
