"""Stored Python objects that execute something, or take memory: none is unpickled without limits."""

from __future__ import annotations

import io
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint._extension import ZStandard

from dcp_nvcomp import NvcompReader, convert, errors, open_checkpoint
from dcp_nvcomp.loading.safe_objects import SafeLoader, load_tensor_safely
from dcp_nvcomp.saving.encode import records
from tests.checkpoints import assert_loads, load_into, save, save_stock

from .hostile import STATE, peak_nbytes, refusal, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Attack:
    """Executed when it is unpickled without limits."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def saved_by(path: Path, by: str, item: object) -> Path:
    state = {"w": STATE["w"], "o": item}
    extensions = [ZStandard()] if by == "stock zstd" else None
    if by == "ours":
        save(path, state)
    else:
        save_stock(path, state, _extensions=extensions)
    return path


@pytest.mark.parametrize("by", ["ours", "stock", "stock zstd"])
def test_nothing_in_an_object_is_executed(tmp_path: Path, by: str) -> None:
    path, executed = saved_by(tmp_path / "run", by, Attack(tmp_path / "executed")), tmp_path / "executed"
    assert not executed.exists()
    into = {"w": torch.zeros(4096), "o": None}
    error = refusal(path, into, safe_objects=True)
    assert isinstance(error, errors.UnsafeObjectError) and error.fqn == "o"
    assert not executed.exists()
    refusal(path, into, safe_objects=True, trusted_globals=("pathlib.Path",))
    assert not executed.exists()
    load_into(path, into)  # the default, as DCP does: so the attack is a real one
    assert executed.exists()


@pytest.mark.parametrize("by", ["ours", "stock"])
def test_planner_never_sees_an_unsafe_object(tmp_path: Path, by: str) -> None:
    seen: list[str] = []

    class Planner(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            seen.append(read_item.dest_index.fqn)
            super().load_bytes(read_item, value)

    def run(item: Any, **options: Any) -> None:
        into = {"w": torch.zeros(4096), "o": item}
        dcp.load(into, storage_reader=NvcompReader(path, **options), planner=Planner(), no_dist=True)

    path = saved_by(tmp_path / "bad", by, Attack(tmp_path / "executed"))
    with pytest.raises(CheckpointException):
        run(None, safe_objects=True)
    assert seen == [] and not (tmp_path / "executed").exists()
    path = saved_by(tmp_path / "good", by, {"lr": 0.1})
    run({"lr": 0.0}, safe_objects=True)
    assert seen == ["o.lr"]


def test_payload_is_always_read_safely(tmp_path: Path) -> None:
    stream = io.BytesIO()
    torch.save(Attack(tmp_path / "executed"), stream)
    with pytest.raises(errors.UnsafeObjectError):
        SafeLoader((), check_objects=False).load_tensor(stream, "w")
    assert not (tmp_path / "executed").exists()


def test_payload_of_another_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that was stored as `torch.save` writes it; the footer's shape is that of its bytes, not its own."""
    real = records.saved_payload
    monkeypatch.setattr(records, "is_transparent", lambda tensor: False)
    assert_loads(saved(tmp_path / "honest"), STATE)
    for number, shape in enumerate(([4095], [1], [], [4096, 1], [1, 4096])):
        monkeypatch.setattr(records, "saved_payload", lambda tensor, shape=shape: real(torch.ones(shape)))
        error = refusal(saved(tmp_path / str(number)))
        assert isinstance(error, errors.CorruptDataError) and error.fqn == "w" and "shape" in str(error)


