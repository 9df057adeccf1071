"""What people do wrong in the first hour: each ends in one sentence, of an error of ours, that says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import dcp_nvcomp as ckpt
from tests.checkpoints import data_file, flip
from tests.conftest import S3Store

STATE = {"model": {"weight": torch.randn(40, 30), "bias": torch.zeros(30)}, "step": 3}
MODEL = {"weight": torch.zeros(40, 30), "bias": torch.zeros(30)}


class _Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a socket")


class _Opaque:
    """Not known to weights_only loading."""


def _save(state: Any, path: object, **options: Any) -> Any:
    return ckpt.save(state, path, no_dist=True, **options)  # type: ignore[arg-type]


def _load(state: Any, path: object, **options: Any) -> None:
    ckpt.load(state, path, no_dist=True, **options)  # type: ignore[arg-type]


def _open(path: Path) -> ckpt.Checkpoint:
    return ckpt.open_checkpoint(path)


def _garbage(path: Path) -> None:
    (path / ".metadata").write_bytes(b"garbage")
    _load({"model": dict(MODEL)}, path)


def _cut_metadata(path: Path) -> None:
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data[: len(data) // 2])
    _load({"model": dict(MODEL)}, path)


def _without_metadata(path: Path) -> None:
    (path / ".metadata").unlink()
    _load({"model": dict(MODEL)}, path)


def _without_data(path: Path) -> None:
    data_file(path).unlink()
    _load({"model": dict(MODEL)}, path)


def _cut_data(path: Path) -> None:
    os.truncate(data_file(path), 1000)
    _load({"model": dict(MODEL)}, path)


def _flipped(path: Path) -> None:
    flip(data_file(path), 200)
    _load({"model": dict(MODEL)}, path)


def _swapped(path: Path) -> None:
    _save(STATE, path.parent / "other")
    shutil.copy(data_file(path.parent / "other"), data_file(path))
    _load({"model": dict(MODEL)}, path)


def _run(path: Path) -> None:
    _load({"model": dict(MODEL)}, path.parent)


def _below_a_file(path: Path) -> None:
    (path.parent / "file").write_text("x")
    _save(STATE, path.parent / "file" / "step")


def _opaque(path: Path) -> None:
    _save({"opaque": _Opaque()}, path)
    _open(path)["opaque"]


def _array(path: Path) -> None:
    """What torch asks for last is no global of the pickle, and it says so in other words."""
    _save({"array": np.arange(3.0)}, path)
    trusted = [f"{np.arange(1.0).__reduce__()[0].__module__}._reconstruct", "numpy.ndarray", "numpy.dtype"]
    ckpt.open_checkpoint(path, trusted_globals=trusted)["array"]


def _not_enough(path: Path) -> None:
    _load({"model": {**MODEL, "scale": torch.zeros(1)}}, path)


def _object_for_tensor(path: Path) -> None:
    _load({"step": torch.zeros(1)}, path)


Mistake = tuple[str, Callable[[Path], Any], str]

MISTAKES: list[Mistake] = [
    ("a wrong path", lambda path: _load(dict(MODEL), path / "nothing"), "no `.metadata` was found"),
    ("the run instead of a step", _run, "`dcp-nvcomp ls` lists those below"),
    ("a step instead of the run", lambda path: ckpt.CheckpointManager(path), "pass the one above it"),
    ("a save that never finished", _without_metadata, "`dcp-nvcomp recover` brings it back"),
    ("no nesting", lambda path: _load(dict(MODEL), path), r"'model\.(weight|bias)': pass \{\"model\": \.\.\.\}"),
    ("too much nesting", lambda path: _load({"x": {"model": dict(MODEL)}}, path), r"without 'x\.' before it"),
    ("a misspelled key", lambda path: _load({"model": {"wweight": MODEL["weight"]}}, path), r"has 'model\.weight'"),
    ("a parameter that was not saved", _not_enough, r"no 'model\.scale'"),
    ("another shape", lambda path: _load({"model": {"bias": torch.zeros(9)}}, path), r"\(9,\), but \(30,\) was saved"),
    ("another dtype", lambda path: _load({"model": {"bias": torch.zeros(30).half()}}, path), "with dtype='cast'"),
    ("a tensor for an object", _object_for_tensor, "a Python object was saved"),
    ("dtype='convert'", lambda path: _load({}, path, dtype="convert"), "one of 'same', 'cast'"),
    ("a Path of a URL, to save", lambda path: _save(STATE, Path("s3://bucket/x")), "'s3://bucket/x' as text, not as a"),
    ("a Path of a URL, to load", lambda path: _load({}, Path("s3://bucket") / "x"), "'s3://bucket/x' as text"),
    ("a reader to save", lambda path: _save(STATE, None, storage_writer=ckpt.NvcompReader(path)), "it is for loading"),
    ("a writer to load", lambda path: _load({}, None, storage_reader=ckpt.NvcompWriter(path)), "it is for saving"),
    (
        "a writer of stock DCP",
        lambda path: _save(STATE, None, storage_writer=dcp.FileSystemWriter(path)),
        "use dcp.save with other writers",
    ),
    (
        "a reader of stock DCP",
        lambda path: _load({}, None, storage_reader=dcp.FileSystemReader(path)),
        "needs an NvcompReader, not a FileSystemReader",
    ),
    ("nowhere to save to", lambda path: _save(STATE, None), "needs a checkpoint_id or a storage_writer"),
    ("nowhere to load from", lambda path: _load({}, None), "needs a checkpoint_id or a storage_reader"),
    (
        "options beside a writer",
        lambda path: _save(STATE, None, storage_writer=ckpt.NvcompWriter(path), codec="zstd"),
        "Give codec to the writer",
    ),
    (
        "options beside a reader",
        lambda path: _load({}, None, storage_reader=ckpt.NvcompReader(path), verify="off"),
        "Give verify to the reader",
    ),
    ("a misspelled option", lambda path: _save(STATE, path, thread_cout=2), "did you mean 'thread_count'"),
    ("another name of an option", lambda path: _save(STATE, path, threads=2), "did you mean 'thread_count'"),
    ("an option of nothing", lambda path: _load({}, path, odd=False), "this call takes .*and file:// takes none"),
    (
        "a misspelled option of a run",
        lambda path: ckpt.CheckpointManager(path / "run", keeep=None),
        "did you mean 'keep'",
    ),
    ("an option of another storage", lambda path: _load({}, path, endpoint_url="http://x"), "an option of s3://"),
    ("an unknown codec", lambda path: _save(STATE, path, codec="lz4"), "planes-zstd"),
    ("an unknown engine", lambda path: _save(STATE, path, engine="gpu"), "one of 'auto', 'cuda', 'cpu'|must be one of"),
    ("no threads", lambda path: _save(STATE, path, thread_count=0), "a positive number of threads"),
    ("no memory", lambda path: _save(STATE, path, host_memory_budget=0), "host_memory_budget"),
    ("a GPU that is not there", lambda path: _save(STATE, path, engine="cuda"), "GPU|CUDA"),
    ("a codec that needs one", lambda path: _save(STATE, path, codec="ans"), "GPU|CUDA|nvCOMP"),
    ("a value that can't be pickled", lambda path: _save({"fd": _Unpicklable()}, path), "can't be pickled.*key 'fd'"),
    ("a module for a state dict", lambda path: _save(nn.Linear(2, 2), path), r"pass \{'model': model.state_dict\(\)\}"),
    ("a list for a state dict", lambda path: _save([1], path), "needs a dict, not a list"),
    ("a key that is no text", lambda path: _save({1: torch.zeros(1)}, path), "are text, and 1 is not"),
    ("a callback that can't be called", lambda path: _save(STATE, path, on_save="log"), "is not callable"),
    ("garbage for .metadata", _garbage, "try `dcp-nvcomp recover`"),
    ("half of .metadata", _cut_metadata, "try `dcp-nvcomp recover`"),
    ("a data file that is missing", _without_data, "distcp"),
    ("a data file that was cut", _cut_data, "1000 bytes"),
    ("a data file that was damaged", _flipped, "load again before using them"),
    ("data files that were mixed up", _swapped, "swapped or mixed"),
    ("a path below a file", _below_a_file, "Not a directory|not a directory"),
    ("a path that is taken", lambda path: _save(STATE, path, overwrite=False), "overwrite"),
    ("no path at all", lambda path: _save(STATE, ""), "non-empty"),
    ("a number for a path", lambda path: ckpt.NvcompWriter(5), "path"),  # type: ignore[arg-type]
    ("the path before the state", lambda path: _save(path, STATE), r"not a dict: the state dict comes first"),
    ("an unknown protocol", lambda path: _save(STATE, "foo://bucket/x"), "foo"),
    ("a wait that there is not", lambda path: ckpt.async_save(STATE, path, wait="later"), "one of 'staged', 'nothing'"),
    ("a misspelled key of a checkpoint", lambda path: _open(path)["model.wweight"], r"has 'model\.weight'"),
    ("a part of the keys", lambda path: _open(path)["model"], r"has 'model\.bias', 'model\.weight' below it"),
    ("a prefix that was forgotten", lambda path: _open(path).load_into(nn.Linear(30, 40)), r"prefix='model\.'"),
    ("an object that would run code", _opaque, "trusted_globals"),
    ("an array of numpy", _array, r"It needs numpy\.dtypes\.Float64DType"),
    ("a list for an index", lambda path: _open(path)["model.weight"][[0, 1]], "read it with"),
    ("a row that there is not", lambda path: _open(path)["model.weight"][40], "out of range"),
    ("a conversion onto itself", lambda path: ckpt.convert(path, path), "same place"),
    ("objects as safetensors", lambda path: ckpt.convert(path, path.parent / "x.safetensors"), "prefix="),
    (
        "a prefix without its dot",
        lambda path: ckpt.convert(path, path.parent / "x", prefix="model"),
        r"end it with a dot, 'model\.'",
    ),
    ("a conversion of nothing", lambda path: ckpt.convert(path / "no", path / "x"), "nothing to convert"),
    ("inspection of nothing", lambda path: ckpt.tools.inspect(path / "no"), "no `.metadata` was found"),
    ("verification of nothing", lambda path: ckpt.tools.verify(path / "no"), "no `.metadata`|no checkpoint"),
    ("recovery of nothing", lambda path: ckpt.tools.recover(path / "no"), "missing"),
    ("cleaning too soon", lambda path: ckpt.tools.clean(path, older_than_seconds=1), "at least 3600"),
    ("a run without steps", lambda path: ckpt.runs.list_run(path / "no"), "no checkpoint at or below"),
]


@pytest.mark.parametrize(
    ("do", "says"), [(do, says) for _, do, says in MISTAKES], ids=[name for name, _, _ in MISTAKES]
)
def test_one_sentence_says_what_to_do(tmp_path: Path, do: Callable[[Path], Any], says: str) -> None:
    path = tmp_path / "step"
    _save(STATE, path)
    with pytest.raises((ckpt.CheckpointError, IndexError, TypeError)) as caught:
        do(path)
    text = str(caught.value)
    assert re.search(says, text), text
    assert "\n" not in text
    assert len(text) < 700
    assert text[0].isupper() or text[0] in "'`_" or re.match(r"\w+=|load |save |async_save |safetensors ", text)


@pytest.mark.s3
def test_a_bucket_that_is_missing(s3_store: S3Store) -> None:
    _, options = s3_store
    for do in (
        lambda: _save(STATE, "s3://no-such-bucket/x", **options),
        lambda: _load({}, "s3://no-such-bucket/x", **options),
    ):
        with pytest.raises(ckpt.CheckpointError) as caught:
            do()
        text = str(caught.value)
        assert "no-such-bucket" in text and re.search("bucket", text, re.IGNORECASE)
        assert "\n" not in text


SCRIPT = """
import os, sys, time, warnings
import torch, torch.distributed as dist
import dcp_nvcomp as ckpt
warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
try:
    ckpt.load({"w": torch.zeros(3)}, sys.argv[3])
