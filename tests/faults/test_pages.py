"""docs/reliability.md says what was measured."""

from __future__ import annotations

import json

from tests.faults import pages


def test_page_is_up_to_date() -> None:
    text = pages.PAGE.read_text()
    assert pages.filled(text) == text, "run python -m tests.faults.pages"


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
