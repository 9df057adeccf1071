"""Messages that lead on: what is at a path and which call takes it, the nearest names, the call's own options."""

from __future__ import annotations

import os
import tarfile
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import dcp_nvcomp as ckpt
from dcp_nvcomp.calls.suggestions import missing_key
from dcp_nvcomp.cli.app import app
from dcp_nvcomp.streams.writer import StreamWriter
from tests.checkpoints import data_file
from tests.conftest import S3Store

STATE = {"model": {"weight": torch.ones(40, 30), "bias": torch.zeros(30)}, "step": 3}


def save(path: object, state: Any = STATE, **options: Any) -> None:
    ckpt.save(state, path, no_dist=True, **options)  # type: ignore[arg-type]


def load(path: object, state: Any = None, **options: Any) -> None:
    ckpt.load(dict(STATE) if state is None else state, path, no_dist=True, **options)  # type: ignore[arg-type]


def message_of(do: Callable[[], Any]) -> str:
    with pytest.raises(ckpt.CheckpointError) as caught:
        do()
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- files and directories of another kind ----------------------------------------------------------------------------

CONVERT = "`dcp_nvcomp.convert` (or `dcp-nvcomp convert`) makes a checkpoint of"


def made(kind: str, at: Path) -> Path:
    """Make something that is no checkpoint, or not all of one, and return its path."""
    if kind == "torch file":
        torch.save(STATE, at / "x.pt")
        return at / "x.pt"
    if kind == "link to a torch file":
        (at / "link").symlink_to(made("torch file", at))
        return at / "link"
    if kind == "old torch file":
        torch.save(STATE, at / "x.pt", _use_new_zipfile_serialization=False)
        return at / "x.pt"
    if kind == "torch files":
        torch.save(STATE, at / "pytorch_model.bin")
        return at
    if kind == "one file":
        ckpt.save_compressed_checkpoint(STATE, at / "x.nvc")
        return at / "x.nvc"
    if kind == "stream":
        with StreamWriter(at / "x.pt", STATE) as stream:
            torch.save(STATE, stream)  # type: ignore[arg-type]
        return at / "x.pt"
    if kind == "zip":
        with zipfile.ZipFile(at / "x.zip", "w") as archive:
            archive.writestr("step/.metadata", "x")
        return at / "x.zip"
    if kind in ("empty", "junk"):
        (at / "x").write_bytes(b"junk" if kind == "junk" else b"")
        return at / "x"
    if kind == "run":
        for step in (9, 10):
            save(at / "run" / f"step-{step}")
        return at / "run"
    save(at / "step")
    if kind == "safetensors":
        ckpt.convert(at / "step", at / "x.safetensors", prefix="model.")
        return (at / "x.safetensors").rename(at / "weights")  # its bytes say what it is
    if kind == "safetensors files":
        ckpt.convert(at / "step", at / "hub", prefix="model.", to="safetensors")
        return at / "hub"
    if kind == "tar":
        with tarfile.open(at / "x.tar", "w") as tar:
            tar.add(at / "step", "step")
        return at / "x.tar"
    return data_file(at / "step") if kind == "data file" else at / "step" / ".metadata"


TORCH = ("a file of torch.save", f"torch.load reads it, and {CONVERT} it")
ALONE = f"`load_compressed_checkpoint` reads it, and {CONVERT} it"
OTHER_KINDS = [
    ("torch file", *TORCH),
    ("link to a torch file", *TORCH),
    ("old torch file", "a file of torch.save in its format before PyTorch 1.6", "torch.load reads it; what torch.save"),
    ("safetensors", "a safetensors file", f"{CONVERT} it"),
    ("safetensors files", "a directory of safetensors files", f"{CONVERT} them"),
    ("torch files", "a directory of files of torch.save", f"{CONVERT} each, such as 'pytorch_model.bin'"),
    ("one file", "a file of save_compressed_checkpoint", ALONE),
    ("stream", "a compressed stream, such as a file of torch.save", ALONE),
    ("data file", "a data file of a checkpoint", "give the directory that it is in, '"),
    ("metadata", "the metadata of a checkpoint", "give the directory that it is in, '"),
    ("run", "a directory with checkpoints below it", "give one of them, such as '"),
    ("zip", "a zip archive", "unpack it"),
    ("tar", "a tar archive", "unpack it"),
    ("empty", "an empty file", "a directory with `.metadata` in it"),
    ("junk", "a file of another format", "no call of this package reads it"),
]
kinds = pytest.mark.parametrize(("kind", "what", "advice"), OTHER_KINDS, ids=[kind for kind, _, _ in OTHER_KINDS])

