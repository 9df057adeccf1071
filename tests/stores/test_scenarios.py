"""What one does with checkpoints, from the first save to the last cleaning, on every kind of storage."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_nvcomp import (
    CheckpointManager,
    CheckpointNotFoundError,
    Keep,
    NvcompReader,
    NvcompWriter,
    async_save,
    errors,
    open_checkpoint,
    tools,
)
from dcp_nvcomp.maintenance.recovery import RECOVERED
from dcp_nvcomp.runs import list_run, prune_run
from tests.checkpoints import assert_holds, load
from tests.conformance.plugins import OURS, OURS_FROM_STOCK, Plugin, quiet_stock
from tests.conformance.values import all_values
from tests.distributed.launch import RankPool
from tests.states import State, assert_same, assert_same_bits, opposite_of

from .kinds import EVERYWHERE, on
from .places import PART_NBYTES, Place

pytestmark = [pytest.mark.filterwarnings("ignore:.*can't replace a file in one step"), *quiet_stock]


@pytest.mark.ci
@EVERYWHERE
def test_save_load_overwrite(place: Place) -> None:
    writer = place.writer()
    for number in (1, 2):
        assert place.save(number, writer) is None
        assert place.loaded() == number
    assert place.save(3) is None  # by another process, say
    assert place.save(4, writer) is None
    assert place.loaded(verify="full") == 4
    assert len(place.names()) == 3 and place.left() == set()
    assert tools.verify(place.url, full=True, storage_options=place.options).is_sound


@pytest.mark.ci
@EVERYWHERE
def test_in_parts(place: Place) -> None:
    """Files of several parts of an upload, and of several threads."""
    large = place.with_nbytes(3 * PART_NBYTES + 8)
    for number in (1, 2):
        assert large.save(number, large.writer(thread_count=2, single_file_per_rank=False)) is None
        assert large.loaded(thread_count=2) == number
    assert large.left() == set()


@EVERYWHERE
def test_without_overwriting(place: Place) -> None:
    assert place.save(1, place.writer(overwrite=False)) is None
    names = place.names()
    refused = place.save(2, place.writer(overwrite=False))
    assert isinstance(refused, errors.CheckpointExistsError)
    assert place.loaded() == 1 and place.names() == names


def test_nothing_there(place: Place) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        NvcompReader(place.url, **place.options).read_metadata()
    assert place.url in str(caught.value)


def test_partial_load(place: Place) -> None:
    assert place.save(1) is None
    found = load(place.url, {"b": place.state(1)["b"]}, **place.options)
    assert_same(found, {"b": place.state(1)["b"]})
    with open_checkpoint(place.url, **place.options) as checkpoint:
        assert set(checkpoint.keys()) == set(place.state(1))
        assert_same_bits(checkpoint["w"][10:12], place.state(1)["w"][10:12])


def _rows(number: int) -> torch.Tensor:
    return torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5) * number


def _sharded(value: torch.Tensor, dim: int) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)


def _save_rows_and_load_columns(url: str, options: dict[str, Any]) -> None:
    dcp.save({"w": _sharded(_rows(3), 0)}, storage_writer=NvcompWriter(url, **options))
    state = {"w": _sharded(opposite_of(_rows(3)), 1)}
    dcp.load(state, storage_reader=NvcompReader(url, **options))
    assert_same_bits(state["w"].to_local(), _sharded(_rows(3), 1).to_local())


@pytest.mark.ci
def test_reshard(place: Place, ranks: RankPool) -> None:
    """Saved by two ranks, each its rows; loaded by both, each its columns, and by one."""
    ranks.run(_save_rows_and_load_columns, place.url, place.options, world_size=2)
    found = load(place.url, {"w": _rows(3)}, **place.options)
    assert_same_bits(found["w"], _rows(3))


@pytest.mark.ci
@on("moto", "ceph", "azure", "gcs")
@pytest.mark.filterwarnings("ignore:Sending a large body directly")  # adlfs does, under stock's writer
@pytest.mark.parametrize("plugin", [OURS, OURS_FROM_STOCK], ids=str)
def test_every_value(place: Place, plugin: Plugin) -> None:
    options = dict(place.options)
    if place.url.startswith("az:"):  # as adlfs takes them too
        account, key, endpoint = (options[name] for name in ("account_name", "account_key", "endpoint"))
        options = {"connection_string": f"AccountName={account};AccountKey={key};BlobEndpoint={endpoint};"}
    dcp.save(all_values(), storage_writer=plugin.writer(place.url, **options))
    assert_holds(plugin.reader(place.url, **options), all_values())


@EVERYWHERE
def test_async_save(place: Place) -> None:
    state = place.state(1)
    saving = async_save(state, place.url, **place.options)
    state["w"].zero_()
    saving.upload_completion.result(timeout=120)
    assert place.loaded() == 1
    assert len(place.names()) == 3


@pytest.mark.ci
@EVERYWHERE
def test_verify(place: Place) -> None:
    assert place.save(1) is None
    filesystem = place.filesystem()
    (name,) = [name for name in filesystem.list_names() if name.endswith(".distcp")]
    damaged = bytearray(filesystem.read_all(name, limit_nbytes=1 << 24))
    damaged[5000] ^= 1
    filesystem.remove([name])
    stream = filesystem.open_output(name)
    stream.write(bytes(damaged))
    stream.close()
    found = tools.verify(place.url, storage_options=place.options)
    assert not found.is_sound and any(name in str(finding) for finding in found.findings)
    with pytest.raises(dcp.CheckpointException):
        place.loaded()


@pytest.mark.ci
@EVERYWHERE
def test_recover(place: Place) -> None:
    for number in (1, 2):
        assert place.save(number) is None
    place.filesystem().remove([".metadata"])
    with pytest.raises(errors.IncompleteCheckpointError, match="recover"):
        NvcompReader(place.url, **place.options).read_metadata()
    assert tools.recover(place.url, storage_options=place.options).outcome == RECOVERED
    assert place.loaded() == 2 and len(place.names()) == 3


@pytest.mark.ci
@EVERYWHERE
def test_clean(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a save would leave that was killed: nothing of it goes before its time, and then all of it."""
    assert place.save(1) is None
    live = place.names()
    filesystem, name = place.filesystem(), f"__0_0_{uuid.uuid4().hex}.distcp"
    stream = filesystem.open_output(name)
    stream.write(bytes(1000))
    stream.close()
    cleaning = tools.clean(place.url, storage_options=place.options)
    assert (cleaning.orphans, cleaning.young) == ((), 1)
    assert [orphan.name for orphan in place.clean(monkeypatch, dry_run=True).orphans] == [name]
    assert place.names() == {*live, name}
    assert [orphan.name for orphan in place.clean(monkeypatch).orphans] == [name]
    assert place.names() == live and place.loaded() == 1


