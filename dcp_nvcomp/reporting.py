"""write_report: statistics of a save, or of a load's ranks, as one HTML page that needs nothing else.

Everything that comes from a checkpoint is escaped. There are no scripts and nothing is fetched.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from dcp_nvcomp.errors import ConfigurationError, StorageError
from dcp_nvcomp.loading.job import LoadStats
from dcp_nvcomp.saving.stats import SaveStats
from dcp_nvcomp.version import VERSION

Stats = SaveStats | LoadStats | Mapping[str, Any]

_SAVE_STAGES = ("plan", "encode", "write")
_LOAD_STAGES = ("fetch", "decode")
# What a rank takes longer than the others matters from here on.
_WORTH_SAYING_PART = 0.1
_WORTH_SAYING_SECONDS = 0.01
# Tables show the slowest ranks and the largest components.
_MOST_RANKS = 32
_MOST_COMPONENTS = 24

_STYLE = """
:root { color-scheme: light dark; --slow: #c2410c; --fine: #2e7d4f; --dim: #5d6675; --back: #eef0f3; }
@media (prefers-color-scheme: dark) { :root { --slow: #e8590c; --fine: #3f9d68; --dim: #97a1b0; --back: #262c35; } }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1rem; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .3rem; }
p { overflow-wrap: anywhere; }
.dim, dt, th { color: var(--dim); font-size: .88rem; font-weight: 400; }
dl { display: flex; flex-wrap: wrap; gap: .6rem; }
dl div { background: var(--back); border-radius: 8px; padding: .45rem .9rem; }
dd { margin: 0; font-size: 1.15rem; }
.finding { border-left: 4px solid var(--fine); background: var(--back); padding: .6rem .9rem; }
.slow { border-left-color: var(--slow); }
.scroll { overflow-x: auto; }
th, td { text-align: right; padding: .25rem .6rem; white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; }
"""


def write_report(stats: Stats | Sequence[Stats], path: str | os.PathLike[str]) -> None:
    """Write a page about a save or load: per rank and stage, who was slow, sizes by component and codec.

    Args:
        stats: the `SaveStats` of a save, as `on_save` gets them; or the `LoadStats` of each rank of a load, of which
            each rank has its own. What their `to_dict` returned does too.
        path: local path of the page.

    Raises:
        ConfigurationError: these are no such statistics.
        StorageError: the page can't be written.

    Examples:
        >>> import pathlib, tempfile, torch, dcp_nvcomp
        >>> folder = tempfile.mkdtemp()
        >>> page = f"{folder}/report.html"
        >>> _ = dcp_nvcomp.save({"w": torch.ones(9)}, folder, no_dist=True, on_save=lambda s: write_report(s, page))
        >>> pathlib.Path(page).read_text()[:15]
        '<!doctype html>'
    """
    several = [stats] if isinstance(stats, SaveStats | LoadStats | Mapping) else list(stats)
    documents = [one if isinstance(one, Mapping) else one.to_dict() for one in several]
    try:
        if len(documents) == 1 and "save_id" in documents[0]:
            lines = list(_save_page(documents[0]))
        elif documents and all("fetched_nbytes" in one for one in documents):
            lines = list(_load_page(documents))
        else:
            raise ConfigurationError("A report is of one SaveStats, or of LoadStats: one for each rank of a load.")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"These statistics lack something: {type(error).__name__}: {error}.") from error
    lines.append(f'<p class="dim">dcp_nvcomp {VERSION}. Sizes are in units of 10^n bytes.</p>\n</body>\n</html>')
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError.from_os_error("write the report", str(target), error) from error


@dataclass(frozen=True)
class RankTimes:
    """One rank's times."""

    rank: int
    seconds: Mapping[str, float]  # by stage
    nbytes: int  # in memory
    stored_nbytes: int  # what it wrote or read
    total_seconds: float  # of all stages, some of which overlap


def slowest_rank(ranks: Sequence[RankTimes]) -> str | None:
    """Return what is to be said of the slowest rank; None if it was about as fast as the others."""
    if len(ranks) < 2:
        return None
    slowest = max(ranks, key=lambda rank: rank.total_seconds)
    excess = slowest.total_seconds - median(rank.total_seconds for rank in ranks)
    if excess < max(_WORTH_SAYING_SECONDS, _WORTH_SAYING_PART * slowest.total_seconds):
        return None
    by_stage = {
        stage: seconds - median(rank.seconds.get(stage, 0.0) for rank in ranks)
        for stage, seconds in slowest.seconds.items()
    }
    stage = max(by_stage, key=by_stage.__getitem__)
    usual_nbytes = median(rank.nbytes for rank in ranks)
    factor = slowest.nbytes / usual_nbytes if usual_nbytes else 1.0
    more = f", with {factor:.1f} times as many bytes" if factor > 1.2 else ""
    return (
        f"Rank {slowest.rank} was the slowest: {slowest.total_seconds:.2f} s, {excess:.2f} s more than the median "
        f"rank{more}; it lost most in {stage} ({by_stage[stage]:.2f} s more than the median)."
    )


def _save_page(found: Mapping[str, Any]) -> Iterator[str]:
    ranks = []
    for rank in found["ranks"]:
        seconds = {stage: rank["seconds"].get(stage, 0.0) for stage in _SAVE_STAGES}
        total = seconds["plan"] + max(seconds["encode"], seconds["write"])
        ranks.append(RankTimes(int(rank["rank"]), seconds, rank["uncompressed_nbytes"], rank["encoded_nbytes"], total))
    facts = {
        "state": _nbytes(found["uncompressed_nbytes"]),
        "stored": _nbytes(found["stored_nbytes"]),
        "ratio": f"{found['ratio']:.3f}",
        "time": _seconds(found["total_seconds"]),
        "commit": _seconds(found["seconds"].get("commit", 0.0)),
    }
    if found["stall_seconds"]:
        facts["training waited"] = _seconds(found["stall_seconds"])
    yield from _head("Save", found["checkpoint"], facts, ranks)
    if found["recoded_blocks"]:
        yield (
            f'<p class="finding slow">A GPU encoded {int(found["recoded_blocks"])} blocks to wrong bytes; the CPU '
            "encoded them again. The checkpoint is right, but the GPU, its driver or nvCOMP is not.</p>"
        )
    yield from _rank_table(
        ranks, _SAVE_STAGES, "Encoding and writing overlap: a rank takes its planning and the longer of the two."
    )
    yield from _component_table(found["by_component"])


def _load_page(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    ranks = [
        RankTimes(
            int(one["rank"]),
            {stage: one["stage_seconds"].get(stage, 0.0) for stage in _LOAD_STAGES},
            one["nbytes"],
            one["fetched_nbytes"],
            one["seconds"],
        )
        for one in sorted(found, key=lambda one: int(one["rank"]))
    ]
    facts = {
        "filled": _nbytes(sum(rank.nbytes for rank in ranks)),
        "read": _nbytes(sum(rank.stored_nbytes for rank in ranks)),
        "time": _seconds(max(rank.total_seconds for rank in ranks)),
    }
    yield from _head("Load", found[0]["checkpoint_id"], facts, ranks)
    yield from _rank_table(
        ranks, _LOAD_STAGES, "Reading and decoding overlap, each on several threads; shown is the busiest thread."
    )


def _head(title: str, path: str, facts: Mapping[str, str], ranks: Sequence[RankTimes]) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title} of {escape(path)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield f'<h1>{title}</h1>\n<p class="dim">{escape(path)}</p>\n<dl>'
    for name, value in {**facts, "ranks": str(len(ranks))}.items():
        yield f"<div><dt>{name}</dt><dd>{value}</dd></div>"
    yield "</dl>"
    slow = slowest_rank(ranks)
    if slow is not None:
        yield f'<p class="finding slow">{escape(slow)}</p>'
    elif len(ranks) > 1:
        yield '<p class="finding">No rank was much slower than the others.</p>'


def _rank_table(ranks: Sequence[RankTimes], stages: Sequence[str], overlap: str) -> Iterator[str]:
    if not ranks:
        return
    yield f'<h2>Ranks and stages</h2>\n<p class="dim">{overlap}</p>'
    shown = sorted(ranks, key=lambda rank: -rank.total_seconds)[:_MOST_RANKS]
    if len(shown) < len(ranks):
        yield f'<p class="dim">The {len(shown)} slowest of {len(ranks)} ranks:</p>'
    else:
        shown.sort(key=lambda rank: rank.rank)
    yield from _table(
        ["rank", *stages, "time", "in memory", "in files"],
        [
            [
                str(rank.rank),
                *(_seconds(rank.seconds[stage]) for stage in stages),
                _seconds(rank.total_seconds),
                _nbytes(rank.nbytes),
                _nbytes(rank.stored_nbytes),
            ]
            for rank in shown
        ],
    )


def _component_table(components: Mapping[str, Mapping[str, Mapping[str, int]]]) -> Iterator[str]:
    if not components:
        return
    sizes = {
        name: [sum(one[size] for one in by_codec.values()) for size in ("uncompressed_nbytes", "encoded_nbytes")]
        for name, by_codec in components.items()
    }
    shown = sorted(sizes, key=lambda name: -sizes[name][1])[:_MOST_COMPONENTS]
    codecs = sorted({codec for name in shown for codec in components[name]})
    yield "<h2>Components and codecs</h2>"
    most = f"The {len(shown)} largest of {len(sizes)}: their" if len(shown) < len(sizes) else "Their"
    yield f'<p class="dim">{most} size in the files by codec, in memory and in the files together, and the ratio.</p>'
    rows = []
    for name in shown:
        before, after = sizes[name]
        by_codec = components[name]
        parts = [_nbytes(by_codec[codec]["encoded_nbytes"]) if codec in by_codec else "-" for codec in codecs]
        rows.append([name or "-", *parts, _nbytes(before), _nbytes(after), f"{before / after:.3f}" if after else "-"])
    yield from _table(["component", *codecs, "in memory", "in files", "ratio"], rows)


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield '<div class="scroll"><table>'
    for tag, cells in (("th", heading), *(("td", row) for row in rows)):
        yield f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"
    yield "</table></div>"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms" if seconds >= 0.001 else "0 ms"


def _nbytes(nbytes: int) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes} B"
