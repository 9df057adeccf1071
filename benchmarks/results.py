"""Results of a suite: tables, targets and plots, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring import Settings, Spread, invocation, machine, versions

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Check", "Plot", "Report", "Table"]

Row = dict[str, Any]


@dataclass
class Table:
    """Rows of named cells. A cell is text, a number, or a `Spread`, shown as its median and what lies around it.

    Attributes:
        name: its key in the JSON.
        title: what it shows, and where and with how many repeats.
        columns: cell name to column header, and how numbers are formatted; with a leading `~` only the median is shown.
        rows: the rows.
    """

    name: str
    title: str
    columns: Mapping[str, tuple[str, str]]
    rows: list[Row] = field(default_factory=list)

    def add(self, **cells: Any) -> Row:
        """Add a row."""
        self.rows.append(cells)
        return cells

    def texts(self) -> list[list[str]]:
        """The cells as they are shown."""
        return [
            [_text(row.get(name), style) for name, (_, style) in self.columns.items()]  #
            for row in self.rows
        ]


def _text(value: Any, style: str) -> str:
    if value is None:
        return ""
    if isinstance(value, Spread):
        if len(value.values) == 1 or style.startswith("~"):
            return format(value.median, style.lstrip("~"))
        return f"{value.median:{style}} ({value.low:{style}}-{value.high:{style}})"
    return format(value, style) if isinstance(value, int | float) and style else str(value)


@dataclass(frozen=True)
class Check:
    """One target and what was measured.

    Attributes:
        what: the target in words.
        value: what was measured, the median where there are repeats.
        bound: what it must be.
        at_least: whether the bound is the least; otherwise the most.
    """

    what: str
    value: float
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.bound if self.at_least else self.value <= self.bound

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'met    ' if self.met else 'NOT met'} {self.what}: {self.value:.3f} {sign} {self.bound:.3f}"


@dataclass(frozen=True)
class Plot:
    """One panel of the picture.

    Attributes:
        title: what it shows.
        x: label of the horizontal axis.
        y: label of the vertical axis.
        series: name to points. A point's y is a number or a `Spread`; where x are words, bars are drawn.
        log_x: whether the horizontal axis is logarithmic.
        log_y: whether the vertical one is.
        level: where to draw a line across, for a target.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[tuple[Any, float | Spread]]]
    log_x: bool = False
    log_y: bool = False
    level: float | None = None


@dataclass
class Report:
    """All that a suite found."""

    suite: str
    settings: Settings
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(
        default_factory=lambda: {"machine": machine(), "versions": versions(), **invocation()}
    )

    def table(self, name: str, title: str, **columns: tuple[str, str]) -> Table:
        """Begin a table."""
        table = Table(name, title, columns)
        self.tables.append(table)
        return table

    def at_least(self, what: str, value: float, bound: float) -> None:
        """A target: no less than `bound`."""
        self.checks.append(Check(what, value, bound, True))

    def at_most(self, what: str, value: float, bound: float) -> None:
        """A target: no more than `bound`."""
        self.checks.append(Check(what, value, bound, False))

    def to_json(self) -> dict[str, Any]:
        """Everything, with all single measurements."""
        return {
            "suite": self.suite,
            "quick": self.settings.quick,
            **self.facts,
            "tables": {
                table.name: {"title": table.title, "columns": table.columns, "rows": table.rows}
                for table in self.tables
            },
            "checks": [
                {"what": c.what, "value": c.value, "at_least": c.at_least, "bound": c.bound, "met": c.met}
                for c in self.checks
            ],
            "plots": [
                {**vars(plot), "series": {name: list(s) for name, s in plot.series.items()}} for plot in self.plots
            ],
            "notes": self.notes,
        }

    def write_json(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1, default=_plain) + "\n")

    def show(self, console: Console) -> None:
        """Print it all."""
        from rich.table import Table as RichTable  # which a GPU host may lack

        about = self.facts["machine"]
        console.print(
            f"{self.suite}: {about['cpu']}, {about['cores']} cores, load before {about['load_before'][0]:.1f}"
            + (f", {about['gpu']}" if "gpu" in about else "")
        )
        for table in self.tables:
            shown = RichTable(title=table.title, title_justify="left")
            for header, style in table.columns.values():
                narrow = header.replace(", ", ",\n")
                shown.add_column(narrow, justify="right" if style else "left", no_wrap=True)
            for cells in table.texts():
                shown.add_row(*cells)
            console.print(shown)
        for note in self.notes:
            console.print(f"note: {note}", highlight=False)
        if self.checks:
            console.print("targets" + (" (a quick run's figures mean nothing)" if self.settings.quick else ""))
        for check in self.checks:
            console.print(f"  {check}", highlight=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Spread):
        return value.to_json()
    raise TypeError(f"{type(value).__name__} does not go into JSON")
