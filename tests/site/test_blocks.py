"""Every block of Python in the documents runs as it is written, in the order of its page, but for the place.

A page's blocks share their names, as a reader's do. Places on S3 and in shared memory become directories; a block of
docs/storage.md that names another store runs there, with the options of a server for tests.
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torchdata.stateful_dataloader import StatefulDataLoader

import dcp_nvcomp

ROOT = Path(__file__).parents[2]
# Their pages are run by tests of their own, with the frameworks.
ELSEWHERE = {"frameworks": "tests/integrations"}
STORES = {"s3": "s3_store", "az": "azure_store", "gs": "gcs_store", "sftp": "sftp_store", "smb": "smb_store"}


def documents() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(page.relative_to(ROOT)) for page in pages if page.parent.name not in ELSEWHERE and blocks(page)]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 20)])

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers[0](values)  # type: ignore[no-any-return]


def names_of_a_reader() -> dict[str, Any]:
    """What a reader of the documents has before the first block."""
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        loader = StatefulDataLoader([1, 2, 3])

    def train_step() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    train_step()  # so that the optimizer has a state
    names = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "Model": Model}
    names |= {"state": {"model": model.state_dict()}, "progress": {"made": 0}, "train_step": train_step, "steps": 3}
    return names | {
        "torch": torch,
        "dcp": dcp,
        "NvcompReader": dcp_nvcomp.NvcompReader,
        "NvcompWriter": dcp_nvcomp.NvcompWriter,
    }


def run(code: str, page: str, names: dict[str, Any]) -> None:
    exec(compile(code, page, "exec"), names)


@pytest.mark.parametrize("document", [name for name in documents() if name != "docs/storage.md"])
def test_the_blocks_of_a_page(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = names_of_a_reader()
    names["path"] = str(tmp_path / "bucket" / "run" / "step-1000")
    dcp_nvcomp.save(names["state"], names["path"])
    for block in blocks(ROOT / document):
        code = block.replace("/dev/shm/", f"{tmp_path}/memory/")
        if "endpoint_url=" not in block:  # those only name an S3 server
            code = code.replace("s3://bucket", f"{tmp_path}/bucket")
        run(code, document, names)


@pytest.mark.parametrize("scheme", STORES)
def test_the_blocks_of_a_store(scheme: str, request: pytest.FixtureRequest) -> None:
    found = [block for block in blocks(ROOT / "docs" / "storage.md") if f'"{scheme}://' in block]
    assert found
    for block in found:
        url, options = request.getfixturevalue(STORES[scheme])
        code, count = re.subn(rf'"{scheme}://[^"]*"(, \w+=[^()]*)?\)', "url, **options)", block)
        assert count >= 1
        run(code, "docs/storage.md", {**names_of_a_reader(), "url": url, "options": options})


def test_no_block_of_a_store_is_left_out() -> None:
    for block in blocks(ROOT / "docs" / "storage.md"):
        assert any(f'"{scheme}://' in block for scheme in STORES), block


def test_what_the_readme_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```\n", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    snippet, printed = found.groups()
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "README.md", "exec"), {})  # the document's own code
    assert capsys.readouterr().out == printed


def test_the_notebook(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "inspect_checkpoint.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        run(cell, "inspect_checkpoint.ipynb", names)
    assert torch.equal(names["empty"][0].weight, names["model"][0].weight) and len(cells) >= 6
