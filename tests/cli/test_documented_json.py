"""What `--json` prints has the fields that docs/commands.md says, no others, and is JSON as the standard has it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import CheckpointManager, save
from tests.checkpoints import data_file, flip

from .checkpoints import make_old, new_id, run

ROOT = Path(__file__).parents[2]
TABLE_ROW = re.compile(r"^\| (`[^|]*`) \| ([^|]*) \|", re.MULTILINE)
SUMS = {"shards", "uncompressed_nbytes", "encoded_nbytes", "ratio"}
# whose fields are names
OPEN = {"shared", "failed", "versions", "kernels", "by_dtype", "by_codec", "statistics", "value", "steps[].metrics"}
KINDS: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}


def _documented(command: str) -> dict[str, str]:
    """Return the types by field, of all tables of a command's section."""
    section = (ROOT / "docs" / "commands.md").read_text().split(f"\n### {command}\n")[1].split("\n### ")[0]
    return {field: kinds for names, kinds in TABLE_ROW.findall(section) for field in re.findall(r"`([^`]+)`", names)}


def _fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if path and not path.endswith("[]"):
        yield path, value
    if isinstance(value, dict) and path not in OPEN:
        for name, one in value.items():
            if name != "schema":
                yield from _fields(one, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for one in value:
            if isinstance(one, dict):
                yield from _fields(one, f"{path}[]")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with what each command has something to say about; each has its own part."""
    path = tmp_path_factory.mktemp("documented")
    state = {"w": torch.arange(20_000.0), "small": torch.ones(3), "step": 1, "odd": {"loss": float("nan")}}
    for name in ("step-1", "broken", "lost", "corrupt"):
        save(state, path / name, no_dist=True)
    flip(data_file(path / "broken"), 100)
    (path / "lost" / ".metadata").unlink()
    (path / "corrupt" / ".metadata").write_bytes(b"no metadata")
    state["w"][7] = torch.inf
    save({**state, "step": 2}, path / "step-2", no_dist=True)
    with CheckpointManager(path / "run", every=1) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.zeros(3)}, metrics={"loss": float("nan")})
    for name, reference in (("a", ()), ("b", path / "shares" / "a"), ("c", path / "shares" / "a")):
        save({"w": torch.zeros(200, 200)}, path / "shares" / name, no_dist=True, reference=reference)
    (path / "run" / "step-2" / ".removing").mkdir()  # so that step 2 can't be removed
    (path / "step-1" / f"__0_0_{new_id()}.distcp").write_bytes(b"x")  # of a save that died
    make_old(*(path / "step-1").iterdir())
    return path


COMMANDS = {
    "ls": ("ls {}",),
    "inspect": ("inspect {}/step-1", "inspect {}/shares/c"),
    "cat": ("cat {}/step-1 w[3:5]", "cat {}/step-2 w[7]", "cat {}/step-1 step", "cat {}/step-1 odd.loss"),
    "diff": ("diff {}/step-1 {}/step-2",),
    "convert": ("convert {}/step-1 {}/converted --to dcp",),
    "verify": ("verify {}/step-1", "verify {}/broken"),
    "recover": ("recover {}/lost", "recover {}/step-1"),
    "consolidate": ("consolidate {}/shares/b",),
    "clean": ("clean {}/step-1 --dry-run", "clean {} --recursive --dry-run"),
    "prune": ("prune {}/run --keep-last 2 --dry-run", "prune {}/run --keep-last 1"),
    "bench": ("bench {} --seconds 0.01 --state 1GB",),
    "advise": ("advise {}/step-1 --seconds 0.01",),
    "savings": ("savings", "savings --checkpoint 840GB"),
    "info": ("info",),
}


def test_each_command_is_described() -> None:
    text = (ROOT / "docs" / "commands.md").read_text().split("\n## JSON\n")[1]
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == list(COMMANDS)


@pytest.mark.ci
@pytest.mark.parametrize("command", COMMANDS)
def test_fields_are_those_of_the_docs(checkpoints: Path, command: str) -> None:
    documented, seen = _documented(command), set()
    for line in COMMANDS[command]:
        _, output, _ = run(*(word.replace("{}", str(checkpoints)) for word in line.split()), "--json")
        document = json.loads(output, parse_constant=pytest.fail)
        assert document.pop("schema") == 1
        for field, value in _fields(document):
            name = _name(command, field)
            assert name in documented, f"{command}: {field} is not described"
            assert documented[name] == "any" or _kind(value) in documented[name], (
                f"{command}: {field} is {value!r}, not {documented[name]}"
            )
            seen.add(name)
    assert documented.keys() == seen


def _name(command: str, field: str) -> str:
    """Return how the docs call a field: documents within a document, and sums, are described once."""
    last = field.rpartition(".")[2]
    if command == "inspect" and last in SUMS and field != "totals.ratio":
        return last
    return field.removeprefix("checkpoints[].")


def _kind(value: Any) -> str:
    return "null" if value is None else KINDS[type(value)]
