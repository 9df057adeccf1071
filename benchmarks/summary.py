"""The table that docs/performance.md begins with: what each suite found, by its checks in the committed results.

`python -m benchmarks.pages` makes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["performance_summary"]


@dataclass(frozen=True)
class Finding:
    """A check of a suite, in the words of a reader; `meaning` has a place for its value."""

    what: str
    suite: str
    check: str
    meaning: str
    page: str


_FASTER = "{:.2f} x as fast"
_OF = "{:.2f} x"
_CPU, _TENSORS, _ASYNC, _SCALE = (f"performance/{page}.md" for page in ("cpu", "tensors", "asynchronous", "scale"))
FINDINGS = (
    Finding(
        "size beside stock DCP's zstd extension, real state",
        "ratio",
        "ratio over that of DCP+zstd, large tensors",
        "{:.2f} x smaller",
        f"{_CPU}#ratio",
    ),
    Finding("coding beside ZipNN, 2 threads", "cpu", "compress speed over ZipNN, 2 threads", _FASTER, _CPU),
    Finding("decoding beside ZipNN, 2 threads", "cpu", "decompress speed over ZipNN, 2 threads", _FASTER, _CPU),
    Finding(
        "save over a link of 500 MB/s beside stock DCP",
        "overlap",
        "save speed over DCP at 500 MB/s, 0.9 x ratio",
        _FASTER,
        f"{_CPU}#overlap",
    ),
    Finding(
        "load over a link of 500 MB/s beside stock DCP",
        "overlap",
        "load speed over DCP at 500 MB/s, 0.9 x ratio",
        _FASTER,
        f"{_CPU}#overlap",
    ),
    Finding(
        "save to an S3 server beside stock DCP",
        "s3",
        "save speed over DCP's fsspec writer and reader, S3",
        _FASTER,
        "performance/s3.md",
    ),
    Finding(
        "load from an S3 server beside stock DCP",
        "s3",
        "load speed over DCP's fsspec writer and reader, S3",
        _FASTER,
        "performance/s3.md",
    ),
    Finding(
        "save in memory, large bf16 tensors, beside stock DCP",
        "tensors",
        "large bf16: save speed over plain DCP",
        _FASTER,
        _TENSORS,
    ),
    Finding(
        "load in memory, large bf16 tensors, beside stock DCP",
        "tensors",
        "large bf16: load speed over plain DCP",
        _FASTER,
        _TENSORS,
    ),
    Finding(
        "save of 10,000 tensors of 1 KB beside stock DCP",
        "tensors",
        "10,000 of 1 KB: save speed over plain DCP",
        _FASTER,
        _TENSORS,
    ),
    Finding(
        "training time lost to an asynchronous save, beside stock DCP's best way, a core to spare",
        "asynchronous",
        "1 rank: lost over stock's best",
        _OF,
        _ASYNC,
    ),
    Finding("the same, no core to spare", "asynchronous", "2 ranks: lost over stock's best", _OF, _ASYNC),
    Finding(
        "the same beside torch_checkpointing, a core to spare",
        "asynchronous",
        "1 rank: lost over torch_checkpointing's",
        _OF,
        _ASYNC,
    ),
    Finding(
        "the same beside torch_checkpointing, no core to spare",
        "asynchronous",
        "2 ranks: lost over torch_checkpointing's",
        _OF,
        _ASYNC,
    ),
    Finding(
        "when a checkpoint is complete, no core to spare, beside stock DCP's soonest",
        "asynchronous",
        "2 ranks: stock's soonest publication over ours",
        "{:.2f} x as soon",
        _ASYNC,
    ),
    Finding(
        "stall of a run's save into the fast tier, beside `async_save`",
        "runs",
        "stall of the fast tier over async_save's",
        _OF,
        "performance/runs.md",
    ),
    Finding(
        "bytes read to load 4 ranks' checkpoint on 3, beside what they need",
        "reshard",
        "4 rows -> 3 rows, fetched over needed",
        _OF,
        "performance/resharding.md",
    ),
    Finding(
        "planning and commit of a first save beside `dcp.save`",
        "plans",
        "first planning and commit over dcp.save's",
        _OF,
        f"{_SCALE}#plans-that-the-ranks-compute",
    ),
    Finding(
        "host memory beside its budget, the worst of all",
        "scale-memory",
        "peak host memory beyond the state over the budget, worst of all",
        _OF,
        f"{_CPU}#memory",
    ),
)


def performance_summary(results: Path) -> str:
    """Return the table, of the checks in a directory of results."""
    lines = ["| what | measured | |", "| --- | ---: | --- |"]
    for finding in FINDINGS:
        checks = json.loads((results / f"{finding.suite}.json").read_text())["checks"]
        (value,) = [check["value"] for check in checks if check["what"] == finding.check]
        slower = ": slower" if finding.meaning is _FASTER and value < 1 else ""
        lines.append(f"| {finding.what} | {finding.meaning.format(value)}{slower} | [details]({finding.page}) |")
    return "\n".join(lines)
