"""A fast tier is the user's own: what another user put there, or may put there, is not unpickled."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_nvcomp import CheckpointManager, ConfigurationError, StorageError, load
from dcp_nvcomp.errors import UnsafePathError
from dcp_nvcomp.runs import pin_step
from dcp_nvcomp.runs.steps import StepNames
from dcp_nvcomp.runs.tiers.durable import DurableTier
from dcp_nvcomp.runs.tiers.fast import FastTier
from dcp_nvcomp.runs.tiers.trust import fault_below, own_directory

Foreign = Callable[[Path], None]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Foreign:
    """Returns a function that makes a file another user's; where only root could, this process takes another id."""

    def make(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534, follow_symlinks=False)
        else:
            other = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: other)

    return make


def _manager(path: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(
        path / "run", every=1000, fast=path / "fast", fast_every=10, run_id="job", preemption_signals=(), **options
    )


def _state(value: int) -> dict[str, Any]:
    return {"config": {"lr": value}}


def _saved(path: Path, *steps: int) -> None:
    with _manager(path) as manager:
        for step in steps:
            manager.save(step, _state(step))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_what_is_made_is_for_the_user_alone(tmp_path: Path) -> None:
    own_directory(str(tmp_path / "above" / "fast"))
    assert [_mode(tmp_path / name) for name in ("above", "above/fast")] == [0o700, 0o700]
    own_directory(str(tmp_path / "above" / "fast"))  # again, as the next rank does


@pytest.fixture
def group_writes() -> Iterator[None]:
    """The umask of users that have a group of their own."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_what_is_made_in_it_is_not_distrusted(tmp_path: Path, group_writes: None) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast").chmod(0o755)
    _saved(tmp_path, 10)
    assert [_mode(tmp_path / "fast" / name) for name in (".", ".run", "step-10")] == [0o755, 0o700, 0o700]
    with _manager(tmp_path) as manager:  # and takes its `.run` for its own
        assert (restored := manager.restore(_state(0))) is not None and restored.step == 10


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast").chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"has mode {mode:04o}.*chmod 700 {tmp_path}/fast"):
        _manager(tmp_path)
    (tmp_path / "fast").chmod(0o700)
    _manager(tmp_path).close()


def test_a_directory_of_another_user_is_refused(tmp_path: Path, foreign: Foreign) -> None:
    (tmp_path / "fast").mkdir(mode=0o700)
    foreign(tmp_path / "fast")
    with pytest.raises(ConfigurationError, match=r"fast=.* belongs to user \d+, .*choose a directory of your own"):
        _manager(tmp_path)


def test_a_link_is_refused_and_a_file_passed_by(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "fast").symlink_to("elsewhere")
    with pytest.raises(ConfigurationError, match="is a symbolic link"):
        _manager(tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())
    (tmp_path / "fast").unlink()
    (tmp_path / "fast").write_bytes(b"")
    with _manager(tmp_path) as manager:
        save = manager.save(10, _state(10))
    assert save.tiers == ("durable",)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_directory_that_others_may_replace_is_refused(tmp_path: Path, depth: int) -> None:
    fast = tmp_path / "shared" / "between" / "fast"
    fast.parent.mkdir(parents=True)
    loose = fast.parents[depth - 1]
    loose.chmod(0o777)
    with pytest.raises(ConfigurationError, match=rf"could be replaced by other users: {loose} "):
        own_directory(str(fast))
    loose.chmod(0o1777)  # as /tmp and /dev/shm are
    own_directory(str(fast))


@pytest.mark.parametrize("target", ["absolute", "relative"])
def test_links_on_the_way_that_others_may_replace_are_refused(tmp_path: Path, target: str) -> None:
    loose, disk = tmp_path / "loose", tmp_path / "disk"
    loose.mkdir()
    disk.mkdir(mode=0o700)
    (loose / "mine").symlink_to(disk if target == "absolute" else Path("..", "disk"))
    (tmp_path / "start").symlink_to(loose / "mine")
    loose.chmod(0o777)
    for fast in (loose / "mine" / "fast", tmp_path / "start" / "fast"):
        with pytest.raises(ConfigurationError, match=rf"could be replaced by other users: {loose} lets them"):
            own_directory(str(fast))
    loose.chmod(0o1777)
    own_directory(str(tmp_path / "start" / "fast"))


def test_links_on_the_way_belong_to_root_or_the_user_and_directories_to_anyone(tmp_path: Path) -> None:
    if os.geteuid() != 0:  # only root can give something away
        return
    (tmp_path / "disk").mkdir()
    (tmp_path / "above").symlink_to("disk")
    os.chown(tmp_path / "above", 4321, -1, follow_symlinks=False)
    with pytest.raises(ConfigurationError, match=rf"replaced by other users: {tmp_path}/above belongs to user 4321"):
        own_directory(str(tmp_path / "above" / "fast"))
    os.chown(tmp_path / "disk", 4321, -1)  # a project's, or what a container is given
    own_directory(str(tmp_path / "disk" / "fast"))


def test_the_runs_own_directory_is_looked_at_too(tmp_path: Path, foreign: Foreign) -> None:
    _saved(tmp_path, 10)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "fast" / ".run").rename(tmp_path / "fast" / "gone")
    (tmp_path / "fast" / ".run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match=r"\.run is not to be trusted: it is a symbolic link"):
        _manager(tmp_path)
    (tmp_path / "fast" / ".run").unlink()
    (tmp_path / "fast" / "gone").rename(tmp_path / "fast" / ".run")
    if os.geteuid() == 0:  # for others all of it would be foreign
        foreign(tmp_path / "fast" / ".run" / "run")
        with pytest.raises(ConfigurationError, match=r"\.run is not to be trusted: 'run' in it belongs to user 65534"):
            _manager(tmp_path)


def test_a_directory_that_cannot_be_made_is_a_failure_of_the_storage(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        own_directory(str(tmp_path / "file" / "fast"))


@pytest.mark.parametrize("name", [".", ".metadata"])
def test_a_step_of_another_user_counts_as_not_there(
    tmp_path: Path, foreign: Foreign, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    _saved(tmp_path, 10)
    tier = FastTier(str(tmp_path / "fast"), StepNames())
    tier.claim((tmp_path / "fast" / ".run" / "run").read_text())
    assert tier.held()[0].wanted
    foreign(tmp_path / "fast" / "step-10" / name)
    caplog.clear()
    with caplog.at_level("WARNING", logger="dcp_nvcomp"):
        assert [(held.saved, held.wanted, held.held) for held in (*tier.held(), *tier.held())] == [(None, {}, {})] * 2
    (line,) = caplog.messages
    assert "Step 10" in line and "belongs to user" in line


def test_a_step_of_another_user_is_not_restored(tmp_path: Path, foreign: Foreign) -> None:
    _saved(tmp_path, 10, 20)
    if os.geteuid() != 0:  # this process can't be the owner of one and not of the other
        return
    foreign(tmp_path / "fast" / "step-20")
    with _manager(tmp_path) as manager:
        restored = manager.restore(state := _state(0))
        assert restored is not None and (restored.step, state) == (10, _state(10))


def test_links_in_a_step_count_as_not_there(tmp_path: Path) -> None:
    _saved(tmp_path, 10)
    step = tmp_path / "fast" / "step-10"
    assert fault_below(str(step.parent), step.name) is None
    (step / "__9_0_ab.distcp").symlink_to("/etc/hostname")
    assert fault_below(str(step.parent), step.name) == "'__9_0_ab.distcp' in it is a symbolic link"


def test_modes_inside_count_only_where_others_can_get(tmp_path: Path) -> None:
    _saved(tmp_path, 10)
    fast, step = tmp_path / "fast", tmp_path / "fast" / "step-10"
    step.chmod(0o777)
    assert fault_below(str(fast), step.name) is None
    fast.chmod(0o755)
    step.chmod(0o700)
    (step / ".metadata").chmod(0o666)
    assert fault_below(str(fast), step.name) is None
    step.chmod(0o777)
    assert fault_below(str(fast), step.name) == "it has mode 0777, so that other users may write to it"
    step.chmod(0o755)
    assert fault_below(str(fast), step.name) == "others may write to '.metadata' in it"


# ---- links in the durable tier


def _listing(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*"))


def _durable(path: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(path / "run", every=10, run_id="job", preemption_signals=(), **options)


def _with_linked_step(path: Path, step: int = 10) -> Path:
    """Save steps 10 and 20, and put a link to a directory elsewhere in the place of one."""
    with _durable(path) as manager:
        for number in (10, 20):
            manager.save(number, _state(number))
    (path / "run" / f"step-{step}").rename(path / "elsewhere")
    (path / "run" / f"step-{step}").symlink_to(path / "elsewhere")
    return path / "elsewhere"


def test_a_step_that_is_a_link_is_read_through(tmp_path: Path) -> None:
    _with_linked_step(tmp_path)
    load(state := _state(0), tmp_path / "run" / "step-10", no_dist=True)
    assert state == _state(10)


def _save_after_restore(manager: CheckpointManager, step: int = 10) -> None:
    with manager:
        manager.restore(_state(0))
        manager.save(step, _state(11), durable=True)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_step_that_is_a_link_is_not_written_through(tmp_path: Path, asynchronous: bool) -> None:
    elsewhere = _with_linked_step(tmp_path, 20)
    before = _listing(elsewhere)
    with pytest.raises(UnsafePathError, match="symbolic link"):
        _save_after_restore(_durable(tmp_path, asynchronous=asynchronous), 20)
    assert _listing(elsewhere) == before


def test_an_upload_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    manager = _manager(tmp_path)
    (tmp_path / "run" / "step-10").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafePathError, match="symbolic link"):
        _save_after_restore(manager)
    assert not _listing(tmp_path / "elsewhere")


def test_a_step_that_is_a_link_is_not_removed_through(tmp_path: Path) -> None:
    elsewhere = _with_linked_step(tmp_path)
    before = _listing(elsewhere)
    removed = DurableTier(str(tmp_path / "run"), StepNames()).remove({10: "a test", 20: "a test"})
    assert removed.steps == (20,) and isinstance(removed.failed[10], UnsafePathError)
    assert _listing(elsewhere) == before


def test_the_runs_own_directory_as_a_link_is_not_written_through(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    with _durable(tmp_path) as manager:
        manager.save(10, _state(10))
    (tmp_path / "run" / ".run").rename(elsewhere)
    (tmp_path / "run" / ".run").symlink_to(elsewhere)
    before = _listing(elsewhere)
    with pytest.raises(UnsafePathError, match="symbolic link"):
        _durable(tmp_path)
    with pytest.raises(UnsafePathError, match="symbolic link"):
        pin_step(tmp_path / "run", 10)
    assert _listing(elsewhere) == before


def test_the_root_of_a_run_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    with _durable(tmp_path) as manager:
        manager.save(10, _state(10))
    assert (tmp_path / "disk" / "step-10" / ".metadata").exists()
