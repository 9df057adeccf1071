"""torch_checkpointing's manager through our storage: killed and resumed, and loaded on other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp.errors import CheckpointExistsError, CorruptDataError
from tests.checkpoints import flip
from tests.integrations.launch import check_resumed, needs, start
from tests.integrations.torch_checkpointing_storage import state
from tests.states import assert_same, blank

SAVED, LAST = 3, 5


@pytest.fixture(autouse=True)
def torch_checkpointing() -> None:
    needs("torch_checkpointing", "torch-checkpointing==0.1.1")


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make managers of one rank, and close them."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, CheckpointLoaderConfig
    from torch_checkpointing.staging import CheckpointStagerConfig

    from dcp_nvcomp.integrations.torch_checkpointing import NvcompStorageConfig

    made: list[Any] = []

    def make(**options: Any) -> Any:
        staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
        config = CheckpointManager.Config(
            storage_config=NvcompStorageConfig(tmp_path),
            save=AsyncCheckpointSaverConfig(staging_config=staging),
            load=CheckpointLoaderConfig(**options),
        )
        made.append(CheckpointManager(config))
        return made[-1]

    yield make
    for one in made:
        with contextlib.suppress(CheckpointExistsError):  # of a save that failed
            one.close()


@pytest.mark.ci
def test_the_manager(tmp_path: Path, manager: Callable[..., Any]) -> None:
    mine = manager()
    for number in (1, 2):
        mine.save(f"step-{number}", {"model": state(number), "step": number}).result()
    for number in (1, 2):
        into = blank({"model": state(number), "step": number})
        assert_same(dict(mine.load(f"step-{number}", into=into)), {"model": state(number), "step": number})
    with pytest.raises(CheckpointExistsError):  # it names the error of the process that writes
        mine.save("step-1", {"model": state(5), "step": 5}).result()
    into = blank({"model": state(1), "step": 1})
    again = manager(use_mmap=False)
    assert_same(dict(again.load("step-1", into=into)), {"model": state(1), "step": 1})
    again.save("step-4", {"model": state(4)}).result()
    (file,) = (tmp_path / "step-1").glob(".data-*/model_0.pt")
    flip(file, file.stat().st_size // 3)
    with pytest.raises(CorruptDataError):
        mine.load("step-1", into=blank({"model": state(1)}))
    with pytest.raises(Exception):  # noqa: B017, PT011  # torch may raise another error over ours
        again.load("step-1", into=blank({"model": state(1)}))
    with pytest.raises(FileNotFoundError):
        mine.load("step-3", into=blank({"model": state(1)}))


@pytest.mark.ci
@pytest.mark.parametrize("ranks", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))])
def test_killed_and_resumed(tmp_path: Path, ranks: int) -> None:
    start("torch_checkpointing", tmp_path, "train", killed=True, ranks=ranks)
    assert sorted(path.name for path in (tmp_path / "run").glob("*/.commit.json")) == [".commit.json"]
    start("torch_checkpointing", tmp_path, "resume", ranks=ranks)
    check_resumed(tmp_path, SAVED, LAST, ranks)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
def test_other_ranks_and_placements(tmp_path: Path, saved: int, loaded: int) -> None:
    """From rows to columns, too."""
    start("torch_checkpointing", tmp_path, "save", ranks=saved)
    output = start("torch_checkpointing", tmp_path, "reshard", ranks=loaded)
    assert output.count("resharded exactly") == 2 * loaded


@pytest.mark.slow
def test_a_commit_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    """Of which the library tells rank 0 alone."""
    output = start("torch_checkpointing", tmp_path, "refused")
    assert "rank 0 is refused" in output and "rank 1 believes that it is saved" in output
    assert output.count("what was committed is there") == 2
