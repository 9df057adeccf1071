"""Draws the panels of a report, side by side in one picture; one color for each contender through all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measuring import Spread
from benchmarks.results import Plot

__all__ = ["draw", "plots_of"]

# The same color for the same writer in every picture: ours are green, stock DCP's gray and blue.
COLORS = {
    "dcp_nvcomp": "#2e9e5b",
    "dcp_nvcomp by dcp.save": "#94cf7a",
    "dcp_nvcomp, first save": "#17663b",
    "dcp_nvcomp, copy": "#94cf7a",
    "dcp_nvcomp, encode": "#17663b",
    "dcp_nvcomp behind dcp": "#c9d98a",
    "manager": "#2e9e5b",
    "manager, fast tier: processes fail": "#94cf7a",
    "manager, fast tier, copies=1: nodes fail": "#17663b",
    "dcp": "#b8bec6",
    "dcp, kept stager": "#868e98",
    "dcp, process": "#4c5661",
    "dcp.save": "#b8bec6",
    "dcp.async_save": "#868e98",
    "dcp.async_save, kept stager": "#4c5661",
    "dcp+zstd": "#6f8fb5",
    "zipnn": "#d08c3c",
    "boto3": "#8d6cab",
    "torch_checkpointing": "#e0b23c",
}
OTHER_COLORS = ("#c2514e", "#3f7fbf", "#9aa23a", "#7a5c3e", "#4fb3a9", "#b0589d", "#555b66", "#20606b")


def plots_of(result: Mapping[str, Any]) -> list[Plot]:
    """Return the plots of a suite's results as JSON has them; those of older runs have none."""

    def points(series: Sequence[Any]) -> list[tuple[Any, Any]]:
        return [(x, Spread(tuple(y["values"])) if isinstance(y, dict) else y) for x, y in series]

    return [
        Plot(**{**plot, "series": {name: points(series) for name, series in plot["series"].items()}})
        for plot in result.get("plots", ())
    ]


def draw(plots: Sequence[Plot], machine: Mapping[str, Any], path: Path) -> None:
    """Write plots to `path`, a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(len(plots), 2 if len(plots) in (2, 4) else 3)
    lines = -(-len(plots) // columns)
    figure = plt.figure(figsize=(5.6 * columns, 4.2 * lines))
    in_last = len(plots) - (lines - 1) * columns  # fewer, and wider
    grid = figure.add_gridspec(lines, columns * in_last)
    for number, plot in enumerate(plots):
        line, column = divmod(number, columns)
        width = columns if line == lines - 1 else in_last
        _panel(figure.add_subplot(grid[line, column * width : (column + 1) * width]), plot)
    where = machine.get("gpu") or f"{machine['cores']} cores of an {machine['cpu']}"
    figure.text(0.01, 0.005, where, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(panel: Any, plot: Plot) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    places = list(dict.fromkeys(x for points in plot.series.values() for x, _ in points))
    bars = any(isinstance(x, str) for x in places)
    for number, (name, points) in enumerate(plot.series.items()):
        values = [y if isinstance(y, Spread) else Spread((y,)) for _, y in points]
        middle = [value.median for value in values]
        around = [[v.median - v.low for v in values], [v.high - v.median for v in values]]
        color = _color(name, number)
        if bars:
            width = 0.8 / len(plot.series)
            at = [places.index(x) + (number + 0.5) * width - 0.4 for x, _ in points]
            panel.bar(at, middle, width * 0.92, yerr=around, color=color, label=name, error_kw={"elinewidth": 0.8})
        else:
            panel.errorbar(
                [x for x, _ in points], middle, yerr=around, color=color, label=name, marker="o", markersize=4
            )
    if bars:
        slanted = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"} if len(places) > 4 else {}
        panel.set_xticks(range(len(places)), places, fontsize=7, **slanted)
    if plot.level is not None:
        panel.axhline(plot.level, color="#c2514e", linewidth=0.8, linestyle="--")
    if plot.log_x and not bars:
        panel.set_xscale("log", base=2)
        panel.set_xticks(places, [_tick(place) for place in places], fontsize=8)
        panel.minorticks_off()
    if plot.log_y:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        low, high = panel.get_ylim()
        room = 1 + 0.06 * len(plot.series) if bars and len(plot.series) > 1 else 1  # for the legend
        panel.set_ylim(min(low, 0) if bars else 0, high * room)
    panel.set_title(plot.title, fontsize=10)
    panel.set_xlabel(plot.x, fontsize=9)
    panel.set_ylabel(plot.y, fontsize=9)
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
    if len(plot.series) > 1:
        panel.legend(fontsize=7, loc="upper left" if bars else "best")


def _tick(value: float) -> str:
    from matplotlib.ticker import EngFormatter

    return f"{value:g}" if value < 10_000 else EngFormatter(places=0)(value)


def _color(name: str, number: int) -> str:
    return COLORS.get(name, OTHER_COLORS[number % len(OTHER_COLORS)])