def archive(pickled: bytes, *more: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> io.BytesIO:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", compression) as opened:
        for name, data in (("a/data.pkl", pickled), ("a/byteorder", b"little"), ("a/version", b"3\n"), *more):
            opened.writestr(name, data)
    return io.BytesIO(made.getvalue())


def test_bytearray_of_any_size() -> None:
    """Forty bytes that take a gigabyte: weights_only allows bytearray, and what it is called with."""
    attack = b"\x80\x02c__builtin__\nbytearray\nJ\x00\x00\x00\x10\x85R."
    assert peak_nbytes(lambda: torch.load(archive(attack), weights_only=True)) > 256 << 20  # the attack is real

    def refused() -> None:
        with pytest.raises(errors.UnsafeObjectError, match="builtins.bytearray"):
            SafeLoader((), check_objects=True).checked(archive(attack), "o")
        with pytest.raises(errors.UnsafeObjectError, match="builtins.bytearray"):
            load_tensor_safely(archive(attack))

    assert peak_nbytes(refused) < 16 << 20
    honest = io.BytesIO()
    torch.save(bytearray(b"abc"), honest)
    SafeLoader(("builtins.bytearray",), check_objects=True).checked(honest, "o")


def test_archive_that_inflates() -> None:
    data = archive(b"\x80\x02N.", ("a/data/0", bytes(1 << 26)), compression=zipfile.ZIP_DEFLATED)
    assert data.getbuffer().nbytes < 1 << 18

    def refused() -> None:
        with pytest.raises(errors.CorruptDataError, match="compressed"):
            load_tensor_safely(data)

    assert peak_nbytes(refused) < 16 << 20


def test_archive_whose_files_are_one() -> None:
    """Each of a thousand storages would be a copy of the same megabyte."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as opened:
        opened.writestr("a/data.pkl", b"\x80\x02N.")
        opened.writestr("a/data/0", bytes(1000))
        opened.filelist *= 100
    with pytest.raises(errors.CorruptDataError, match="overlap"):
        load_tensor_safely(made)


def test_storage_that_claims_more_than_there_is() -> None:
    honest = io.BytesIO()
    torch.save(torch.arange(4.0), honest)
    with zipfile.ZipFile(honest) as opened:
        files = {name.partition("/")[2]: opened.read(name) for name in opened.namelist()}
    pickled = (
        files["data.pkl"].replace(b"K\x04tq", b"J\x00\x00\x00\x40tq").replace(b"K\x04\x85", b"J\x00\x00\x00\x40\x85")
    )
    assert torch.equal(load_tensor_safely(archive(files["data.pkl"], ("a/data/0", files["data/0"]))), torch.arange(4.0))
    with pytest.raises(errors.CorruptDataError):
        load_tensor_safely(archive(pickled, ("a/data/0", files["data/0"])))


@pytest.mark.filterwarnings("ignore:Sparse CS[RC] tensor support is in beta state")  # torch says it once
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_indices_outside_of_a_sparse_tensor(tmp_path: Path, layout: torch.layout) -> None:
    """They become addresses that are written to, when such a tensor is made dense."""
    if layout == torch.sparse_coo:
        indices = torch.tensor([[0, 9], [1, 1]])
        tensor = torch.sparse_coo_tensor(indices, [1.0, 2.0], (4, 4), is_coalesced=True, check_invariants=False)
    else:
        compressed, plain = [0, 1, 2, 2, 2], [1, 9]
        tensor = torch.sparse_compressed_tensor(
            compressed, plain, [1.0, 2.0], (4, 4), layout=layout, check_invariants=False
        )
    path = tmp_path / "run"
    save(path, {"w": tensor})
    with open_checkpoint(path) as checkpoint, pytest.raises(errors.CorruptDataError, match=r"size|bounds|index|ind"):
        checkpoint["w"][...]
    file = tmp_path / "model.pt"
    torch.save({"w": tensor}, file)
    with pytest.raises(errors.CorruptDataError):
        convert(file, tmp_path / "converted")
    assert not torch.sparse.check_sparse_tensor_invariants.is_enabled()


class Trusted:
    """What some loads trust."""


def test_what_the_process_allowed_before_stays_allowed() -> None:
    data = io.BytesIO()
    torch.save(Trusted(), data)
    with torch.serialization.safe_globals([Trusted]):
        SafeLoader((f"{__name__}.Trusted",), check_objects=True).checked(data, "o")
        assert Trusted in torch.serialization.get_safe_globals()
        SafeLoader((), check_objects=True).checked(data, "o")
    assert Trusted not in torch.serialization.get_safe_globals()


_entered, _may_leave = threading.Event(), threading.Event()


def _slowly() -> str:
    _entered.set()
    assert _may_leave.wait(60)
    return "built"


class Slow:
    def __reduce__(self) -> Any:
        return _slowly, ()


def test_another_thread_trusts_nothing() -> None:
    """What a load trusts is allowed to the whole process, so no other load may run meanwhile."""
    data = io.BytesIO()
    torch.save(Slow(), data)
    refused: list[Exception] = []

    def load_without_trust() -> None:
        try:
            SafeLoader((), check_objects=True).load_object(io.BytesIO(data.getvalue()), "o")
        except errors.UnsafeObjectError as error:
            refused.append(error)

    loader = SafeLoader((f"{__name__}._slowly",), check_objects=True)
    with ThreadPoolExecutor(2) as pool:
        trusting = pool.submit(loader.load_object, io.BytesIO(data.getvalue()), "o")
        try:
            assert _entered.wait(60)
            other = pool.submit(load_without_trust)
            done, _ = wait([other], timeout=0.2)
            assert not done
        finally:
            _may_leave.set()
        assert trusting.result(60) == "built"
        other.result(60)
    assert len(refused) == 1


@pytest.mark.parametrize("legacy", [True, False])
def test_formats_of_long_ago(legacy: bool) -> None:
    stream = io.BytesIO()
    torch.save(torch.arange(4.0), stream, _use_new_zipfile_serialization=not legacy)
    if legacy:
        with pytest.raises(errors.CorruptDataError, match="not an archive"):
            load_tensor_safely(stream)
    else:
        assert torch.equal(load_tensor_safely(stream), torch.arange(4.0))
