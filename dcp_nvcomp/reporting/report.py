"""write_report: statistics of a save, or of a load's ranks, as one HTML file that needs nothing else."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcp_nvcomp.errors import ConfigurationError, StorageError
from dcp_nvcomp.loading.stats import LoadStats
from dcp_nvcomp.reporting.findings import RankTimes
from dcp_nvcomp.reporting.page import Page, page_html
from dcp_nvcomp.saving.stats import SaveStats

Stats = SaveStats | LoadStats | Mapping[str, Any]

_SAVE_STAGES = ("plan", "encode", "write")
_LOAD_STAGES = ("fetch", "decode")


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
    text = page_html(_page(stats))
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        try:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError.from_os_error("write the report", str(target), error) from error


def _page(stats: Stats | Sequence[Stats]) -> Page:
    several = [stats] if isinstance(stats, SaveStats | LoadStats | Mapping) else list(stats)
    documents = [one if isinstance(one, Mapping) else one.to_dict() for one in several]
    try:
        if len(documents) == 1 and "save_id" in documents[0]:
            return _save_page(documents[0])
        if documents and all("fetched_nbytes" in one for one in documents):
            return _load_page(documents)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"These statistics lack something: {type(error).__name__}: {error}.") from error
    raise ConfigurationError("A report is of one SaveStats, or of LoadStats: one for each rank of a load.")


def _save_page(found: Mapping[str, Any]) -> Page:
    ranks = [
        RankTimes(
            rank["rank"],
            {stage: rank["seconds"].get(stage, 0.0) for stage in _SAVE_STAGES},
            rank["uncompressed_nbytes"],
            rank["encoded_nbytes"],
            # encoding and writing overlap
            rank["seconds"].get("plan", 0.0)
            + max(rank["seconds"].get("encode", 0.0), rank["seconds"].get("write", 0.0)),
        )
        for rank in found["ranks"]
    ]
    facts = {
        "state": found["uncompressed_nbytes"],
        "stored": found["stored_nbytes"],
        "ratio": found["ratio"],
        "time": found["total_seconds"],
        "commit": found["seconds"].get("commit", 0.0),
    }
    if found["stall_seconds"]:
        facts["training waited"] = found["stall_seconds"]
    notes = []
    if found["recoded_blocks"]:
        notes.append(
            f"A GPU encoded {found['recoded_blocks']} blocks to wrong bytes; the CPU encoded them again. The "
            "checkpoint is right, but the GPU, its driver or nvCOMP is not."
        )
    return Page(
        "Save",
        found["checkpoint"],
        facts,
        _SAVE_STAGES,
        ranks,
        {
            component: {codec: (one["uncompressed_nbytes"], one["encoded_nbytes"]) for codec, one in by_codec.items()}
            for component, by_codec in found["by_component"].items()
        },
        "Encoding and writing overlap: a rank takes its planning and the longer of the two.",
        notes,
    )


def _load_page(found: Sequence[Mapping[str, Any]]) -> Page:
    ranks = [
        RankTimes(
            one["rank"],
            {stage: one["stage_seconds"].get(stage, 0.0) for stage in _LOAD_STAGES},
            one["nbytes"],
            one["fetched_nbytes"],
            one["seconds"],
        )
        for one in sorted(found, key=lambda one: int(one["rank"]))
    ]
    fetched = sum(rank.stored_nbytes for rank in ranks)
    return Page(
        "Load",
        found[0]["checkpoint_id"],
        {
            "filled": sum(rank.nbytes for rank in ranks),
            "read": fetched,
            "time": max(rank.total_seconds for rank in ranks),
        },
        _LOAD_STAGES,
        ranks,
        {},
        "Reading and decoding overlap, each on several threads; shown is the busiest thread.",
        [],
    )
