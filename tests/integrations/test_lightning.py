"""Lightning's strategies for sharded models, with `Trainer` and with `Fabric`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import CheckpointException

from dcp_nvcomp import ConfigurationError, StorageError, open_checkpoint
from dcp_nvcomp.storage.local.filesystem import PosixFilesystem
from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, start

pytestmark = pytest.mark.ci
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "which", ["trainer-fsdp", "fabric-mp", *(pytest.param(one, marks=SLOW) for one in ("trainer-mp", "fabric-fsdp"))]
)
def test_saved_killed_and_resumed(tmp_path: Path, which: str) -> None:
    needs("lightning", "lightning==2.6.6")
    start("lightning", tmp_path, "train", which, killed=True)
    start("lightning", tmp_path, "resume", which)
    check_resumed(tmp_path, saved=2, last=4)
    assert (tmp_path / "step-2" / "meta.pt").exists()
    check_ours(tmp_path / "step-2")
    if which.startswith("trainer"):
        kept = tmp_path / "kept"  # of ModelCheckpoint, which removes old ones and links to the last
        assert (kept / "last.ckpt").is_symlink()
        check_ours(kept / "last.ckpt")
    check_cleaned(tmp_path, tmp_path / "step-2")


def test_wrong_options_fail_at_once() -> None:
    needs("lightning", "lightning==2.6.6")
    from dcp_nvcomp.integrations.lightning import NvcompModelParallelStrategy

    with pytest.raises(ConfigurationError, match="nosuch"):
        NvcompModelParallelStrategy(writer={"codec": "nosuch"})


def test_a_lightning_that_loads_otherwise_is_refused_before_a_save() -> None:
    needs("lightning", "lightning==2.6.6")
    from dcp_nvcomp.integrations.lightning import _Installing

    class Other:
        def save_checkpoint(self) -> None:
            pass

    class Ours(_Installing, Other):
        pass

    with pytest.raises(ConfigurationError, match=r"lightning 2\..* has no method load_checkpoint"):
        Ours()


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


@pytest.fixture
def strategy() -> Any:
    """A strategy that saves in this process, without a trainer."""
    needs("lightning", "lightning==2.6.6")
    from dcp_nvcomp.integrations.lightning import NvcompModelParallelStrategy

    class Alone(NvcompModelParallelStrategy):
        global_rank = 0

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return obj

    made = Alone()
    made._save_distributed_checkpoint = True
    return made


def checkpoint(step: int) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((3,), float(step))}, "optimizer_states": [], "global_step": step}


def what_is_there(path: Path) -> tuple[float, int | None]:
    """Return the step of the weights, and that of what Lightning takes for a checkpoint."""
    from lightning.fabric.strategies.fsdp import _is_sharded_checkpoint

    step = torch.load(path / "meta.pt")["global_step"] if _is_sharded_checkpoint(path) else None
    return open_checkpoint(path)["state_dict.w"][0].item(), step


class TestOneDirectoryForManySaves:
    """ModelCheckpoint(save_last=True) saves to one directory: the old meta.pt must not meet new weights."""

    def test_whole(self, strategy: Any, tmp_path: Path) -> None:
        for step in (1, 2):
            strategy.save_checkpoint(checkpoint(step), tmp_path / "last.ckpt")
            assert what_is_there(tmp_path / "last.ckpt") == (step, step)
        assert [one.name for one in (tmp_path / "last.ckpt").glob("meta*")] == ["meta.pt"]

    def test_killed_before_meta_pt(self, strategy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        strategy.save_checkpoint(checkpoint(1), tmp_path)

        def killed(*arguments: Any, **options: Any) -> None:
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", killed)
            with pytest.raises(Killed):
                strategy.save_checkpoint(checkpoint(2), tmp_path)
        assert what_is_there(tmp_path) == (2, None)
        strategy.save_checkpoint(checkpoint(3), tmp_path)
        assert what_is_there(tmp_path) == (3, 3)

    @pytest.mark.parametrize("error", [Killed(), StorageError("full", path="x")])
    def test_a_save_that_fails_leaves_the_old_one(
        self, strategy: Any, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        strategy.save_checkpoint(checkpoint(1), tmp_path)
        publish = PosixFilesystem.publish

        def failing(self: Any, name: str, data: bytes, **options: Any) -> None:
            if name == ".metadata":
                raise error
            publish(self, name, data, **options)

        with monkeypatch.context() as patch:
            patch.setattr(PosixFilesystem, "publish", failing)
            with pytest.raises((Killed, CheckpointException)):
                strategy.save_checkpoint(checkpoint(2), tmp_path)
        assert what_is_there(tmp_path) == (1, 1)
