"""What the pages of the documentation have in common."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dcp_nvcomp import CheckpointManager, NvcompReader, NvcompWriter
from dcp_nvcomp.options import option_names

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_says_everything_once(page: Path) -> None:
    """A merge may leave a page twice in itself, or a line of it."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert "** # " not in text
    sentences = [line for line in text.splitlines() if line.startswith("**")]
    assert len(sentences) == len(set(sentences))


def test_the_options_of_a_run_are_options() -> None:
    row = next(line for line in (ROOT / "docs/runs.md").read_text().splitlines() if line.startswith("| others"))
    known = {*option_names(NvcompWriter), *option_names(NvcompReader), *option_names(CheckpointManager), "endpoint_url"}
    assert set(re.findall(r"`(\w+)=`", row)) <= known
