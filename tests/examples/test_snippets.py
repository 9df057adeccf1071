"""What README.md shows first runs as it is written, but for the place."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

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
