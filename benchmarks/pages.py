"""Puts measured tables into the documents, so that what they say is what was measured.

    python -m benchmarks.pages            after results in benchmarks/results/ changed

A document says where: a line `<!-- results SUITE/TABLE [COLUMN ...] -->` begins what is replaced, up to `<!-- end -->`.
`<!-- machine SUITE -->` stands for a sentence on machine, date and command, and `<!-- targets SUITE -->` for the list
of the suite's targets; of a suite without results they say so. `<!-- gpu section -->` is all that is known of GPUs,
from results/gpu-acceptance.json, and `<!-- gpu summary -->` a sentence on it; see gpu_pages.py. `<!-- gpu traffic -->`
is counted, see gpu_traffic.py, and `<!-- gpu model -->` computed, see gpu_model.py. `<!-- summary performance -->` is
what the suites found, see summary.py. `<!-- headline gains -->`, `table`, `worst` and `machine` are what is on the
first pages, and docs/images/headline.png is drawn anew; see headline.py.
tests/benchmarks/test_pages.py checks that the documents are up to date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_model import gpu_model
from benchmarks.gpu_pages import gpu_section, gpu_summary
from benchmarks.gpu_traffic import gpu_traffic
from benchmarks.headline import draw_headline, headline_gains, headline_machine, headline_table, headline_worst
from benchmarks.measuring import Spread
from benchmarks.plots import draw, plots_of
from benchmarks.results import Table
from benchmarks.summary import performance_summary

__all__ = ["DOCUMENTS", "PICTURE", "filled", "main"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / name for name in ("index.md", "performance.md", "codecs.md", "storage.md", "guides/choosing.md")),
    *sorted((ROOT / "docs" / "performance").glob("*.md")),  # demo.md is filled by examples/demo_report.py
)
PICTURE = ROOT / "docs" / "images" / "headline.png"
_HEADLINES = {
    "gains": headline_gains,
    "table": headline_table,
    "worst": headline_worst,
    "machine": headline_machine,
}
_PLACE = re.compile(
    r"<!-- (results|machine|targets|gpu|headline|summary) (\S+)([^\n]*?) -->\n.*?<!-- end -->", re.DOTALL
)


def filled(text: str) -> str:
    """A document's text with all its places filled from the results.

    Raises:
        ValueError: the results of the GPU are not of a GPU.
        KeyError: a suite's results have no such table.
    """
    fillers: dict[str, Callable[[str, Sequence[str]], str]] = {
        "results": _table,
        "machine": lambda suite, _: _sentence(_result(suite)),
        "targets": lambda suite, _: _targets(_result(suite)),
        "gpu": lambda part, _: _gpu(part),
        "headline": lambda part, _: _HEADLINES[part](RESULTS),
        "summary": lambda part, _: performance_summary(RESULTS),
    }

    def fill(place: re.Match[str]) -> str:
        kind, what, more = place.groups()
        if kind not in ("gpu", "headline", "summary") and not (RESULTS / f"{what.partition('/')[0]}.json").exists():
            return f"<!-- {kind} {what}{more} -->\nNot measured yet.\n<!-- end -->"
        return f"<!-- {kind} {what}{more} -->\n{fillers[kind](what, more.split())}\n<!-- end -->"

    return _PLACE.sub(fill, text)


def _gpu(part: str) -> str:
    if part == "summary":
        return gpu_summary(RESULTS)
    if part == "traffic":
        return gpu_traffic()
    if part == "model":
        return gpu_model(RESULTS)
    return gpu_section(RESULTS, lambda name: _table(f"gpu-acceptance/{name}", ()))


def _result(suite: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{suite}.json").read_text())
    return found


def _table(what: str, columns: Sequence[str]) -> str:
    suite, _, name = what.partition("/")
    stored = _result(suite)["tables"][name]
    headers: Mapping[str, tuple[str, str]] = {column: tuple(header) for column, header in stored["columns"].items()}
    if columns:
        headers = {column: headers[column] for column in columns}
    rows = [{column: _value(cell) for column, cell in row.items()} for row in stored["rows"]]
    lines = [[header.replace("\n", " ") for header, _ in headers.values()]]
    lines.append(["---:" if style else "---" for _, style in headers.values()])
    lines += Table(name, stored["title"], headers, rows).texts()
    return f"{stored['title']}.\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _value(cell: Any) -> Any:
    return Spread(tuple(cell["values"])) if isinstance(cell, dict) else cell


def _sentence(result: Mapping[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    where = f"{machine['cores']} cores of an {machine['cpu']}, {machine['memory_nbytes'] / 2**30:.0f} GiB of memory"
    packages = ", ".join(
        f"{name} {versions[name]}" for name in ("torch", "zstandard", "zipnn", "s3fs") if name in versions
    )
    text = f"Measured on {result['date'][:10]} with `{result['command']}` on {where}; {packages}."
    return "\n".join([text, *(f"\n{note[0].upper()}{note[1:]}." for note in result["notes"])])


def _targets(result: Mapping[str, Any]) -> str:
    lines = ["| target | measured | asked for | |", "| --- | ---: | ---: | --- |"]
    for check in result["checks"]:
        bound = f"{'>=' if check['at_least'] else '<='} {check['bound']:.3g}"
        lines.append(
            f"| {check['what']} | {check['value']:.3f} | {bound} | {'met' if check['met'] else '**not met**'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Fill all documents, and draw the pictures."""
    for path in DOCUMENTS:
        path.write_text(filled(path.read_text()))
    draw_headline(RESULTS, PICTURE)
    for picture in PICTURE.parent.glob("*.png"):
        if (result := RESULTS / f"{picture.stem}.json").exists() and (plots := plots_of(_result(result.stem))):
            draw(plots, _result(result.stem)["machine"], picture)


if __name__ == "__main__":
    main()
