"""The demo: train on 4 ranks, crash, resume on 2 ranks, compare with stock DCP. Run it with `make demo`.

    python examples/demo.py --output demo-out

What it shows, and stops with an error if it is not so:
1. The state loaded on 2 ranks is, bit for bit, the state saved on 4.
2. The loss goes on from there. (Not to the last bit: two ranks add up the gradients in another order than four.)
3. The size of each part of the state on disk, compared with stock DCP and stock DCP with its zstd extension.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from demo_report import draw, markdown_table, print_table

EXAMPLES = Path(__file__).parent
SAVE_RANKS, RESUME_RANKS = 4, 2
LOSS_TOLERANCE = 0.02


def torchrun(ranks: int, script: str, *arguments: str, killed: bool = False) -> None:
    """Runs an example under torchrun; with `killed`, it must be killed half-way."""
    command = ["--standalone", "--nproc-per-node", str(ranks), str(EXAMPLES / script), *arguments]
    print("\n$ torchrun", *command, flush=True)
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}  # whatever the host's name resolves to
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        env={"OMP_NUM_THREADS": "1", **loopback, **os.environ},
        stderr=subprocess.PIPE if killed else None,
        text=True,
    )
    if killed and done.returncode and "SIGKILL" in done.stderr:
        print("all ranks killed (SIGKILL)")
    elif killed or done.returncode:
        sys.exit(f"{script} ended with {done.returncode}, which was not planned\n{done.stderr or ''}")


def read_record(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(record: list[dict[str, Any]]) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in record if "loss" in line}


def check_state(first: list[dict[str, Any]], second: list[dict[str, Any]], step: int) -> None:
    (saved,) = (line["saved"] for line in first if "saved" in line and line["step"] == step)
    (loaded,) = (line["loaded"] for line in second if "loaded" in line)
    different = [name for name in saved.keys() | loaded.keys() if saved.get(name) != loaded.get(name)]
    if different:
        sys.exit(f"the loaded state differs from the saved one in {different}")
    print(f"\nThe state loaded on {RESUME_RANKS} ranks is bit-identical to the one saved on {SAVE_RANKS}:", end=" ")
    print(f"{len(saved)} values, full tensors compared by SHA-256.")


def check_losses(uninterrupted: dict[int, float], resumed: dict[int, float]) -> None:
    print(f"\n step   {SAVE_RANKS} ranks, not interrupted   {RESUME_RANKS} ranks, resumed   difference")
    for step in list(resumed)[:: max(1, len(resumed) // 8)]:
        difference = resumed[step] - uninterrupted[step]
        print(f"{step:5d}   {uninterrupted[step]:24.5f}   {resumed[step]:16.5f}   {difference:+.5f}")
    worst = max(abs(resumed[step] - uninterrupted[step]) for step in resumed)
    if worst > LOSS_TOLERANCE:
        sys.exit(f"the losses drift apart by {worst:.4f}")
    print(f"The loss goes on from there: at most {worst:.5f} apart over {len(resumed)} steps.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo-out"))
    parser.add_argument("--save-at", type=int, default=200, help="the last step saved before the crash")
    parser.add_argument("--steps", type=int, default=240, help="the crash comes after this step")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="saves and loads by each writer in the comparison")
    arguments = parser.parse_args()
    start = time.perf_counter()
    output = arguments.output
    for leftover in ("checkpoints", "scratch"):
        shutil.rmtree(output / leftover, ignore_errors=True)
    output.mkdir(parents=True, exist_ok=True)
    shape = ["--width", str(arguments.width)]
    checkpoints = str(output / "checkpoints")
    first, second, compared_path = output / "first.jsonl", output / "second.jsonl", output / "compared.json"
    for record in (first, second, compared_path):
        record.unlink(missing_ok=True)

    common = ["--checkpoints", checkpoints, "--steps", str(arguments.steps), *shape]
    saving = ["--save-every", str(arguments.save_at), "--die-at", str(arguments.steps)]
    torchrun(SAVE_RANKS, "train_fsdp.py", *common, *saving, "--record", str(first), killed=True)
    resuming = ["--save-every", str(arguments.steps), "--resume", str(arguments.save_at)]
    torchrun(RESUME_RANKS, "train_fsdp.py", *common, *resuming, "--record", str(second))
    check_state(read_record(first), read_record(second), arguments.save_at)
    uninterrupted, resumed = losses(read_record(first)), losses(read_record(second))
    check_losses(uninterrupted, resumed)

    comparing = ["--checkpoint", f"{checkpoints}/step-{arguments.save_at}", "--scratch", str(output / "scratch")]
    repeats = ["--repeats", str(arguments.repeats), "--output", str(compared_path)]
    torchrun(SAVE_RANKS, "demo_compare.py", *comparing, *repeats, *shape)
    compared = json.loads(compared_path.read_text())
    print_table(compared)
    (output / "table.md").write_text(markdown_table(compared))
    draw(compared, uninterrupted, resumed, arguments.save_at, output / "demo.png")
    print(f"\nThe picture: {output / 'demo.png'}. The whole took {time.perf_counter() - start:.0f} s.")


if __name__ == "__main__":
    main()