READERS: list[Callable[[Any], Any]] = [
    load,
    ckpt.open_checkpoint,
    ckpt.tools.recover,
    ckpt.tools.consolidate,
    lambda path: ckpt.tools.compare(path, path),
    lambda path: ckpt.NvcompReader(path).read_metadata(),
]
STAND_ALONE = ("one file", "stream")  # which `inspect` and `verify` take


@kinds
def test_each_reader_says_what_is_there(tmp_path: Path, kind: str, what: str, advice: str) -> None:
    path = made(kind, tmp_path)
    more: list[Callable[[Any], Any]] = [] if kind in STAND_ALONE else [ckpt.tools.inspect, ckpt.tools.verify]
    for read in READERS + more:
        text = message_of(lambda read=read: read(path))  # type: ignore[misc]
        assert text.startswith(f"This is {what}, not a checkpoint: "), text
        assert advice in text
        assert text.endswith(f"(file {os.fspath(path)!r})")


@pytest.mark.ci
@kinds
def test_commands_say_the_same(tmp_path: Path, kind: str, what: str, advice: str) -> None:
    path = os.fspath(made(kind, tmp_path))
    if kind != "run":
        for command in ("ls", "clean"):
            result = CliRunner().invoke(app, [command, path, *(["--recursive"] if command == "clean" else [])])
            assert f"This is {what}, not the directory of a run or a checkpoint: " in result.stderr, result.stderr
    result = CliRunner().invoke(app, ["verify", path])
    if kind in STAND_ALONE:
        assert result.exit_code == 0 and f"{path} is sound" in result.stdout
        return
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: This is {what}, not a checkpoint: "), result.stderr
    assert advice in result.stderr


@pytest.mark.parametrize(
    "kind",
    ["data file", "metadata", "run", "torch files", "zip", "tar", "empty", "junk"],
)
def test_convert_says_what_it_can_not_take(tmp_path: Path, kind: str) -> None:
    path = made(kind, tmp_path)
    what = next(what for one, what, _ in OTHER_KINDS if one == kind)
    text = message_of(lambda: ckpt.convert(path, tmp_path / "made"))
    assert text.startswith(f"This is {what}, not a checkpoint, safetensors files or a file of torch.save: "), text


def test_convert_looks_at_what_a_file_is_and_not_at_its_name(tmp_path: Path) -> None:
    assert ckpt.convert(made("safetensors", tmp_path), tmp_path / "a").tensors == 2
    torch.save(STATE, tmp_path / "misnamed.json")
    assert ckpt.convert(tmp_path / "misnamed.json", tmp_path / "b").objects == 1


@kinds
def test_the_reader_of_single_files_says_it_too(tmp_path: Path, kind: str, what: str, advice: str) -> None:
    if kind in (*STAND_ALONE, "link to a torch file"):
        return
    path = made(kind, tmp_path)
    text = message_of(lambda: ckpt.load_compressed_checkpoint(path))
    assert text.startswith(f"This is {what}, not a file of save_compressed_checkpoint: "), text
    assert advice in text


def test_a_checkpoint_is_no_single_file(tmp_path: Path) -> None:
    save(tmp_path / "step")
    text = message_of(lambda: ckpt.load_compressed_checkpoint(tmp_path / "step"))
    assert "a checkpoint, which is a directory" in text and "`load` or `open_checkpoint` reads it" in text


