"""What the documents show runs as it is written, but for the place."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader
from typer.testing import CliRunner

from dcp_nvcomp.cli.app import app

README = Path(__file__).parents[2] / "README.md"


def test_what_the_readme_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The snippet and the command after it print what stands there, numbers to within a hundredth."""
    pattern = r"```python\n(.*?)```\n\n```\n(.*?)```\n\n`(.*?)` prints:\n\n```\n(.*?)```"
    found = re.search(pattern, README.read_text(), re.DOTALL)
    assert found is not None
    snippet, printed, command, table = found.groups()
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    exec(compile(snippet, "README.md", "exec"), {})  # the document's own code
    assert capsys.readouterr().out == printed
    assert command.startswith("dcp-nvcomp ")
    done = CliRunner().invoke(app, command.split()[1:], env={"COLUMNS": "120"})
    assert done.exit_code == 0
    for line, expected in zip(done.stdout.splitlines(), table.splitlines(), strict=True):
        for word, other in zip(line.split(), expected.split(), strict=True):
            try:
                assert float(word) == pytest.approx(float(other), rel=0.01)
            except ValueError:
                assert word == other


def test_the_snippet_of_a_run(tmp_path: Path) -> None:
    page = README.parent / "docs" / "runs.md"
    snippets = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (snippet,) = (one for one in snippets if "CheckpointManager(" in one)
    code = snippet.replace("s3://bucket/run-7", str(tmp_path / "run"))
    code = code.replace("/dev/shm/alice/run-7", str(tmp_path / "fast"))
    code = code.replace("every=1000", "every=4").replace("fast_every=50", "fast_every=2")

    def job(steps: int) -> dict[str, Any]:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            loader = StatefulDataLoader([1, 2, 3])
        progress = {"made": 0}

        def train_step() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            return loss.item()

        names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "progress": progress}
        names |= {"train_step": train_step, "steps": steps}
        exec(compile(code, str(page), "exec"), names)  # the document's own code
        return names

    assert job(10)["restored"] is None
    again = job(12)
    assert again["restored"].step == 9 and again["step"] == 11, "what training ends with is saved"
    assert {path.name for path in (tmp_path / "run").glob("step-*")} >= {"step-8", "step-9", "step-11"}
