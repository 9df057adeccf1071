"""`auto` predicts floats from their rows and columns where that pays, and nowhere else; a file says so if it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.codecs import CodecChain, Planes, RowCol
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from dcp_nvcomp.codecs.choose import Judge, columns_of, literal_exponents, predicted_exponents
from dcp_nvcomp.errors import UnsupportedVersionError
from dcp_nvcomp.format import footer as module
from dcp_nvcomp.saving.encode import choices
from dcp_nvcomp.saving.encode.choices import device_chain
from dcp_nvcomp.saving.encode.remembered import ChoiceMemory, choice_key
from tests.checkpoints import assert_loads
from tests.codecs.rowcol_floats import floats_of
from tests.format.independent_reader import read_data_file
from tests.format.library import read_footer

State = dict[str, torch.Tensor]


def moments(rows: int, columns: int, seed: int = 1, *, width: int = 4, kind: str = "moments") -> torch.Tensor:
    raw = floats_of(np.random.default_rng(seed), rows * columns, columns, width, kind)
    dtype = torch.float32 if width == 4 else torch.bfloat16
    return torch.from_numpy(raw.copy()).view(dtype).reshape(rows, columns)


def disturbed(floats: torch.Tensor, noise: float) -> torch.Tensor:
    """Return them times powers of two, with a standard deviation of `noise` in the exponent."""
    generator = torch.Generator().manual_seed(1)
    return floats * torch.exp2(noise * torch.randn(floats.shape, generator=generator))


def weights(rows: int, columns: int) -> torch.Tensor:
    return 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    judge = Judge.judge
    monkeypatch.setattr(Judge, "judge", lambda self, *given: found.append(1) or judge(self, *given))
    return found


def saved(path: Path, state: State, **options: Any) -> dict[str, CodecChain]:
    """Save, load and compare; returns the chain of each tensor."""
    dcp.save(state, checkpoint_id=path, storage_writer=NvcompWriter(path, **options), no_dist=True)
    assert_loads(path, state)
    records = [record for file in path.glob("*.distcp") for record in read_footer(file.read_bytes()).records]
    return {record.fqn: record.chain for record in records if record.chain is not None and record.fqn}


def features(path: Path) -> list[list[str]]:
    found = []
    for file in path.glob("*.distcp"):
        data = file.read_bytes()
        text = data[data.index(b'{"save_id"') :]
        found.append(json.JSONDecoder().raw_decode(text.decode("utf-8", "replace"))[0]["features"])
    return found


def test_it_predicts_second_moments_of_matrices(tmp_path: Path) -> None:
    state = {
        "a": moments(300, 512),
        "b": moments(2048, 1024),
        "c": moments(300, 512, width=2),
        "d": moments(1100, 1030),
    }
    chains = saved(tmp_path, state)
    columns = {fqn: getattr(chain.array_to_bytes, "columns", None) for fqn, chain in chains.items()}
    assert columns == {"a": 512, "b": 512, "c": 512, "d": 515}
    assert features(tmp_path) == [["rowcol"]]
    (file,) = tmp_path.glob("*.distcp")
    for (fqn, _), (*_, elements) in read_data_file(file.read_bytes()).items():
        assert elements == state[fqn].contiguous().view(torch.uint8).numpy().tobytes()


def test_all_else_is_as_before(tmp_path: Path) -> None:
    """Weights, vectors, flattened shards, whole numbers, and floats of other types: older versions read the file."""
    flat = moments(512, 512).reshape(-1)
    state = {"w": weights(512, 512), "flat": flat, "half": weights(512, 512).half(), "double": flat.double()}
    state |= {"ids": torch.arange(1 << 18).reshape(512, 512), "small": moments(8, 8), "row": flat[None]}
    chains = saved(tmp_path, state)
    assert not any(isinstance(chain.array_to_bytes, RowCol) for chain in chains.values())
    assert features(tmp_path) == [[]]


def test_a_name_asks_for_planes_alone(tmp_path: Path) -> None:
    saved(tmp_path, {"v": moments(512, 512)}, codec="planes-zstd")
    assert features(tmp_path) == [[]]


def test_a_chain_can_be_asked_for(tmp_path: Path) -> None:
    chain = predicted_exponents(ELEMENT_TYPES["float32"], 512)
    assert chain is not None
    chains = saved(tmp_path, {"w": weights(512, 512)}, codec=chain)
    assert chains["w"].array_to_bytes == RowCol(4, 512)
    assert features(tmp_path) == [["rowcol"]]


def test_a_reader_without_it_refuses_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, {"v": moments(512, 512)})
    monkeypatch.setattr(module, "FEATURES", frozenset())
    (file,) = tmp_path.glob("*.distcp")
    with pytest.raises(UnsupportedVersionError, match=r"features that this reader does not know: \['rowcol'\]. Update"):
        read_footer(file.read_bytes())


def test_later_layers_take_what_the_first_one_got(tmp_path: Path, judged: list[int]) -> None:
    state = {f"layers.{i}.exp_avg_sq": moments(300, 512, i) for i in range(5)}
    chains = saved(tmp_path, state, thread_count=1)
    assert {chain.array_to_bytes for chain in chains.values()} == {RowCol(4, 512)}
    assert len(judged) == 1


def test_a_device_gets_nothing_predicted() -> None:
    """There is no kernel for it, also for what a copy on the host would have got."""
    element, tensor = ELEMENT_TYPES["float32"], moments(300, 512)
    assert Judge().look(element, choices._device_sample(tensor)).is_dense
    key, remembered = choice_key("layers.0.v", element, (300, 512), (0, 0)), ChoiceMemory()
    for _ in range(3):
        assert device_chain(key, element, tensor, remembered, Judge()) == literal_exponents(element)
        remembered.achieved(key, 0.8)


def test_shards_of_a_tensor_are_remembered_apart() -> None:
    """Also those of one shape: what one comes to is no reason to look at the others again."""
    element, remembered = ELEMENT_TYPES["float32"], ChoiceMemory()
    keys = [choice_key("w", element, (300, 512), (start, 0)) for start in (0, 300)]
    for key in keys:
        device_chain(key, element, moments(300, 512), remembered, Judge())
    for key, ratio in zip(keys, (0.8, 0.6), strict=True):
        remembered.achieved(key, ratio)
    assert [remembered.trust_unseen(key) for key in keys] == 2 * [literal_exponents(element)]


def test_what_comes_to_be_predictable_is_predicted(tmp_path: Path, judged: list[int]) -> None:
    """As Adam's second moment, one noisy square at the first step; one layer is judged for all, once."""
    smooth = {f"layers.{i}.exp_avg_sq": moments(300, 512, i) for i in range(3)}
    noisy = {fqn: disturbed(v, 8.0) for fqn, v in smooth.items()}
    chains = [
        {chain.array_to_bytes for chain in saved(tmp_path, state, thread_count=1, overwrite=True).values()}
        for state in (noisy, smooth, smooth)
    ]
    assert chains == [{Planes(4)}, {RowCol(4, 512)}, {RowCol(4, 512)}]
    assert len(judged) == 2


