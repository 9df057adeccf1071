"""What README.md, CONTRIBUTING.md and the pages of the documentation say is so, and is said once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcp_nvcomp import CheckpointManager, NvcompReader, NvcompWriter, errors
from dcp_nvcomp.options import option_names

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_everything_once_and_its_links_lead_somewhere(page: Path) -> None:
    """A merge may leave a page twice in itself, or a line of it."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert "** # " not in text
    sentences = [line for line in text.splitlines() if line.startswith("**")]
    assert len(sentences) == len(set(sentences))


def test_the_options_of_a_run_are_options() -> None:
    row = next(line for line in (ROOT / "docs/runs.md").read_text().splitlines() if line.startswith("| others"))
    known = {*option_names(NvcompWriter), *option_names(NvcompReader), *option_names(CheckpointManager), "endpoint_url"}
    assert set(re.findall(r"`(\w+)=`", row)) <= known


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
    text = (ROOT / "docs" / "reliability" / "faults.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text))
    assert len({path for path, _ in named}) >= 10
    for path, function in named:
        source = (ROOT / path).read_text()
        assert not function or f"def {function}(" in source, f"{path}::{function}"