def test_a_damaged_single_file_is_not_renamed(tmp_path: Path) -> None:
    path = made("one file", tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    assert "This is" not in message_of(lambda: ckpt.load_compressed_checkpoint(path))


def test_the_newest_step_of_a_run_is_named(tmp_path: Path) -> None:
    path = made("run", tmp_path)
    for step in range(1000, 1040):
        (path / f"step-{step}").mkdir()
        if step == 1030:
            save(path / "step-1030")
    assert f"such as '{path}/step-1030'" in message_of(lambda: load(path))


def test_clean_of_a_run_leads_to_recursive(tmp_path: Path) -> None:
    path = made("run", tmp_path)
    result = CliRunner().invoke(app, ["clean", os.fspath(path)])
    assert result.exit_code == 1 and "`dcp-nvcomp clean --recursive`, or `clean_run`" in result.stderr
    assert CliRunner().invoke(app, ["clean", "--recursive", os.fspath(path)]).exit_code == 0


def test_prune_says_what_is_there(tmp_path: Path) -> None:
    text = message_of(lambda: ckpt.runs.prune_run(made("torch file", tmp_path), ckpt.Keep(last=1)))
    assert text.startswith("This is a file of torch.save, not the directory of a run: ")
    save(tmp_path / "step")
    text = message_of(lambda: ckpt.runs.prune_run(tmp_path / "step", ckpt.Keep(last=1)))
    assert text.startswith("This is a checkpoint, which is a directory, not the directory of a run: "), text


def _put_everywhere(at: Path, url: str, **options: Any) -> None:
    """Put a file of torch.save, a run and a single file below a URL."""
    save(f"{url}/run/step-1", **options)
    ckpt.save_compressed_checkpoint(STATE, f"{url}/x.nvc", **options)
    fs, root = fsspec.url_to_fs(url, **options)
    fs.pipe_file(f"{root}/x.pt", made("torch file", at).read_bytes())


def _check_everywhere(url: str, **options: Any) -> None:
    for name, says in (
        ("x.pt", "This is a file of torch.save"),
        ("x.nvc", "This is a file of save_compressed_checkpoint"),
        ("run", f"give one of them, such as '{url}/run/step-1'"),
        ("run/step-1/.metadata", f"give the directory that it is in, '{url}/run/step-1'"),
        ("nothing", "no `.metadata` was found"),
    ):
        for read in (load, ckpt.open_checkpoint):
            text = message_of(lambda read=read, name=name: read(f"{url}/{name}", **options))  # type: ignore[misc]
            assert says in text, text


@pytest.mark.s3
@pytest.mark.parametrize("where", ["memory", "s3"])
def test_elsewhere_than_on_disk(tmp_path: Path, s3_store: S3Store, where: str) -> None:
    url, options = s3_store if where == "s3" else ("memory://kinds", {})
    _put_everywhere(tmp_path, url, **options)
    _check_everywhere(url, **options)
    if where == "s3":
        assert "no `.metadata` was found" in message_of(lambda: load(url.rpartition("/")[0], **options))


# --- advice that works ------------------------------------------------------------------------------------------------


def test_a_wrong_prefix_leads_to_the_right_one(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    save(tmp_path, {"net": {"model": module.state_dict()}, "ema": {"weight": torch.zeros(2, 3)}})
    with ckpt.open_checkpoint(tmp_path) as checkpoint:
        for wrong in ("", "model.", "model", "net.", "net.mdl.", "other.net.model."):
            text = message_of(lambda wrong=wrong: checkpoint.load_into(module, prefix=wrong))  # type: ignore[misc]
            assert f"There is no '{wrong}weight'" in text and "pass prefix='net.model.'." in text, text
        checkpoint.load_into(module, prefix="net.model.")


def test_a_prefix_where_there_is_none(tmp_path: Path) -> None:
    module = torch.nn.Linear(3, 2)
    save(tmp_path, module.state_dict())
    with ckpt.open_checkpoint(tmp_path) as checkpoint:
        assert "pass prefix=''." in message_of(lambda: checkpoint.load_into(module, prefix="model."))
        assert "'weight'" in message_of(lambda: checkpoint.load_into(torch.nn.PReLU(), prefix="weights."))


def test_of_two_prefixes_the_nearer_one_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"layers": {str(n): torch.nn.Linear(3, 2).state_dict() for n in range(12)}})
    with ckpt.open_checkpoint(tmp_path) as checkpoint:
        text = message_of(lambda: checkpoint.load_into(torch.nn.Linear(3, 2), prefix="layer.11."))
    assert "pass prefix='layers.11.'" in text