def test_what_looks_as_before_is_judged_in_every_sixteenth_save(tmp_path: Path, judged: list[int]) -> None:
    """Neither its exponents nor the size as planes show that rows and columns have come to predict it."""
    state = {f"layers.{i}.v": moments(300, 512, i) for i in range(2)}
    order = torch.randperm(300 * 512, generator=torch.Generator().manual_seed(1))
    shuffled = {fqn: v.reshape(-1)[order].reshape(v.shape) for fqn, v in state.items()}
    saves = [shuffled, *[state] * 16]
    codecs = [
        {chain.array_to_bytes for chain in saved(tmp_path, one, thread_count=1, overwrite=True).values()}
        for one in saves
    ]
    assert codecs == [{Planes(4)}] * 16 + [{RowCol(4, 512)}]
    assert len(judged) == 2


@pytest.mark.parametrize(("noise", "is_predicted"), [(2.5, True), (3.5, False)], ids=["3 %", "1 %"])
def test_it_predicts_what_gains_two_hundredths(tmp_path: Path, noise: float, *, is_predicted: bool) -> None:
    state = {"v": disturbed(moments(300, 512), noise)}
    chains = saved(tmp_path / "auto", state)
    assert isinstance(chains["v"].array_to_bytes, RowCol) == is_predicted
    chain = predicted_exponents(ELEMENT_TYPES["float32"], 512)
    sizes = []
    for codec in (chain, "planes-zstd"):
        path = tmp_path / f"{len(sizes)}"
        saved(path, state, codec=codec)
        sizes.append(sum(file.stat().st_size for file in path.glob("*.distcp")))
    assert (1.02 < sizes[1] / sizes[0] < 1.04) if is_predicted else (1.005 < sizes[1] / sizes[0] < 1.02)


@pytest.mark.parametrize(
    ("block_shape", "columns"),
    [
        *(((), 0), ((1,), 0), ((4096,), 0), ((1, 4096), 0), ((4096, 1), 0), ((128, 256), 256), ((1, 1, 79, 384), 384)),
        *(((64, 32, 3, 3), 288), ((512, 1, 3, 3), 9), ((4, 64, 64), 64), ((1, 1, 8, 1), 0)),
    ],
)
def test_columns_of_blocks(block_shape: tuple[int, ...], columns: int) -> None:
    assert columns_of(block_shape) == columns
