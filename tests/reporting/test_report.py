"""The page of a save or load: what it says, of one rank and of many, and that it needs nothing else."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from dcp_nvcomp import ConfigurationError, SaveStats, StorageError, load, save, tools
from dcp_nvcomp.loading.job import LoadStats
from dcp_nvcomp.reporting import RankTimes, slowest_rank
from dcp_nvcomp.saving.stats import RankStats, Totals

from ..cli.checkpoints import run

STAGES = ("plan", "encode", "write")


class _Text(HTMLParser):
    """The text of a page by element, and what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag in ("td", "th", "dd", "p", "h1"):
            self.cells.append("")
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1]:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self.cells[-1] += data


def read(path: Path) -> _Text:
    found = _Text()
    found.feed(path.read_text(encoding="utf-8"))
    found.close()
    return found


def saved_stats(ranks: int, slow: int | None = None) -> SaveStats:
    """Return statistics of a save of equal ranks, one of which may be slow at writing."""
    parts = tuple(
        RankStats(rank, {"plan": 0.1, "encode": 2.0, "write": 9.0 if rank == slow else 3.0}, 4 * 10**9, 3 * 10**9)
        for rank in range(ranks)
    )
    components = {"model": {"planes-zstd": Totals(9, 3 * 10**9, 2 * 10**9)}, "<b>": {"zstd": Totals(1, 8, 4)}}
    by = {"planes-zstd": Totals(9, 4 * 10**9 * ranks, 3 * 10**9 * ranks)}
    seconds = {"plan": 0.1, "encode": 2.0, "write": 9.0, "commit": 0.2}
    return SaveStats(
        "run/<step>", "ab" * 16, by, by, seconds, 9.4, {"f": 3 * 10**9 * ranks}, 0, 0.0, 0, components, parts
    )


def test_a_real_save(tmp_path: Path) -> None:
    state = {"model": {"w": torch.randn(1 << 18)}, "optimizer": {"step": torch.ones(4)}, "note": "an object"}
    page = tmp_path / "report.html"
    stats: list[SaveStats] = []
    save(
        state,
        tmp_path / "a",
        no_dist=True,
        on_save=lambda found: (stats.append(found), tools.write_report(found, page))[0],
    )
    found = read(page)
    assert found.cells[0] == "Save" and found.cells[1] == str(tmp_path / "a")
    assert {*STAGES, "model", "optimizer", "top level", "planes-zstd"} <= set(found.cells)
    assert f"{stats[0].ratio:.3f}" in found.cells
    assert not any("slow" in cell for cell in found.cells)  # one rank alone is not slower than the others


def test_statistics_by_component_and_rank(tmp_path: Path) -> None:
    many = {f"n{number}": {"x": torch.full((3,), number)} for number in range(100)}
    state = {
        "model": {"w": torch.randn(1 << 18), "b": torch.ones(5)},
        "optimizer": {"m": torch.randn(1 << 16)},
        "step": 1,
        **many,
    }
    found = save(state, tmp_path, no_dist=True)
    sums = {name: sum(by_codec.values(), Totals()) for name, by_codec in found.by_component.items()}
    assert sums["model"].uncompressed_nbytes == (4 << 18) + 20 and sums["model"].records == 2
    assert sums["top level"].records == 1
    assert sums["optimizer"].uncompressed_nbytes == 4 << 16
    assert sum(sums.values(), Totals()).uncompressed_nbytes == found.uncompressed_nbytes
    assert sum(one.encoded_nbytes for one in sums.values()) == pytest.approx(found.encoded_nbytes, abs=len(many) + 8)
    assert len(sums) == 66 and "others" in sums  # names without a structure are not components for ever
    (rank,) = found.ranks
    assert rank.rank == 0 and set(rank.seconds) == set(STAGES)
    assert (rank.uncompressed_nbytes, rank.encoded_nbytes) == (found.uncompressed_nbytes, found.encoded_nbytes)
    assert json.loads(json.dumps(found.to_dict()))["ranks"][0]["rank"] == 0


