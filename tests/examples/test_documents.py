"""What README.md and CONTRIBUTING.md name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)", (ROOT / document).read_text())
    missing = [link for link in links if "://" not in link and not (ROOT / link).exists()]
    assert not missing


def test_the_layout_names_every_module() -> None:
    layout = (ROOT / "CONTRIBUTING.md").read_text()
    modules = {path.stem for path in (ROOT / "dcp_nvcomp").rglob("*.py")} - {"__init__"}
    assert not [name for name in sorted(modules) if not re.search(rf"\b{name}\b", layout)]


def test_the_layout_names_only_what_is_there() -> None:
    layout = (ROOT / "CONTRIBUTING.md").read_text().split("```")[3]
    names = re.findall(r"\b(\w+\.(?:py|cu))\b", layout)
    there = {path.name for folder in ("dcp_nvcomp", "tests") for path in (ROOT / folder).rglob("*")}
    assert not [name for name in names if name not in there]
