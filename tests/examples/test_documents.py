"""What README.md and CONTRIBUTING.md name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcp_nvcomp import errors

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
    ],
)
def test_links_lead_somewhere(document: str) -> None:
    page = ROOT / document
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_the_layout_names_every_room() -> None:
    layout = (ROOT / "CONTRIBUTING.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "dcp_nvcomp").rglob("__init__.py")}
    assert not [name for name in sorted(rooms) if not re.search(rf"\b{name}/", layout)]


def test_the_layout_names_only_what_is_there() -> None:
    layout = (ROOT / "CONTRIBUTING.md").read_text().split("## Layout")[1].split("## House rules")[0]
    names = re.findall(r"\b(\w+(?:\.py|\.cu|/))", layout)
    there = {path.name + "/" * path.is_dir() for path in ROOT.glob("*")}
    for folder in ("dcp_nvcomp", "tests", "docs"):
        there |= {path.name + "/" * path.is_dir() for path in (ROOT / folder).rglob("*")}
    assert len(names) > 20
    assert not [name for name in names if name not in there]


def test_every_error_is_explained() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = set(re.findall(r"^\| `(\w+Error)` \|", text, re.MULTILINE))
    assert explained == set(errors.__all__) - {"CheckpointError"}


def test_matrix_names_tests_that_exist() -> None:
    """Each row of the fault matrix says which test proves it."""
    text = (ROOT / "docs" / "reliability.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text))
    assert len({path for path, _ in named}) >= 10
    for path, function in named:
        source = (ROOT / path).read_text()
        assert not function or f"def {function}(" in source, f"{path}::{function}"
