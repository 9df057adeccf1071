"""Small checkpoints for the tests of the commands, and what is done to them."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from typer.testing import CliRunner

from dcp_nvcomp.cli.app import app
from dcp_nvcomp.format.framing import TRAILER_NBYTES, Tables, decode_footer, decode_trailer, encode_footer
from dcp_nvcomp.format.metadata.serialization import parse_metadata, serialize_metadata
from dcp_nvcomp.saving.stats import SaveStats
from tests.checkpoints import data_file, file_names, load, save
from tests.states import State, assert_same

DAY_SECONDS = 86400.0


def model_state(seed: int = 0) -> State:
    """Return tensors of several codecs, and an object; the commands' reports name them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(24, 16, generator=generator).bfloat16(),
        "table": torch.arange(200) * (seed + 1),
        "bias": torch.randn(10, generator=generator),
        "scale": torch.randn(5, generator=generator),
        "config": {"lr": 0.1 + seed},
    }


def save_model(path: Path | str, seed: int = 0, **options: Any) -> SaveStats:
    """Save a model state on the CPU, and return the statistics."""
    saved = save(path, model_state(seed), engine="cpu", **options).last_save
    assert saved is not None
    return saved


def loaded_seed(path: Path | str, **options: Any) -> int:
    """Return the seed of the model state that a checkpoint holds bit for bit."""
    found = load(path, model_state(), engine="cpu", **options)
    seed: int = round(found["config"]["lr"] - 0.1)
    assert_same(found, model_state(seed))
    return seed


def run(*arguments: object, width: int = 0) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a command, on a terminal of that width."""
    runner = CliRunner(env={"COLUMNS": str(width)} if width else None)
    result = runner.invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def new_id() -> str:
    return uuid.uuid4().hex


def make_old(*files: Path, days: float = 2.0) -> None:
    """As if they had been written some days ago."""
    then = time.time() - days * DAY_SECONDS
    for file in files:
        os.utime(file, (then, then))


def leave_save(path: Path, seed: int, *, days: float = 2.0, **options: Any) -> tuple[str, set[str]]:
    """Leave the files of a save that was killed right before it published; return its id and their names."""
    other = path.parent / f"other-{new_id()}"
    save_id = save_model(other, seed, **options).save_id
    left = file_names(other) - {".metadata"}
    for name in left:
        shutil.copy(other / name, path / name)
        make_old(path / name, days=days)
    shutil.rmtree(other)
    return save_id, left


def change_metadata(path: Path, change: Callable[[Metadata], None]) -> None:
    """Change what `.metadata` and its copy say, both alike."""
    metadata = parse_metadata((path / ".metadata").read_bytes(), path="")
    assert metadata.storage_meta is not None
    copy = path / f"__{metadata.storage_meta.save_id}.metadata"
    change(metadata)
    for file in (path / ".metadata", copy):
        file.write_bytes(serialize_metadata(metadata))


def change_footer(path: Path, change: Callable[[dict[str, Any], Tables], None]) -> None:
    """Change what the footer of the only data file says, and all that depends on it."""
    file = data_file(path)
    data = file.read_bytes()
    tail = data[-TRAILER_NBYTES:]
    trailer = decode_trailer(tail, path="", file_nbytes=len(data))
    footer = data[trailer.footer_offset : -TRAILER_NBYTES]
    description, tables = decode_footer(footer, tail, trailer, path="")
    tables = Tables(*(column.copy() for column in vars(tables).values()))
    change(description, tables)
    data = data[: trailer.footer_offset] + encode_footer(description, tables, trailer.footer_offset)
    file.write_bytes(data)
    trailer = decode_trailer(data[-TRAILER_NBYTES:], path="", file_nbytes=len(data))
    described = (file.name, len(data), trailer.footer_nbytes, trailer.footer_crc)

    def point_to_it(metadata: Metadata) -> None:
        metadata.storage_data = {index: (described, number) for index, (_, number) in metadata.storage_data.items()}

    change_metadata(path, point_to_it)
