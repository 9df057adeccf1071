"""The demo: a run loses a node, then all of them, and goes on. Run it with `make demo`.

    python examples/demo.py --output demo-out

1. Two nodes of two ranks train. Each saves to its own memory, its peer has a copy, and now and then a checkpoint goes
   to the durable tier. The second node is killed, and its directory is deleted.
2. A fresh node takes its place: it gets from its peer what was lost. Then both are killed, and their directories are
   deleted.
3. One node with two ranks goes on from the durable tier.

What it shows, and stops with an error if it is not so: each state that was loaded is, bit for bit, the one that was
saved; the losses go on, on as many ranks to the last bit (two ranks add up gradients in another order than four); the
peer's copy and the durable tier were read when they had to be, and only then. At the end the size of each part of the
state on disk is compared with stock DCP and stock DCP with its zstd extension.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_report import draw, markdown_table, print_table

EXAMPLES = Path(__file__).parent
PER_NODE = 2
LOSS_TOLERANCE = 0.02


@dataclass(frozen=True)
class Node:
    """One node of a job: a torchrun of its own, as on a machine of its own.

    Attributes:
        fast: the directory that stands for its memory.
        dies_at: the step after which its ranks are killed.
    """

    fast: Path
    dies_at: int | None = None


def run_job(nodes: list[Node], run: Path, record: Path, arguments: list[str]) -> None:
    """Trains on some nodes, until the end or until one of them is killed, which ends the others too."""
    port = free_port()
    agents = []
    for number, node in enumerate(nodes):
        place = ["--nnodes", str(len(nodes)), "--node-rank", str(number), "--nproc-per-node", str(PER_NODE)]
        meet = ["--master-addr", "127.0.0.1", "--master-port", str(port), "--rdzv-id", "demo"]
        command = [*place, *meet, str(EXAMPLES / "train_fsdp.py"), "--checkpoints", str(run), "--fast", str(node.fast)]
        command += [*arguments, "--record", str(record)]
        command += [] if node.dies_at is None else ["--die-at", str(node.dies_at)]
        print(f"\n$ torchrun {' '.join(command)}", flush=True)
        agents.append(start(command, quiet=any(one.dies_at is not None for one in nodes)))
    codes = [agent.wait() for agent in agents]
    if any(node.dies_at is not None for node in nodes):
        if not all(codes):
            sys.exit(f"a node was to be killed, and the agents ended with {codes}")
        print(f"killed: node {', '.join(str(number) for number, node in enumerate(nodes) if node.dies_at is not None)}")
    elif any(codes):
        sys.exit(f"the job ended with {codes}")


def start(command: list[str], *, quiet: bool) -> subprocess.Popen[bytes]:
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # whatever the host's name resolves to
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env={"OMP_NUM_THREADS": "1", **loopback, **os.environ},
        stderr=subprocess.DEVNULL if quiet else None,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def torchrun(ranks: int, script: str, *arguments: str) -> None:
    """Runs an example under torchrun on one node."""
    command = ["--standalone", "--nproc-per-node", str(ranks), str(EXAMPLES / script), *arguments]
    print("\n$ torchrun", *command, flush=True)
    if code := start(command, quiet=False).wait():
        sys.exit(f"{script} ended with {code}, which was not planned")


def read_record(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(record: list[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in record if "loss" in line}


def restored_in(record: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (line for line in record if "loaded" in line)
    return found


def check_state(before: list[dict[str, Any]], after: list[dict[str, Any]], source: str) -> int:
    """Checks that what was loaded is what was saved, and where it came from; returns the step."""
    found = restored_in(after)
    saved = {line["step"]: line["saved"] for line in before if "saved" in line}[found["step"]]
    different = [name for name in saved.keys() | found["loaded"].keys() if saved.get(name) != found["loaded"].get(name)]
    different = [name for name in different if ".generators." not in name and not name.endswith(".ranks")]
    if different:
        sys.exit(f"the loaded state differs from the saved one in {different}")
    nbytes = {name: size for name, size in found["sources"].items() if size}
    allowed = {"own", source} if source == "peer" else {source}
    if source not in nbytes or not nbytes.keys() <= allowed:
        sys.exit(f"the state came from {nbytes}, not from {sorted(allowed)}")
    from_where = ", ".join(f"{size / 1e6:.1f} MB from {name}" for name, size in nbytes.items())
    print(f"\nStep {found['step']} was restored bit for bit: {len(saved)} values compared by SHA-256; {from_where}.")
    step: int = found["step"]
    return step


def check_losses(before: dict[int, float], after: dict[int, float], tolerance: float) -> None:
    """Checks that a job made the same losses as the one before it where both trained."""
    both = sorted(before.keys() & after.keys())
    worst = max((abs(after[step] - before[step]) for step in both), default=0.0)
    if worst > tolerance or not both:
        sys.exit(f"the losses drift apart by {worst:.4f} in {len(both)} steps that both jobs made")
    print(f"The loss goes on from there: in {len(both)} steps that both jobs made, at most {worst:.5f} apart.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo-out"))
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints in the durable tier")
    parser.add_argument("--fast-every", type=int, default=10, help="steps between checkpoints in the nodes' memory")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="saves and loads by each writer in the comparison")
    arguments = parser.parse_args()
    start_seconds = time.perf_counter()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    for leftover in ("run", "nodes", "scratch"):
        shutil.rmtree(output / leftover, ignore_errors=True)
    records = [output / f"{name}.jsonl" for name in ("first", "second", "third")]
    compared_path = output / "compared.json"
    for record in (*records, compared_path):
        record.unlink(missing_ok=True)

    run, node = output / "run", [output / "nodes" / name for name in "abcd"]
    every, fast_every = arguments.every, arguments.fast_every
    steps = 2 * every + 4 * fast_every
    shape = ["--width", str(arguments.width)]
    common = ["--steps", str(steps), "--every", str(every), "--fast-every", str(fast_every), "--copies", "1", *shape]
    half = fast_every // 2
    run_job([Node(node[0]), Node(node[1], every + 2 * fast_every + half)], run, records[0], common)
    shutil.rmtree(node[1])
    dies_at = 2 * every + fast_every + half
    run_job([Node(node[0], dies_at), Node(node[2], dies_at)], run, records[1], common)
    first, second = read_record(records[0]), read_record(records[1])
    check_state(first, second, "peer")
    check_losses(losses(first), losses(second), 0.0)
    shutil.rmtree(node[0])
    shutil.rmtree(node[2])
    run_job([Node(node[3])], run, records[2], common)
    third = read_record(records[2])
    step = check_state(second, third, "durable")
    check_losses(losses(second), losses(third), LOSS_TOLERANCE)

    comparing = ["--checkpoint", str(run / f"step-{step}"), "--scratch", str(output / "scratch")]
    repeats = ["--repeats", str(arguments.repeats), "--output", str(compared_path)]
    torchrun(2 * PER_NODE, "demo_compare.py", *comparing, *repeats, *shape)
    compared = json.loads(compared_path.read_text())
    print_table(compared)
    (output / "table.md").write_text(markdown_table(compared))
    lost = [(restored_in(record)["step"], name) for record, name in ((second, "a node lost"), (third, "all lost"))]
    draw(compared, [losses(record) for record in (first, second, third)], lost, output / "demo.png")
    seconds = time.perf_counter() - start_seconds
    print(f"\nThe picture: {output / 'demo.png'}. The whole took {seconds:.0f} s.")


if __name__ == "__main__":
    main()