def test_reading_by_key_advises_no_nesting(tmp_path: Path) -> None:
    save(tmp_path)
    with ckpt.open_checkpoint(tmp_path) as checkpoint:
        text = message_of(lambda: checkpoint["weight"])
    assert "the checkpoint has 'model.weight'." in text and "pass" not in text and "prefix" not in text
    result = CliRunner().invoke(app, ["cat", str(tmp_path), "weight"])
    assert "the checkpoint has 'model.weight'." in result.stderr and "pass" not in result.stderr
    assert 'pass {"model": ...}' in message_of(lambda: load(tmp_path, {"weight": torch.ones(40, 30)}))


def test_convert_names_the_prefixes_that_there_are(tmp_path: Path) -> None:
    save(tmp_path / "step", {"net": {"model": {"w": torch.ones(3)}}, "optim": {"lr": 1}})
    for wrong, says in (
        ("nett.", "but with 'net.'"),
        ("model.", "but with 'net.model.'"),
        ("zzz.", "but with 'net.', 'optim.'"),
    ):
        text = message_of(lambda wrong=wrong: ckpt.convert(tmp_path / "step", tmp_path / "x", prefix=wrong))  # type: ignore[misc]
        assert f"No key begins with {wrong!r}, {says}." in text and str(tmp_path / "step") in text, text


LAYERS = {
    f"model.layers.{layer}.{block}.{name}.weight": None
    for layer in range(1000)
    for block in ("self_attn", "mlp", "norm", "cross", "router")
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "up", "down", "w1", "w2", "w3", "a", "b")
} | {f"optimizer.state.{number}.{name}": None for number in range(20_000) for name in ("exp_avg", "step")}


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("model.layers.1000.mlp.gate.weight", "has 'model.layers.999.mlp.gate.weight', 'model.layers.998.mlp"),
        ("model.layers.7.self_atn.q_proj.weight", "has 'model.layers.7.self_attn.q_proj.weight'"),
        ("model.layers.7.mlp.gate_proj.weight", "has 'model.layers.7.mlp."),
        ("decoder.layers.7.mlp.gate.weight", "has 'model.layers.7.mlp.gate.weight'"),
        ("optimizer.state.20001.step", "has 'optimizer.state.19999.step'"),
        ("epoch", "has 100000 keys, none of them like it: 60000 below 'model', 40000 below 'optimizer'."),
    ],
)
def test_the_nearest_of_many_keys_are_found_soon(wanted: str, says: str) -> None:
    assert len(LAYERS) == 100_000
    began = time.perf_counter()
    text = missing_key(wanted, LAYERS)
    assert says in text, text
    assert time.perf_counter() - began < 30  # a third of a second; comparing all of them letter by letter takes minutes


def test_of_few_keys_all_are_named() -> None:
    assert missing_key("epoch", {"b": 0, "a": 1}) == "There is no 'epoch'; the checkpoint has 'a', 'b'."
    assert missing_key("epoch", {}) == "There is no 'epoch'; the checkpoint has no keys at all."


