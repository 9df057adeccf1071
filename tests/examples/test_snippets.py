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

README = Path(__file__).parents[2] / "README.md"
PLACE = "s3://bucket/run/step-1000"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 20)])


def test_the_first_snippet(tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert found is not None
    snippet = found[1]
    assert snippet.count(PLACE) == 3 and len(snippet.splitlines()) <= 10
    saved = Model()
    with torch.device("meta"):
        model = Model()
    state = {"model": saved.state_dict()}
    code = snippet.replace(PLACE, str(tmp_path / "step"))
    exec(compile(code, "README.md", "exec"), {"state": state, "model": model})  # the document's own code
    assert torch.equal(model.layers[0].weight, saved.layers[0].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [README, README.parent / "docs" / "runs.md"])
def test_the_snippet_of_a_run(page: Path, tmp_path: Path) -> None:
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
