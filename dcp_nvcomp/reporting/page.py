"""The page as HTML: facts, who was slow, heat maps of ranks by stage, and of components by codec.

Everything that comes from a checkpoint is escaped. There are no scripts and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from dcp_nvcomp.reporting.findings import RankTimes, slowest_of
from dcp_nvcomp.reporting.style import STYLE
from dcp_nvcomp.version import VERSION

Sizes = tuple[int, int]

# Beyond these, a table of ranks shows the slowest only; the map above it shows all.
_MOST_ROWS = 32
_MOST_COMPONENTS = 24
_STRONG = 0.55  # from here on a cell is so dark that its text is white


@dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
        title: `Save` or `Load`.
        path: the checkpoint.
        facts: by name; times are floats, sizes integers, and a ratio is by the name `ratio`.
        stages: names of the stages, in order.
        ranks: times of each rank.
        components: uncompressed and encoded size by component and codec.
        overlap: a sentence on how stages add up.
        notes: what else has to be said.
    """

    title: str
    path: str
    facts: Mapping[str, float]
    stages: Sequence[str]
    ranks: Sequence[RankTimes]
    components: Mapping[str, Mapping[str, Sizes]]
    overlap: str
    notes: Sequence[str]


def page_html(page: Page) -> str:
    """Return the page."""
    return "\n".join(_lines(page)) + "\n"


def _lines(page: Page) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{page.title} of {escape(page.path)}</title>\n<style>{STYLE}</style>\n</head>\n<body>"
    yield f'<h1>{page.title}</h1>\n<p class="path">{escape(page.path)}</p>'
    yield '<dl class="facts">'
    for name, value in page.facts.items():
        yield f"<div><dt>{escape(name)}</dt><dd>{_fact(name, value)}</dd></div>"
    yield f"<div><dt>ranks</dt><dd>{len(page.ranks)}</dd></div>\n</dl>"
    yield from _finding(page)
    if page.ranks:
        yield from _ranks(page)
    if page.components:
        yield from _components(page.components)
    yield f'<p class="dim" style="margin-top:2.5rem">dcp_nvcomp {VERSION}. Sizes are in units of 10^n bytes.</p>'
    yield "</body>\n</html>"


def _finding(page: Page) -> Iterator[str]:
    slowest = slowest_of(page.ranks)
    if slowest is not None:
        yield f'<p class="finding slow">{escape(str(slowest))}</p>'
    elif len(page.ranks) > 1:
        yield '<p class="finding">No rank was much slower than the others.</p>'
    for note in page.notes:
        yield f'<p class="finding slow">{escape(note)}</p>'


def _ranks(page: Page) -> Iterator[str]:
    most = max((seconds for rank in page.ranks for seconds in rank.seconds.values()), default=0.0)
    yield f'<h2>Ranks and stages</h2>\n<p class="dim">{escape(page.overlap)}</p>'
    if len(page.ranks) > 1:
        yield f'<div class="legend">0 s <b></b> {_seconds(most)}</div>'
    if len(page.ranks) > _MOST_ROWS:
        yield '<div class="strip">'
        for stage in page.stages:
            cells = "".join(
                f'<i style="--v:{_part(rank.seconds[stage], most)}" '
                f'title="rank {rank.rank}: {stage} {_seconds(rank.seconds[stage])}"></i>'
                for rank in page.ranks
            )
            yield f'<span>{stage}</span><div class="cells">{cells}</div>'
        yield "</div>"
    shown = sorted(page.ranks, key=lambda rank: -rank.total_seconds)[:_MOST_ROWS]
    if len(shown) < len(page.ranks):
        yield f'<p class="dim">The {len(shown)} slowest of {len(page.ranks)} ranks:</p>'
    else:
        shown.sort(key=lambda rank: rank.rank)
    yield '<div class="scroll"><table><tr><th>rank</th>'
    yield (
        "".join(f"<th>{stage}</th>" for stage in page.stages) + "<th>time</th><th>in memory</th><th>in files</th></tr>"
    )
    for rank in shown:
        cells = "".join(
            _cell("time", rank.seconds[stage], most, _seconds(rank.seconds[stage])) for stage in page.stages
        )
        sizes = "".join(f"<td>{_nbytes(nbytes)}</td>" for nbytes in (rank.nbytes, rank.stored_nbytes))
        yield f"<tr><td>{rank.rank}</td>{cells}<td>{_seconds(rank.total_seconds)}</td>{sizes}</tr>"
    yield "</table></div>"


def _components(components: Mapping[str, Mapping[str, Sizes]]) -> Iterator[str]:
    rows = _largest(components)
    codecs = sorted({codec for by_codec in rows.values() for codec in by_codec})
    most = max((after for by_codec in rows.values() for _, after in by_codec.values()), default=0)
    yield "<h2>Components and codecs</h2>"
    yield '<p class="dim">Size in the files, the stronger the color the larger, and the ratio.</p>'
    yield '<div class="scroll"><table><tr><th>component</th>'
    yield (
        "".join(f"<th>{escape(codec)}</th>" for codec in codecs)
        + "<th>in memory</th><th>in files</th><th>ratio</th></tr>"
    )
    for component, by_codec in rows.items():
        cells = ""
        for codec in codecs:
            if codec not in by_codec:
                cells += '<td class="none">&ndash;</td>'
                continue
            before, after = by_codec[codec]
            cells += _cell("size", after, most, f"{_nbytes(after)}<small>{_ratio(before, after)}</small>")
        before, after = (sum(sizes[at] for sizes in by_codec.values()) for at in (0, 1))
        yield (
            f"<tr><td>{escape(component) or '&ndash;'}</td>{cells}<td>{_nbytes(before)}</td><td>{_nbytes(after)}</td>"
            f"<td>{_ratio(before, after)}</td></tr>"
        )
    yield "</table></div>"


def _largest(components: Mapping[str, Mapping[str, Sizes]]) -> dict[str, dict[str, Sizes]]:
    """Return the largest components, the others added up."""
    order = sorted(components, key=lambda name: -sum(after for _, after in components[name].values()))
    rows = {name: dict(components[name]) for name in order[:_MOST_COMPONENTS]}
    others: dict[str, Sizes] = {}
    for name in order[_MOST_COMPONENTS:]:
        for codec, (before, after) in components[name].items():
            had = others.get(codec, (0, 0))
            others[codec] = (had[0] + before, had[1] + after)
    if others:
        rows[f"{len(order) - _MOST_COMPONENTS} others"] = others
    return rows


def _cell(kind: str, value: float, most: float, text: str) -> str:
    part = _part(value, most)
    strong = " strong" if part >= _STRONG else ""
    return f'<td class="heat {kind}{strong}" style="--v:{part}">{text}</td>'


def _part(value: float, most: float) -> float:
    return round(value / most, 3) if most else 0.0


def _fact(name: str, value: float) -> str:
    if name == "ratio":
        return f"{value:.3f}"
    return _seconds(value) if isinstance(value, float) else _nbytes(value)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 0.001 else "0 ms"


def _ratio(before: int, after: int) -> str:
    return f"{before / after:.3f}" if after else "&ndash;"


def _nbytes(nbytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"