SAVE, LOAD = "save", "load"
WRONG_OPTIONS = [
    (LOAD, "strict", "planner=DefaultLoadPlanner(allow_partial_load=True)"),
    (LOAD, "allow_partial_load", "planner=DefaultLoadPlanner(allow_partial_load=True)"),
    (LOAD, "map_location", "open_checkpoint(path, device=...)"),
    (LOAD, "weights_only", "safe_objects=True"),
    (LOAD, "keys", "read(keys)"),
    (LOAD, "level", "a load finds it in the checkpoint"),
    (LOAD, "codec", "an option of saves"),
    (LOAD, "overwrite", "an option of saves"),
    (LOAD, "world_size", "process_group="),
    (LOAD, "group", "did you mean 'process_group'?"),
    (LOAD, "num_workers", "did you mean 'thread_count'?"),
    (LOAD, "step", "CheckpointManager"),
    (LOAD, "path", "the path comes by its place"),
    (LOAD, "storage_options", "by name, as endpoint_url=..."),
    (LOAD, "use_collectives", "leave it out"),
    (LOAD, "account_key", "an option of az://, not of file://"),
    (SAVE, "level", "codec= chooses the compression"),
    (SAVE, "compression", "codec= chooses the compression"),
    (SAVE, "num_workers", "did you mean 'thread_count'?"),
    (SAVE, "async_", "async_save"),
    (SAVE, "asynchronous", "async_save"),
    (SAVE, "dtype", "convert(source, destination, dtype=...)"),
    (SAVE, "keep_last", "keep=Keep(last=3)"),
    (SAVE, "metadata", "CheckpointManager.save takes metrics="),
    (SAVE, "timeout", "storage_deadline_seconds="),
    (SAVE, "exist_ok", "did you mean 'overwrite'?"),
    (SAVE, "use_collectives", "dcp.save(state, storage_writer=NvcompWriter(path), use_collectives=False)"),
    (SAVE, "max_shard_size", "max_shard_nbytes="),
    (SAVE, "verify", "an option of loads"),
    (SAVE, "checksum", "tools.verify(path)"),
    (SAVE, "path", "the path comes by its place"),
    (SAVE, "endpoint_url", "an option of s3://, not of file://"),
]


@pytest.mark.parametrize(("call", "option", "says"), WRONG_OPTIONS, ids=lambda value: str(value)[:20])
def test_what_people_know_from_elsewhere(tmp_path: Path, call: str, option: str, says: str) -> None:
    do = save if call == SAVE else load
    text = message_of(lambda: do(tmp_path, **{option: 1}) if option != "path" else _by_name(call, tmp_path))
    assert f"Unknown option '{option}': " in text and says in text, text
    assert "auto_mkdir" not in text and "listings" not in text


def _by_name(call: str, path: Path) -> None:
    (ckpt.save if call == SAVE else ckpt.load)(dict(STATE), path=path, no_dist=True)  # type: ignore[operator]


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "az://container/x", "sftp://host/x", "memory://x"])
def test_on_storages_it_is_the_same(url: str) -> None:
    text = message_of(lambda: ckpt.NvcompReader(url, strict=False))
    assert "planner=DefaultLoadPlanner(allow_partial_load=True)" in text


def test_an_option_that_nobody_knows_names_the_calls_own(tmp_path: Path) -> None:
    text = message_of(lambda: load(tmp_path, xyzzy=1))
    assert "this call takes device_memory_budget, engine" in text and "file:// takes none" in text


class _Refused:
    """Not known to weights_only loading."""


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": {"other": torch.ones(3)}},
        {"model": {"weight": torch.ones(3)}},
        {"model": {"weight": torch.ones(40, 30).half()}},
        {"model": {"weight": 3}},
        {"step": torch.ones(3)},
        {"odd": 1},
    ],
    ids=["key", "shape", "dtype", "tensor", "object", "unsafe"],
)
def test_each_error_of_a_load_has_its_path(tmp_path: Path, wrong: Any) -> None:
    save(tmp_path, {**STATE, "odd": _Refused()})
    for do in (
        lambda: load(tmp_path, dict(wrong), safe_objects=True),
        lambda: ckpt.load(dict(wrong), storage_reader=ckpt.NvcompReader(tmp_path, safe_objects=True), no_dist=True),
    ):
        with pytest.raises(ckpt.CheckpointError) as caught:
            do()
        assert caught.value.path is not None and caught.value.path.startswith(str(tmp_path))
        assert str(tmp_path) in str(caught.value)


