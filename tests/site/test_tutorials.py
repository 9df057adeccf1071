"""Programs of the first page and of tutorials are saved as their titles say; commands print what their page says.

`...` in a page stands for any text, as in doctest; runs of spaces are one. The last digit of a decimal fraction may
differ by one, as with pytest's `NUMBER`: what training computes, and so what it compresses to, depends on the CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "index.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
_FRACTION = re.compile(r"(?<![\d.])\d+\.\d+(?!\d|\.\d)")
_BLOCK = re.compile(r'^```(python title="(?P<file>[^"]+)"|console)\n(?P<text>.*?)^```', re.DOTALL | re.MULTILINE)


def _decimals(figure: str) -> int:
    return len(figure.partition(".")[2])


def _fits(printed: str, page: str) -> bool:
    """Whether a page's text describes what was printed."""
    parts = re.split(rf"(\.{{3}}|\s+|{_FRACTION.pattern})", page.strip())

    def pattern(part: str) -> str:
        if part == "...":
            return ".*?"
        if part.isspace():
            return r"\s+"
        return rf"(\d+\.\d{{{_decimals(part)}}})" if _FRACTION.fullmatch(part) else re.escape(part)

    match = re.fullmatch("".join(map(pattern, parts)), printed.strip(), re.DOTALL)
    expected = _FRACTION.findall(page)
    return match is not None and all(
        abs(Decimal(found) - Decimal(figure)) <= Decimal(1).scaleb(-_decimals(figure))
        for found, figure in zip(match.groups(), expected, strict=True)
    )


@pytest.mark.ci
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_what_it_says(page: Path, tmp_path: Path, s3_store: tuple[str, dict[str, str]]) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    url, options = s3_store
    for variable, option in (
        ("ENDPOINT_URL", "endpoint_url"),
        ("ACCESS_KEY_ID", "key"),
        ("SECRET_ACCESS_KEY", "secret"),
    ):
        environment[f"AWS_{variable}"] = options[option]

    def at(text: str) -> str:
        """What a reader's own bucket is called here."""
        return text.replace("s3://bucket", url.rpartition("/")[0])

    for block in _BLOCK.finditer(page.read_text()):
        if block["file"]:
            (tmp_path / block["file"]).write_text(at(block["text"]))
            continue
        for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block["text"], re.MULTILINE):
            ran = subprocess.run(
                at(command), shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
            )
            assert _fits(ran.stdout, at(printed)), f"{page.name}: {command}\n{ran.stdout}\n{ran.stderr}"