@pytest.mark.ci
@on("disk", "mounted", "moto", "ceph", "azure", "gcs", "sftp", "smb", "ftp", "memory", "plain-moving")
def test_a_run(place: Place) -> None:
    with CheckpointManager(place.url, every=1, keep=Keep(last=2), run_id="job", **place.options) as manager:
        for step in (1, 2, 3):
            manager.save(step, place.state(step))
        manager.wait()
    run = list_run(place.url, storage_options=place.options)
    assert [step.step for step in run.steps] == [2, 3]
    state = place.state(0)
    with CheckpointManager(place.url, run_id="job", **place.options) as manager:
        restored = manager.restore(state)
    assert restored is not None and restored.step == 3
    assert_same(state, place.state(3))


@pytest.mark.ci
@on("disk", "mounted", "moto", "ceph", "azure", "gcs", "sftp", "smb", "ftp", "memory", "plain-moving")
def test_a_run_whose_steps_share_files(place: Place) -> None:
    def state(step: int) -> State:
        return place.state(step) | {"frozen": torch.arange(50_000)}

    step_url = f"{place.url}/step-{{}}"
    with CheckpointManager(place.url, every=1, run_id="job", incremental=True, **place.options) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step))
            manager.wait()  # the next one shares with what is published
    run = list_run(place.url, storage_options=place.options)
    assert [(step.step, step.shares) for step in run.steps] == [(1, ()), (2, ("step-1",)), (3, ("step-1",))]
    removed = prune_run(place.url, Keep(last=1), storage_options=place.options).removed
    assert [step.step for step in removed] == [2]
    assert tools.clean(step_url.format(1), storage_options=place.options).orphans == ()
    assert tools.verify(step_url.format(3), full=True, storage_options=place.options).is_sound
    found = state(0)
    with CheckpointManager(place.url, run_id="job", incremental=True, **place.options) as manager:
        restored = manager.restore(found)
        assert restored is not None and restored.step == 3
        assert_same(found, state(3))
        manager.save(4, state(4))
    tools.consolidate(step_url.format(4), storage_options=place.options)
    removed = prune_run(place.url, Keep(last=1), storage_options=place.options).removed
    assert [step.step for step in removed] == [1, 3]
    assert_same(load(step_url.format(4), state(0), **place.options), state(4))


def test_a_chain_that_keeps_whole_files_reads_what_it_first_read(tmp_path: Path) -> None:
    """Of a path that is overwritten it gives the earlier checkpoint, whole: for paths that are written once."""
    plain, cached = Place(str(tmp_path / "run"), {}), Place(f"simplecache::file://{tmp_path}/run", {})
    assert cached.save(1) is None
    assert cached.loaded() == plain.loaded() == 1
    assert cached.save(2) is None
    assert plain.loaded() == 2 and cached.loaded() in (1, 2)


def test_an_ftp_server_that_is_killed(kind_named: Callable[[str], Any]) -> None:
    """Its client can't connect again: the save fails, and the next one of another process goes through."""
    kind = kind_named("ftp")
    place = Place(*kind.place())
    assert place.save(1) is None
    writer = place.writer()
    kind.kill()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        error = place.save(2, writer)
    assert isinstance(error, errors.CheckpointError), error
    kind.start()
    assert place.loaded() == 1
    assert place.save(3) is None and place.loaded() == 3