finally:
    dist.destroy_process_group()
    time.sleep(0.3)  # PyTorch's gloo threads let go of tensors late; if the interpreter ends meanwhile, they abort it
"""


@pytest.mark.ci
def test_a_wrong_path_on_two_ranks_prints_few_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "meeting")]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    jobs = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "nothing")], stderr=subprocess.PIPE, env=environment, text=True
        )
        for rank in range(2)
    ]
    printed = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [1, 1], "".join(printed)
    for text in printed:
        assert "CheckpointNotFoundError: There is no checkpoint here" in text.splitlines()[-1]
        assert str(tmp_path / "nothing") in text
    lines = [line for text in printed for line in text.splitlines()]
    assert len(lines) <= 15, "\n".join(lines)


def test_a_launcher_without_a_process_group_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for do in (ckpt.save, ckpt.load):
        with pytest.warns(RuntimeWarning, match="WORLD_SIZE=4, but torch.distributed is not initialized") as caught:
            do({"w": torch.ones(3)}, tmp_path)
        assert caught[0].filename == __file__
    ckpt.save({"w": torch.ones(3)}, tmp_path, no_dist=True)


def test_one_process_saves_without_a_warning(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt.save({"w": torch.ones(3)}, tmp_path)
        ckpt.load({"w": torch.ones(3)}, tmp_path)
