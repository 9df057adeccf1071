"""docs/reliability.md and its page of faults say what was measured."""

from __future__ import annotations

import json

import pytest

from tests.faults import pages


@pytest.mark.parametrize("page", pages.PLACES)
def test_page_is_up_to_date(page: str) -> None:
    assert pages.filled(page) == (pages.DOCS / page).read_text(), "run python -m tests.faults.pages"


def test_the_picture_is_of_what_was_measured() -> None:
    from PIL import Image

    with Image.open(pages.PICTURE) as picture:
        assert f"<!-- tried -->\n{picture.text['Description']}\n" in (pages.DOCS / "reliability.md").read_text()


def test_results_are_of_whole_runs() -> None:
    assert json.loads((pages.TESTS / "faults/damage.json").read_text())["every"] == 1
    fuzz = json.loads((pages.TESTS / "faults/fuzz/results.json").read_text())
    assert fuzz["executions"] >= 1_000_000 and fuzz["findings"] == 0
    soaks = [json.loads((pages.TESTS / f"soak/results/{name}.json").read_text()) for name in ("disk", "s3")]
    assert [soak["place"] for soak in soaks] == ["disk", "s3"]
    assert all(soak["faults"] and soak["seconds"] >= 1800 and "lie" not in soak for soak in soaks)
    jobs = json.loads((pages.TESTS / "soak/results/operator.json").read_text())
    assert len({soak["seed"] for soak in jobs}) == 3 and sum(soak["seconds"] for soak in jobs) >= 3600
    assert all(soak["place"] == "operator" and soak["faults"] and not soak["findings"] for soak in jobs)
