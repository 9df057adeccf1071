"""The demo's table, as text and as Markdown, and its picture.

python examples/demo_report.py demo-out     puts both into docs/performance/demo.md and docs/images, like `make figures`
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
from matplotlib import pyplot as plt

LABELS = {"dcp": "stock DCP", "dcp+zstd": "stock DCP+zstd", "dcp_nvcomp": "dcp_nvcomp"}
COLORS = {"dcp": "#b8bec6", "dcp+zstd": "#6f8fb5", "dcp_nvcomp": "#2e9e5b"}


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.{2 if nbytes > 1e6 else 3}f}"


def table_rows(compared: dict[str, Any]) -> list[list[str]]:
    """One row a component, then the whole directory, then the times."""
    plain = compared["uncompressed_nbytes"]
    writers = compared["writers"]

    def row(name: str, nbytes: int, sizes: list[int], codec: str) -> list[str]:
        cells = [f"{megabytes(size)} ({nbytes / size:.3f})" for size in sizes]
        return [name, megabytes(nbytes), *cells, codec]

    rows = [
        row(name, nbytes, [writer["encoded_nbytes"][name] for writer in writers.values()], compared["codecs"][name])
        for name, nbytes in plain.items()
    ]
    total = sum(plain.values())
    rows.append(row("all files", total, [writer["directory_nbytes"] for writer in writers.values()], ""))
    for action in ("save", "load"):
        rows.append([f"{action}, s", "", *(f"{writer[f'{action}_seconds']:.2f}" for writer in writers.values()), ""])
    return rows


def print_table(compared: dict[str, Any]) -> None:
    header = ["component", "MB", *(f"{LABELS[name]}, MB (ratio)" for name in compared["writers"]), "codec"]
    rows = table_rows(compared)
    table = Table(
        title=f"One state, {compared['ranks']} ranks, medians of {compared['repeats']} saves and loads each",
        title_justify="left",
    )
    for position, name in enumerate(header):
        table.add_column(name, justify="left" if position in (0, len(header) - 1) else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=max(120, Console().width)).print(table)


def markdown_table(compared: dict[str, Any]) -> str:
    header = ["component", "MB", *(f"{LABELS[name]}, MB (ratio)" for name in compared["writers"]), "codec"]
    alignment = ["---", *["---:"] * (len(header) - 2), "---"]
    return "".join(f"| {' | '.join(row)} |\n" for row in [header, alignment, *table_rows(compared)])


def draw_sizes(axes: plt.Axes, compared: dict[str, Any]) -> None:
    components = [name for name, nbytes in compared["uncompressed_nbytes"].items() if nbytes > 1e6]
    count = len(compared["writers"])
    for offset, (name, writer) in enumerate(compared["writers"].items()):
        sizes = [writer["encoded_nbytes"][component] / 1e6 for component in components]
        heights = [position + (offset - (count - 1) / 2) * 0.27 for position in range(len(components))]
        axes.barh(heights, sizes, height=0.25, color=COLORS[name], label=LABELS[name])
        for component, size, height in zip(components, sizes, heights, strict=True):
            ratio = compared["uncompressed_nbytes"][component] / 1e6 / size
            axes.text(size, height, f" {ratio:.2f}", va="center", fontsize=8, color="#333333")
    axes.set_yticks(range(len(components)), components)
    axes.invert_yaxis()
    axes.set_xlabel("MB stored (the figure: ratio)")
    axes.set_title("Bytes by component")
    axes.margins(x=0.12)


def draw_seconds(axes: plt.Axes, compared: dict[str, Any]) -> None:
    for offset, (name, writer) in enumerate(compared["writers"].items()):
        seconds = [writer["save_seconds"], writer["load_seconds"]]
        bars = axes.bar([position + (offset - 1) * 0.27 for position in range(2)], seconds, 0.25, color=COLORS[name])
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.set_xticks(range(2), ["save", "load"])
    axes.set_ylabel("seconds")
    axes.set_title(f"Time, {compared['ranks']} ranks")
    axes.margins(y=0.12)


def draw_losses(axes: plt.Axes, jobs: list[dict[int, float]], lost: list[tuple[int, str]]) -> None:
    labels = ("2 nodes, 4 ranks", "a fresh node, from its peer", "1 node, 2 ranks, from durable")
    styles = (("#b8bec6", 3.0), ("#6f8fb5", 2.0), ("#2e9e5b", 1.2))
    for losses, label, (color, width) in zip(jobs, labels, styles, strict=True):
        axes.plot(list(losses), list(losses.values()), color=color, linewidth=width, label=label)
    for step, what in lost:
        axes.axvline(step, color="#333333", linewidth=0.8, linestyle=":")
        place = {"xycoords": ("data", "axes fraction"), "rotation": 90, "ha": "right", "va": "top"}
        axes.annotate(f"{what}: back to {step}", (step, 0.6), fontsize=7, **place)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title("The loss goes on")
    axes.legend(frameon=False, fontsize=8, loc="upper right")


def draw(compared: dict[str, Any], jobs: list[dict[int, float]], lost: list[tuple[int, str]], path: Path) -> None:
    """Bytes, seconds and losses side by side, as a PNG."""
    figure, (sizes, seconds, losses) = plt.subplots(
        1, 3, figsize=(13, 4), width_ratios=[1.5, 1, 1.5], layout="constrained"
    )
    draw_sizes(sizes, compared)
    draw_seconds(seconds, compared)
    draw_losses(losses, jobs, lost)
    for axes in (sizes, seconds, losses):
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = sizes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def publish(output: Path, root: Path) -> None:
    """Puts a demo's table and picture into docs/performance/demo.md."""
    begin, end = "<!-- measured by make demo -->\n", "<!-- end -->"
    page = root / "docs" / "performance" / "demo.md"
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(end)[2]
    page.write_text(before + begin + (output / "table.md").read_text() + end + after)
    (root / "docs" / "images").mkdir(exist_ok=True)
    shutil.copy(output / "demo.png", root / "docs" / "images" / "demo.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="where the demo put its results: demo-out")
    publish(parser.parse_args().output, Path(__file__).parents[1])
