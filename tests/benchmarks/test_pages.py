"""The documents say what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import headline, pages
from benchmarks.measuring import Settings, Spread
from benchmarks.results import Report


@pytest.mark.parametrize("path", pages.DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_up_to_date(path: Path) -> None:
    text = path.read_text()
    assert re.search("<!-- (results|headline|gpu|measured) ", text)
    assert pages.filled(text) == text, "run python -m benchmarks.pages"


def test_the_picture_is_up_to_date() -> None:
    with Image.open(pages.PICTURE) as picture:
        assert picture.info["Description"] == headline.headline_table(pages.RESULTS), "run python -m benchmarks.pages"
    assert pages.PICTURE.stat().st_size < 100_000


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    headline.draw_headline(pages.RESULTS, tmp_path / "headline.png")
    with Image.open(tmp_path / "headline.png") as picture:
        assert picture.size == (960, 672)


def test_what_is_slower_is_said() -> None:
    lines = headline.headline_table(pages.RESULTS).splitlines()[4:]
    factors = [float(line.split("|")[5].split()[0]) for line in lines]
    assert len(factors) == 7
    assert [": slower" in line for line in lines] == [factor < 1 for factor in factors]


def test_figures_are_of_one_state(tmp_path: Path) -> None:
    for name in ("cpu", "overlap", "s3"):
        text = (pages.RESULTS / f"{name}.json").read_text()
        (tmp_path / f"{name}.json").write_text(text.replace("537 MB", "536 MB") if name == "s3" else text)
    with pytest.raises(ValueError, match="different sizes: 536 MB, 537 MB"):
        headline.headline_table(tmp_path)


def test_results_are_of_real_runs() -> None:
    # kernels.json is what a compiler says, not a run
    found = sorted(path for path in pages.RESULTS.glob("*.json") if path.name != "kernels.json")
    assert found
    for path in found:
        result = json.loads(path.read_text())
        assert not result["quick"], path
        assert result["machine"]["cpu"] and result["date"] and result["versions"]["torch"]


def test_what_goes_into_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = Report("cpu", Settings())
    table = report.table("speed", "Speed of all", writer=("writer", ""), rate=("rate, MB/s", ".0f"), more=("more", "d"))
    table.add(writer="a", rate=Spread((3.0, 1.0, 2.0)), more=7)
    report.at_least("speed", 2.0, 1.5)
    report.at_most("size", 2.0, 1.5)
    report.notes.append("one is left out")
    report.write_json(tmp_path / "cpu.json")
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    places = ("results cpu/speed writer rate", "targets cpu", "machine cpu")
    text = "".join(f"before\n<!-- {place} -->\nold\n<!-- end -->\nafter\n" for place in places)
    filled = pages.filled(text)
    assert "old" not in filled and filled.count("before\n") == filled.count("after\n") == 3
    assert "Speed of all.\n\n| writer | rate, MB/s |\n| --- | ---: |\n| a | 2 (1-3) |\n" in filled
    assert "| speed | 2.000 | >= 1.5 | met |\n| size | 2.000 | <= 1.5 | **not met** |" in filled
    assert "One is left out." in filled
    assert pages.filled(filled) == filled


def test_a_suite_without_results_is_not_measured_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    for place in ("results cpu/speed", "targets cpu", "machine cpu"):
        assert pages.filled(f"<!-- {place} -->\nold\n<!-- end -->") == (
            f"<!-- {place} -->\nNot measured yet.\n<!-- end -->"
        )
