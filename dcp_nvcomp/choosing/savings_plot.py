"""A picture of what codecs save: bars by job, dollars a month."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dcp_nvcomp.choosing.savings import Savings
from dcp_nvcomp.errors import ConfigurationError

_COLORS = ("#b8bec6", "#6f8fb5", "#d08c3c", "#2e9e5b", "#8d6cab")


def draw_savings(rows: Sequence[Savings], path: str | os.PathLike[str]) -> None:
    """Write a picture."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ConfigurationError("A picture needs matplotlib: pip install 'dcp-nvcomp[plot]'.") from error
    jobs = list(dict.fromkeys((row.job.name, row.job.gpus) for row in rows))
    codecs = list(dict.fromkeys(row.codec.name for row in rows))
    figure = Figure(figsize=(1.5 * len(jobs) + 4, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(codecs)
    for number, codec in enumerate(codecs):
        totals = {(row.job.name, row.job.gpus): row.total for row in rows if row.codec.name == codec}
        places = [at - 0.4 + (number + 0.5) * width for at in range(len(jobs))]
        bars = axes.bar(
            places, [totals[job] for job in jobs], width * 0.95, label=codec, color=_COLORS[number % len(_COLORS)]
        )
        axes.bar_label(bars, [dollars(totals[job]) for job in jobs], fontsize=7, rotation=90, padding=3)
    axes.axhline(0, color="#555555", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=100)  # jobs differ by a factor of a thousand, and a codec may cost
    axes.margins(y=0.25)
    axes.set_xticks(range(len(jobs)), [f"{name}\n{gpus} GPUs" for name, gpus in jobs], fontsize=8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: dollars(value)))
    axes.set_ylabel("savings a month (logarithmic)")
    axes.set_title("What compressed checkpoints save", fontsize=10)
    axes.legend(fontsize=7, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=130)
    except (ValueError, OSError) as error:
        raise ConfigurationError(f"The picture {os.fspath(path)!r} can't be written: {error}") from error


def dollars(value: float) -> str:
    """Return an amount as people read it."""
    sign, size = "-" if value < 0 else "", abs(value)
    if size >= 1e6:
        return f"{sign}${size / 1e6:.3g}M"
    return f"{sign}${size / 1e3:.3g}k" if size >= 1e3 else f"{sign}${size:.0f}"