def test_a_name_that_no_storage_has_is_the_callers(tmp_path: Path) -> None:
    save(tmp_path / "step", {"w": torch.ones(3)})
    for name in ("a::b.safetensors", "a::b.pt", "x/a::b.safetensors", "s3:b.pt", "a\\b.pt"):
        text = message_of(lambda name=name: ckpt.convert(tmp_path / "step", tmp_path / name))  # type: ignore[misc]
        assert "can't be the name of a file here" in text and "checkpoint" not in text.split("(file")[0], text
    assert ckpt.convert(tmp_path / "step", tmp_path / "a::b").tensors == 1


class _Breaks:
    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise ValueError("duplicated flatten key")


def test_a_single_process_names_no_rank(tmp_path: Path) -> None:
    for do in (
        lambda: ckpt.save({"w": torch.ones(3)}, tmp_path, planner=_Breaks(), no_dist=True),  # type: ignore[arg-type]
        lambda: ckpt.load({"w": torch.ones(3)}, _saved(tmp_path / "step"), planner=_Breaks(), no_dist=True),  # type: ignore[arg-type]
    ):
        with pytest.raises(ckpt.RankFailedError) as caught:
            do()
        assert str(caught.value).startswith("ValueError: duplicated flatten key (raised in ")
        assert caught.value.failures == {0: "ValueError: duplicated flatten key"}
        assert isinstance(caught.value.__cause__, ValueError)


def _saved(path: Path) -> Path:
    save(path)
    return path


# --- checkpoints of stock DCP in the way ------------------------------------------------------------------------------


def _stock(path: Path) -> list[str]:
    dcp.save(
        {"w": torch.ones(3), "v": torch.ones(5)},
        storage_writer=dcp.FileSystemWriter(path, thread_count=2),
        no_dist=True,
    )
    return sorted(file.name for file in path.glob("*.distcp"))


def test_a_stock_checkpoint_is_not_replaced_without_a_word(tmp_path: Path) -> None:
    names = _stock(tmp_path)
    with pytest.warns(UserWarning, match="Detected an existing checkpoint of stock DCP.*its data files are") as caught:
        save(tmp_path)
    assert len(caught) == 1 and str(tmp_path) in str(caught[0].message)
    assert names and not any((tmp_path / name).exists() for name in names)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path)  # over one of this package


def test_where_warnings_are_errors_it_stays(tmp_path: Path) -> None:
    names = _stock(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ckpt.RankFailedError, match="overwriting it"):
            save(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".metadata", *names]
    state = {"w": torch.zeros(3)}
    load(tmp_path, state)
    assert torch.equal(state["w"], torch.ones(3))


def test_stocks_own_wording(tmp_path: Path) -> None:
    save(tmp_path)
    assert "Checkpoint already exists" in message_of(lambda: save(tmp_path, overwrite=False))
    _stock(tmp_path / "stock")
    assert "Checkpoint already exists" in message_of(lambda: save(tmp_path / "stock", overwrite=False))


def test_places_that_are_taken_by_something_else_are_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "directory").mkdir()
    assert "Something else has that name: give another path." in message_of(lambda: save(tmp_path / "file"))
    said = message_of(lambda: ckpt.CheckpointManager(tmp_path / "file", every=1, preemption_signals=()).save(1, STATE))
    assert "There is a file where a directory has to be: give another path." in said
    said = message_of(lambda: ckpt.save_compressed_checkpoint(STATE, tmp_path / "directory"))
    assert "There is a directory where a file has to be: give another path." in said
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == ["file"]
    assert "NotImplementedError. This storage can't do that" in message_of(lambda: save("http://127.0.0.1:1/x"))
