"""DeepSpeed: ZeRO jobs that are saved, killed and resumed, and the engine's files one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_nvcomp import load_compressed_checkpoint, save_compressed_checkpoint
from dcp_nvcomp.errors import CheckpointError, ConfigurationError, UnsafeObjectError
from tests.integrations.jobs.common import digest
from tests.integrations.launch import check_resumed, needs, notes, start

SAVED, LAST = 3, 5


@pytest.fixture(autouse=True)
def deepspeed() -> None:
    needs("deepspeed", "deepspeed==0.19.*")


@pytest.mark.ci
@pytest.mark.parametrize(
    "options",
    [
        ("1", "bf16"),
        pytest.param(("3",), marks=pytest.mark.slow),
        pytest.param(("2", "bf16"), marks=pytest.mark.slow),
        pytest.param(("3", "bf16", "plain"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_killed_and_resumed(tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    start("deepspeed", tmp_path, "train", *options, killed=True)
    run = tmp_path / "run"
    assert (run / "latest").read_text() == f"global_step{SAVED}"  # neither failed saves nor one that was killed
    if "plain" not in options:
        found = notes(tmp_path)
        assert [found[rank, "train", "failed", LAST] for rank in (0, 1)] == [digest(True)] * 2
        files = list((run / f"global_step{SAVED}").glob("*.pt"))
        states = [_loaded(file) for file in files]
        assert len({state["dcp_nvcomp_save_id"] for state in states}) == 1
        if options[0] == "1":
            _check_other_programs(run, tmp_path / "plain")
    start("deepspeed", tmp_path, "resume", *options)
    check_resumed(tmp_path, SAVED, LAST)


def _check_other_programs(run: Path, plain: Path) -> None:
    """Check the page's recipe: files as torch.save writes them, which DeepSpeed's own programs read."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    page = (Path(__file__).parents[2] / "docs" / "frameworks" / "deepspeed.md").read_text()
    recipe = page.split("```python\n")[-1].split("```")[0]
    names = {"source": run, "target": plain, "tag": f"global_step{SAVED}"}
    exec(compile(recipe, "deepspeed.md", "exec"), names)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(plain))
    assert sorted(weights) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def _loaded(path: Path) -> Any:
    from dcp_nvcomp.integrations.deepspeed import _CLASSES

    return load_compressed_checkpoint(path, trusted_globals=_CLASSES)


def _engine(**options: Any) -> Any:
    from dcp_nvcomp.integrations.deepspeed import NvcompCheckpointEngine

    return NvcompCheckpointEngine(**options)


def _saved(engine: Any, directory: Path, states: dict[str, Any]) -> None:
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

    info = CheckpointCommitInfo(tag=directory.name, save_dir=str(directory.parent), save_latest=True)
    engine.create(info)
    engine.makedirs(str(directory), exist_ok=True)
    for name, state in states.items():
        engine.save(state, str(directory / name))
    assert engine.commit(info)


STATE = {"w": torch.rand(100_000, generator=torch.Generator().manual_seed(0)), "client": (1, "a")}


def test_a_file_is_smaller_and_comes_back(tmp_path: Path) -> None:
    engine, weights = _engine(thread_count=1), torch.nn.Linear(300, 300).state_dict()
    _saved(engine, tmp_path / "tag", {"a.pt": STATE | {"model": weights}})
    loaded = engine.load(str(tmp_path / "tag" / "a.pt"), map_location=lambda storage, place: storage)
    assert digest(loaded) == digest(STATE | {"model": weights}) and loaded.keys() == {*STATE, "model"}
    torch.save(STATE | {"model": weights}, tmp_path / "plain.pt")
    assert (tmp_path / "tag" / "a.pt").stat().st_size < 0.9 * (tmp_path / "plain.pt").stat().st_size


def test_what_is_not_of_a_checkpoint_has_no_key_of_ours(tmp_path: Path) -> None:
    """`save_16bit_model` writes beside the tag."""
    engine = _engine()
    _saved(engine, tmp_path / "tag", {"../weights.bin": STATE})
    assert load_compressed_checkpoint(tmp_path / "weights.bin").keys() == STATE.keys()


@pytest.mark.parametrize("zipped", [False, True])
def test_plain_files_are_loaded(tmp_path: Path, zipped: bool) -> None:
    torch.save(STATE, tmp_path / "plain.pt", _use_new_zipfile_serialization=zipped)
    assert digest(_engine().load(str(tmp_path / "plain.pt"), map_location="cpu")) == digest(STATE)


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    engine, tag = _engine(), tmp_path / "tag"
    _saved(engine, tag, {"a.pt": STATE, "b.pt": STATE})
    old = (tag / "b.pt").read_bytes()
    _saved(engine, tag, {"a.pt": STATE, "b.pt": STATE})
    assert digest(engine.load(str(tag / "a.pt"))) == digest(engine.load(str(tag / "b.pt")))
    (tag / "b.pt").write_bytes(old)  # as if the later save had been killed before this one
    engine = _engine()
    engine.load(str(tag / "a.pt"))
    with pytest.raises(CheckpointError, match="two saves with the same tag") as caught:
        engine.load(str(tag / "b.pt"))
    assert caught.value.path == str(tag / "b.pt")


def test_a_checkpoint_that_was_saved_anew_is_loaded_again(tmp_path: Path) -> None:
    writing, reading, tag = _engine(), _engine(), tmp_path / "tag"
    for _ in range(2):
        _saved(writing, tag, {"a.pt": STATE, "b.pt": STATE})
        for name in ("a.pt", "b.pt"):
            assert digest(reading.load(str(tag / name))) == digest(STATE)


@pytest.mark.parametrize("at", [0, 3, 100, 10_000, -1, -20])
def test_a_changed_byte_is_found(tmp_path: Path, at: int) -> None:
    save_compressed_checkpoint(STATE, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[at] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointError):
        _engine().load(str(tmp_path / "a.pt"))


def test_a_failure_is_raised_where_ranks_meet(tmp_path: Path) -> None:
    engine = _engine()
    (tmp_path / "tag" / "a.pt").mkdir(parents=True)
    with pytest.raises(CheckpointError):
        _saved(engine, tmp_path / "tag", {"a.pt": STATE, "b.pt": STATE})
    assert digest(engine.load(str(tmp_path / "tag" / "b.pt"))) == digest(STATE)


class Own:
    pass


def test_objects(tmp_path: Path) -> None:
    engine = _engine()
    _saved(engine, tmp_path / "tag", {"a.pt": {"own": Own()}})
    with pytest.raises(UnsafeObjectError, match="Own"):
        engine.load(str(tmp_path / "tag" / "a.pt"))
    trusting = _engine(trusted_globals=[f"{__name__}.Own"])
    assert isinstance(trusting.load(str(tmp_path / "tag" / "a.pt"))["own"], Own)


def test_options_are_checked_at_once() -> None:
    with pytest.raises(ConfigurationError, match="codecs"):
        _engine(codecs="auto")
