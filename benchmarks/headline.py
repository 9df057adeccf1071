"""The figures that README.md and docs/index.md begin with, as a table and as a picture, made of the committed results.

`python -m benchmarks.pages` makes both. What is slower than with stock DCP is among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measuring import Spread, paired
from benchmarks.plots import COLORS

__all__ = ["draw_headline", "headline_gains", "headline_machine", "headline_table", "headline_worst"]

# As the results name them, and as people do.
WRITERS = {"dcp": "stock DCP", "dcp+zstd": "stock DCP + zstd", "dcp_nvcomp": "dcp_nvcomp"}
# A suite's table and a column of it.
SOURCES = {
    "stored": ("s3/s3", "stored"),
    "save, 500 MB/s link": ("overlap/target", "save_seconds"),
    "load, 500 MB/s link": ("overlap/target", "load_seconds"),
    "save, S3 server": ("s3/s3", "save_seconds"),
    "load, S3 server": ("s3/s3", "load_seconds"),
    "save, memory": ("cpu/checkpoints", "save_seconds"),
    "load, memory": ("cpu/checkpoints", "load_seconds"),
}
DRAWN = ("stored", "save, 500 MB/s link", "save, S3 server", "save, memory")
THREADS = 2


@dataclass(frozen=True)
class Figure:
    """One thing that was measured of all writers."""

    what: str
    values: Mapping[str, Spread]

    @property
    def unit(self) -> str:
        return "MB" if self.what == "stored" else "seconds"

    def text(self, writer: str) -> str:
        return f"{self.values[writer].median:{'.0f' if self.unit == 'MB' else '.2f'}}"

    def gain(self) -> str:
        factor = paired(self.values["dcp"], self.values["dcp_nvcomp"]).median
        if self.unit == "MB":
            return f"{factor:.2f} x smaller"
        return f"{factor:.2f} x as fast" + (": slower" if factor < 1 else "")


def figures(results: Path) -> list[Figure]:
    """Read all figures."""
    return [_figure(_result(results, table), table, what, column) for what, (table, column) in SOURCES.items()]


def _figure(result: Mapping[str, Any], table: str, what: str, column: str) -> Figure:
    rows = result["tables"][table.partition("/")[2]]["rows"]
    cells = {row["writer"]: row[column] for row in rows if row.get("threads", THREADS) == THREADS}
    return Figure(what, {writer: _spread(cells[writer]) for writer in WRITERS})


def _spread(cell: Any) -> Spread:
    return Spread(tuple(cell["values"])) if isinstance(cell, dict) else Spread((cell,))


def _result(results: Path, table: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / f"{table.partition('/')[0]}.json").read_text())
    return found


def headline_table(results: Path) -> str:
    """Return the figures as Markdown.

    Raises:
        ValueError: they are of states of different sizes.
    """
    titles = (_result(results, table)["tables"][table.partition("/")[2]]["title"] for table, _ in SOURCES.values())
    sizes = {re.findall(r"\d+ MB", title)[0] for title in titles}
    if len(sizes) != 1:
        raise ValueError(f"the results are of states of different sizes: {', '.join(sorted(sizes))}")
    lines = [["", *WRITERS.values(), "beside stock DCP"], ["---", *["---:"] * len(WRITERS), "---"]]
    for figure in figures(results):
        lines.append([f"{figure.what}, {figure.unit}", *(figure.text(writer) for writer in WRITERS), figure.gain()])
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    head = f"Saves and loads of {sizes.pop()}, {THREADS} threads: medians, and the median of the ratios of repeats."
    return f"{head}\n\n{table}"


def headline_gains(results: Path) -> str:
    """Return three gains, as a list."""
    found = {figure.what: figure.gain() for figure in figures(results)}
    link = "over a link of 500 MB/s"
    lines = (
        f"**{found['stored']}** than stock DCP",
        f"**{found['save, 500 MB/s link']}** to save {link}",
        f"**{found['load, S3 server']}** to load from an S3 server",
    )
    return "\n".join(f"- {line}" for line in lines)


def headline_machine(results: Path) -> str:
    """Return when and where the figures were measured, as a sentence."""
    tables = dict.fromkeys(table for table, _ in SOURCES.values())
    found = [_result(results, table) for table in tables]
    dates = sorted(result["date"][:10] for result in found)
    machines = sorted({_machine(result) for result in found})
    suites = ", ".join(table.partition("/")[0] for table in tables)
    return (
        f"Medians, measured between {dates[0]} and {dates[-1]} on {' and '.join(machines)} "
        f"(`python -m benchmarks`: {suites})."
    )


def _machine(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    return (
        f"{machine['cores']} cores of an {machine['cpu']} with {machine['memory_nbytes'] / 2**30:.0f} GiB of memory, "
        f"{machine.get('gpu', 'no GPU')} and torch {result['versions']['torch']}"
    )


def headline_worst(results: Path) -> str:
    """Return the save that is slowest beside stock DCP's, as a sentence."""
    rows = _result(results, "tensors")["tables"]["checkpoints"]["rows"]
    ours = [row for row in rows if row["writer"].startswith("dcp_nvcomp")]
    worst = min(ours, key=lambda row: _spread(row["save_over_dcp"]).median)
    label = worst["writer"].removeprefix("dcp_nvcomp").strip(", ") or "later saves"
    return (
        f"The slowest save in memory beside stock DCP that was measured ({worst['state']} tensors, {label}) is "
        f"{_spread(worst['save_over_dcp']).median:.2f} x as fast."
    )


def draw_headline(results: Path, path: Path) -> None:
    """Draw some of the figures into a PNG, which keeps the table of all as its description."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    drawn = [figure for figure in figures(results) if figure.what in DRAWN]
    picture, axes = plt.subplots(2, 2, figsize=(8, 5.6), sharey=True, layout="constrained")
    axes.flat[0].invert_yaxis()
    for panel, figure in zip(axes.flat, drawn, strict=True):
        _panel(panel, figure)
    picture.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    picture.savefig(path, dpi=120, metadata={"Description": headline_table(results)})
    plt.close(picture)


def _panel(panel: Any, figure: Figure) -> None:
    medians = [figure.values[writer].median for writer in WRITERS]
    bars = panel.barh(list(WRITERS.values()), medians, color=[COLORS[writer] for writer in WRITERS])
    panel.bar_label(bars, [figure.text(writer) for writer in WRITERS], padding=4, fontsize=15)
    panel.set_title(figure.what, fontsize=17, loc="left")
    panel.set_xlabel(figure.unit, fontsize=14)
    panel.set_xlim(0, max(medians) * 1.25)
    panel.locator_params(axis="x", nbins=4)
    panel.tick_params(axis="x", labelsize=13)
    panel.tick_params(axis="y", labelsize=15, length=0)
    panel.spines[["top", "right"]].set_visible(False)
