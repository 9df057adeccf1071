"""What sources may be: nested states with integer keys, several files, links, directories of any name, bad files."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from dcp_nvcomp import (
    CorruptDataError,
    convert,
    errors,
    load_compressed_checkpoint,
    open_checkpoint,
    save,
    save_compressed_checkpoint,
    tools,
)
from dcp_nvcomp.conversion import entries
from dcp_nvcomp.conversion.checkpoints import CheckpointSource
from dcp_nvcomp.conversion.entries import pieces, stamps
from dcp_nvcomp.storage.base import FileInfo
from tests.checkpoints import save_stock
from tests.states import assert_same


def optimizer() -> torch.optim.Optimizer:
    model = torch.nn.Linear(3, 3)
    made = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()  # type: ignore[no-untyped-call]
    made.step()
    return made


def test_a_step_that_shares_files_names_them_where_they_are(tmp_path: Path) -> None:
    """URLs of Azure and SMB have no `..`."""
    frozen, step = torch.arange(100_000.0), torch.zeros(50_000)
    save({"frozen": frozen, "step": step}, tmp_path / "step-1", no_dist=True, reference=())
    save({"frozen": frozen, "step": step + 1}, tmp_path / "step-2", no_dist=True, reference=tmp_path / "step-1")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "latest").symlink_to(tmp_path / "step-2")
    for place in (tmp_path / "step-2", tmp_path / "links" / "latest"):
        source = CheckpointSource(str(place))
        assert {Path(file).parent for file in source.files} == {tmp_path / "step-1", place}
        assert all(Path(file).exists() for file in source.files)
        source.close()
    convert(tmp_path / "step-2", tmp_path / "model.safetensors")
    assert_same(load_file(tmp_path / "model.safetensors"), {"frozen": frozen, "step": step + 1})


def test_what_a_conversion_notes_of_its_source_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    class Listed:
        def list_files(self) -> list[FileInfo]:
            return [FileInfo("a", 3, 5.0)]

        def close(self) -> None:
            pass

    monkeypatch.setattr(entries, "open_filesystem", lambda *_, **__: Listed())
    for url in ("simplecache::ftp://me:geheim@host/step", "ftp://me:geheim@host/step"):
        ((place, *known),) = stamps([f"{url}/a"], {})
        assert "geheim" not in place and place.endswith("step/a") and known == [3, 5.0]


# --- nested states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [[], ["dcp-nvcomp"], ["dcp"], ["dcp", "dcp-nvcomp"]])
def test_integer_keys_stay_integers(tmp_path: Path, way: list[Any]) -> None:
    state = {
        "optimizer": optimizer().state_dict(),
        "gaps": {7: torch.ones(1), 3: torch.zeros(1)},
        "negative": {-1: torch.ones(1)},
        "large": {60_000_000: torch.ones(1)},
        "list": [{0: torch.ones(2)}, {"0": torch.zeros(2)}, [torch.ones(1)]],
        "mixed": {0: torch.ones(1), "b": torch.ones(1)},
    }
    source = tmp_path / "a.pt"
    torch.save(state, source)
    for number, to in enumerate(way):
        convert(source, tmp_path / str(number), to=to)
        source = tmp_path / str(number)
    convert(source, tmp_path / "b.pt")
    assert (tmp_path / "b.pt").stat().st_size < 50_000
    found = torch.load(tmp_path / "b.pt")
    assert_same(found, state)
    optimizer().load_state_dict(found["optimizer"])


def test_stock_dcp_makes_text_of_integer_keys_as_it_always_does(tmp_path: Path) -> None:
    state = optimizer().state_dict()
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", to="dcp")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "b", tmp_path / "c.pt")
    assert list(torch.load(tmp_path / "c.pt")["state"]) == ["0", "1"]
    into = optimizer().state_dict()
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "b"), no_dist=True)
    assert_same(into, state)


def test_what_is_left_of_a_list_is_no_list(tmp_path: Path) -> None:
    torch.save({"blocks": [torch.ones(1), {"x": torch.ones(2)}, torch.ones(3)]}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", prefix="blocks.1.")
    assert list(torch.load(tmp_path / "b.pt")) == ["x"]


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    weight = torch.randn(50, 40)
    state = {"embedding": weight, "head": weight.detach(), "other": weight[:1], "turned": weight.t()}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt")
    found = torch.load(tmp_path / "b.pt")
    assert_same(found, state)
    assert found["embedding"].data_ptr() == found["head"].data_ptr() != found["other"].data_ptr()


# --- safetensors -----------------------------------------------------------------------------------------------------


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3), "x": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(errors.CheckpointError, match=r"Two tensors have this key.*a\.safetensors.*b\.safetensors.*'w'"):
        convert(tmp_path, tmp_path / "to")


@pytest.mark.parametrize("key", ["__metadata__", "\ud800"])
@pytest.mark.parametrize("name", ["b.safetensors", "hf"])
def test_keys_that_safetensors_cannot_have(tmp_path: Path, key: str, name: str) -> None:
    torch.save({key: torch.ones(3), "w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(errors.ConfigurationError, match="can't have this key"):
        convert(tmp_path / "a.pt", tmp_path / name, to="safetensors")
    assert not (tmp_path / name).exists()


def test_a_prefix_that_is_a_whole_key(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1), "w2": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(errors.ConfigurationError, match=r"whole key.*'model\.w'"):
        convert(tmp_path / "a.pt", tmp_path / "b", prefix="model.w")


def test_what_to_do_with_a_dtype_that_safetensors_lacks(tmp_path: Path) -> None:
    for dtype, advice in (
        (torch.complex128, "leave it out by prefix="),
        (torch.float8_e4m3fnuz, "convert with dtype="),
    ):
        torch.save({"s": torch.zeros(4, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)}, tmp_path / "a.pt")
        with pytest.raises(errors.ConfigurationError, match=advice):
            convert(tmp_path / "a.pt", tmp_path / "b.safetensors")


# --- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_index", [False, True])
def test_links_as_in_the_cache_of_huggingface_hub(tmp_path: Path, has_index: bool) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, blobs / "123")
    torch.save({"w": torch.ones(3)}, blobs / "789")
    (snapshot / "model.safetensors").symlink_to("../../blobs/123")
    (snapshot / "loop.safetensors").symlink_to("loop.safetensors")  # hides no other link
    (tmp_path / "latest.pt").symlink_to("blobs/789")
    if has_index:
        (blobs / "456").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
        (snapshot / INDEX).symlink_to("../../blobs/456")
    for number, source in enumerate((snapshot, snapshot / "model.safetensors", tmp_path / "latest.pt")):
        assert convert(source, tmp_path / str(number)).tensors == 1
    with pytest.raises(errors.ConfigurationError, match="that it reads"):
        convert(snapshot, blobs / "123", to="torch", overwrite=True)


def test_a_model_of_which_a_part_is_missing(tmp_path: Path) -> None:
    """As a download leaves it that was cut off, or of which some files are of another revision."""
    source, names = tmp_path / "model", [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    source.mkdir()
    for name, key in zip(names, "ab", strict=True):
        save_file({key: torch.ones(3)}, source / name)
    assert convert(source, tmp_path / "without").tensors == 2
    weight_map = {"a": names[0], "b": names[1]}
    (source / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert convert(source, tmp_path / "with").tensors == 2
    for more in ({"c": names[1]}, {"a": names[1]}):
        (source / INDEX).write_text(json.dumps({"weight_map": {**weight_map, **more}}))
        with pytest.raises(errors.IncompleteCheckpointError, match=f"lacks it.*00002.*{next(iter(more))!r}"):
            convert(source, tmp_path / "bad")
    (source / INDEX).unlink()
    (source / names[1]).unlink()
    with pytest.raises(errors.IncompleteCheckpointError, match=f"{names[1]} is missing"):
        convert(source, tmp_path / "bad")
    assert convert(source / names[0], tmp_path / "one").tensors == 1
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".safetensors"])
def test_directories_may_be_named_like_files(tmp_path: Path, suffix: str) -> None:
    save_stock(tmp_path / f"epoch=0{suffix}", {"w": torch.ones(3)})
    assert convert(tmp_path / f"epoch=0{suffix}", tmp_path / "b").tensors == 1


def test_files_at_the_root_of_a_storage() -> None:
    save_compressed_checkpoint({"w": torch.ones(1)}, "memory://at-root.nvc")
    assert load_compressed_checkpoint("memory://at-root.nvc")["w"] == 1


# --- hostile files ---------------------------------------------------------------------------------------------------


def test_a_destination_that_cannot_be_written(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    for name in ("x.pt", "x.safetensors", "x"):
        with pytest.raises(errors.StorageError):
            convert(tmp_path / "a.pt", f"/proc/{name}")


# --- pieces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1, 1000), (2, 3, 50), (5, 1, 1, 40), (3, 1000)])
def test_pieces_are_small_and_in_the_order_of_memory(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    parts = [tensor[box.index] for box in pieces(shape, 8, 800)]
    assert all(part.nbytes <= 800 for part in parts)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.reshape(-1))
    assert len(parts) <= 2 * tensor.nbytes // 800 + max(torch.Size(shape[:-1]).numel(), 1)


@pytest.mark.parametrize("to", ["dcp-nvcomp", "dcp", "safetensors", "torch"])
def test_expanded_tensors_of_usual_sizes_are_converted(tmp_path: Path, to: Any) -> None:
    w = torch.arange(5.0).reshape(5, 1).expand(5, 100_000)
    torch.save({"w": w}, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", to=to)
    if to == "torch":
        found = torch.load(tmp_path / "b")["w"]
    elif to == "safetensors":
        found = load_file(tmp_path / "b" / "model.safetensors")["w"]
    else:
        with open_checkpoint(tmp_path / "b") as checkpoint:
            found = checkpoint["w"][:]
    assert torch.equal(found, w)


def test_empty_tensors_take_no_place(tmp_path: Path) -> None:
    scales = torch.arange(4, dtype=torch.uint8)
    tensors = {"a": torch.arange(4), "b": torch.empty(0), "c": torch.empty(3, 0), "d": torch.ones(2, dtype=torch.int8)}
    save_file({**tensors, "e8": scales.view(torch.float8_e8m0fnu)}, tmp_path / "a.safetensors")
    assert convert(tmp_path / "a.safetensors", tmp_path / "b").tensors == 5
    convert(tmp_path / "b", tmp_path / "c.safetensors")
    assert torch.equal(load_file(tmp_path / "c.safetensors")["e8"].view(torch.uint8), scales)
    (tmp_path / "d.safetensors").write_bytes(spans(6, z=(0, 0), a=(0, 4), b=(4, 4), c=(4, 6)))
    load_file(tmp_path / "d.safetensors")
    assert convert(tmp_path / "d.safetensors", tmp_path / "d").tensors == 4


def safetensors_bytes(described: dict[str, Any] | bytes, nbytes: int = 6) -> bytes:
    text = described if isinstance(described, bytes) else json.dumps(described).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(nbytes))


def one(**changed: Any) -> bytes:
    """A file of one tensor, described with these changes."""
    return safetensors_bytes({"a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6], **changed}})


def spans(nbytes: int, **places: tuple[int, int]) -> bytes:
    """A file of tensors at these places."""
    rows = {key: {"dtype": "U8", "shape": [at[1] - at[0]], "data_offsets": at} for key, at in places.items()}
    return safetensors_bytes(rows, nbytes)


def torch_bytes(state: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


class Filling:
    """Fills the memory when it is loaded."""

    def __reduce__(self) -> Any:
        return bytearray, (600 << 20,)


def expanded(*tensors: torch.Tensor) -> bytes:
    return torch_bytes({f"w{number}": tensor for number, tensor in enumerate(tensors)})


NO_JSON = [b"[" * 100_000, b'{"a": 1e400}', b"1" * 5000, b"\xff{"]

INDEX = "model.safetensors.index.json"

ONE = torch.ones(1)

BAD: list[tuple[str, bytes, str]] = [
    ("a.safetensors", b"", ""),
    ("a.safetensors", b"\x10" + bytes(7) + b"not json at all!", ""),
    *(("a.safetensors", safetensors_bytes(text, 0), "") for text in NO_JSON),
    *((INDEX, text, "") for text in NO_JSON),
    ("a.safetensors", one(shape=[0, 99999999999999999999], data_offsets=[0, 0]), ""),
    ("a.safetensors", one(shape=[-2, -3]), ""),
    ("a.safetensors", one(shape=[6.0]), ""),
    ("a.safetensors", one(shape=[True, 6]), ""),
    ("a.safetensors", one(data_offsets=[0.0, 6.0]), ""),
    ("a.safetensors", one(dtype=["U8"]), ""),
    ("a.safetensors", one(dtype="F4"), "'F4' is no dtype that can be read here, which are F64"),
    ("a.safetensors", spans(4, a=(0, 4), b=(0, 4)), "overlaps"),
    ("a.safetensors", spans(6, a=(0, 4), b=(2, 6)), "overlaps"),
    ("a.safetensors", spans(8, a=(0, 8), b=(2, 6)), "overlaps"),
    ("a.safetensors", spans(4, a=(0, 4), empty=(2, 2)), "overlaps"),
    ("a.safetensors", spans(8, a=(0, 4), b=(5, 8)), "gap"),
    ("a.safetensors", spans(4, a=(1, 4)), "gap"),
    ("a.safetensors", spans(5, a=(0, 4)), "the last tensor ends at"),
    ("a.safetensors", spans(1), "the last tensor ends at"),
    ("a.pt", b"junk", ""),
    ("a.pt", pickle.dumps({"w": 1}), ""),
    ("a.pt", torch_bytes({"w": ONE}, _use_new_zipfile_serialization=False), r"before torch 1\.6"),
]

UNSAFE: list[tuple[str, bytes, type[Exception], str]] = [
    ("a.pt", torch_bytes({"x": Filling()}, pickle_protocol=2), errors.UnsafeObjectError, r"needs bytearray.*a\.pt"),
    (INDEX, json.dumps({"weight_map": {"w": "../x.safetensors"}}).encode(), errors.UnsafePathError, ""),
    (
        "a.pt",
        expanded(ONE.expand(1 << 38)),
        errors.CheckpointError,
        rf"has \d+ bytes, .* this one {1 << 40}: .*\(file '.*a\.pt', key 'w0'",
    ),
    ("a.pt", expanded(*[ONE.expand(1 << 20, 256)] * 2), errors.CheckpointError, "their elements overlap"),
    (
        "a.pt",
        expanded(torch.ones(1 << 16).as_strided((1 << 15, 1 << 15), (1, 1))),
        errors.CheckpointError,
        "their elements overlap",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "error", "match"),
    [*((*row[:2], CorruptDataError, row[2]) for row in BAD), *UNSAFE],
    ids=range(len(BAD) + len(UNSAFE)),
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, error: type[Exception], match: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / name).write_bytes(content)
    for to in ("b", "b.safetensors"):
        with pytest.raises(error, match=match or None):
            convert(source if name == INDEX else source / name, tmp_path / to)
    assert [path.name for path in tmp_path.rglob("*")] == ["source", name]


@pytest.mark.ci
def test_large_tensors_are_converted_in_pieces(tmp_path: Path) -> None:
    """Also rows that are larger than a piece."""
    state = {"one": torch.randn(1, 9 << 20), "experts": torch.randn(2, 3000, 3000), "w": torch.randn(3000, 7000)}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b", codec="none")
    convert(tmp_path / "b", tmp_path / "c.safetensors")
    assert_same(load_file(tmp_path / "c.safetensors"), state)
    assert tools.verify(tmp_path / "b", full=True).is_sound
    with open_checkpoint(tmp_path / "b") as checkpoint:
        items = checkpoint.metadata.state_dict_metadata
        assert len(items["w"].chunks) == 3
        assert all(4 * chunk.sizes.numel() <= 32 << 20 for item in items.values() for chunk in item.chunks)