def test_a_real_load(tmp_path: Path) -> None:
    state = {"w": torch.randn(1 << 20)}
    save(state, tmp_path / "a", no_dist=True)
    stats: list[LoadStats] = []
    load(state, tmp_path / "a", no_dist=True, on_load=stats.append)
    assert stats[0].rank == 0 and set(stats[0].stage_seconds) == {"fetch", "decode"}
    assert 0 < stats[0].stage_seconds["decode"] <= stats[0].seconds
    tools.write_report(stats, tmp_path / "report.html")
    found = read(tmp_path / "report.html")
    assert found.cells[0] == "Load" and {"fetch", "decode"} <= set(found.cells)


def test_who_was_slow(tmp_path: Path) -> None:
    tools.write_report(saved_stats(8, slow=5), tmp_path / "report.html")
    found = read(tmp_path / "report.html")
    (finding,) = [cell for cell in found.cells if "slowest" in cell]
    assert finding.startswith("Rank 5 was the slowest: 9.10 s, 6.00 s more than the median rank;")
    assert "it lost most in write (6.00 s" in finding
    tools.write_report(saved_stats(8), tmp_path / "report.html")
    assert "No rank was much slower than the others." in read(tmp_path / "report.html").cells


def test_a_rank_that_had_more_to_do() -> None:
    ranks = [
        RankTimes(rank, {"write": 1.0 + rank // 3}, 100 + 100 * (rank // 3), 50, 1.0 + rank // 3) for rank in range(4)
    ]
    found = slowest_rank(ranks)
    assert found is not None and found.startswith("Rank 3 was the slowest") and "with 2.0 times as many bytes" in found


def test_of_many_ranks_the_slowest_are_shown(tmp_path: Path) -> None:
    tools.write_report(saved_stats(1000, slow=77), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    cells = read(tmp_path / "report.html").cells
    assert "The 32 slowest of 1000 ranks:" in cells
    rows = re.findall(r"<tr><td>(\d+)</td>", text)
    assert len(rows) == 32 and rows[0] == "77"


def test_the_page_needs_nothing_else_and_runs_nothing(tmp_path: Path) -> None:
    tools.write_report(saved_stats(2), tmp_path / "report.html")
    text, found = (tmp_path / "report.html").read_text(), read(tmp_path / "report.html")
    assert found.links == [] and "url(" not in text and "@import" not in text
    assert not {"script", "link", "img", "iframe", "b>"} & set(found.tags)
    assert "run/<step>" in found.cells and "<b>" in found.cells  # as text


def test_a_gpu_that_was_wrong_is_said(tmp_path: Path) -> None:
    document = {**saved_stats(1).to_dict(), "recoded_blocks": 3, "stall_seconds": 0.5}
    tools.write_report(document, tmp_path / "report.html")
    cells = read(tmp_path / "report.html").cells
    assert any(cell.startswith("A GPU encoded 3 blocks") for cell in cells) and "500 ms" in cells


def test_what_is_no_statistics(tmp_path: Path) -> None:
    for wrong in ([], {}, {"save_id": "x"}, [saved_stats(1), saved_stats(1)]):
        with pytest.raises(ConfigurationError):
            tools.write_report(wrong, tmp_path / "report.html")
    with pytest.raises(StorageError, match="write the report"):
        tools.write_report(saved_stats(1), tmp_path / "nowhere" / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_the_command(tmp_path: Path) -> None:
    stats, page = tmp_path / "stats.json", tmp_path / "page.html"
    stats.write_text(json.dumps(saved_stats(3).to_dict()))
    status, output, _ = run("report", str(stats), "--output", str(page))
    assert status == 0 and str(page) in output and read(page).cells[0] == "Save"
    stats.write_text("{")
    status, _, error = run("report", str(stats), "--output", str(page))
    assert status == 2 and "is not a JSON document" in " ".join(error.replace("│", " ").split())
    stats.write_text("{}")
    status, _, error = run("report", str(stats), "--output", str(page))
    assert status == 1 and "LoadStats" in error


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    """As `os.fsdecode` makes of bytes that are not UTF-8: such a name can be written nowhere as it is."""
    stats: list[SaveStats] = []
    state = {"mod\udc80el.w": torch.ones(9), "mod<i>el.w": torch.ones(9)}
    save(state, tmp_path / "checkpoint", no_dist=True, on_save=stats.append)
    tools.write_report(stats[0], tmp_path / "report.html")
    cells = read(tmp_path / "report.html").cells
    assert "mod\\udc80el" in cells and "mod<i>el" in cells
