"""What `auto` remembers: from save to save, and of one tensor for others of its kind, but never for what differs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter
from dcp_nvcomp.codecs.base import U8, ElementType
from dcp_nvcomp.codecs.choose import Judge, Look
from dcp_nvcomp.saving.encode.choices import AutoChoice
from dcp_nvcomp.saving.encode.sources import Workbench
from dcp_nvcomp.saving.process_state import forget_all
from tests.checkpoints import assert_loads

SHAPE = (400, 300)


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors of which slices were coded to choose a codec."""
    found: list[str] = []
    judge, choose, now = Judge.judge, AutoChoice._found, [""]

    def choosing(self: AutoChoice, place: object, bench: Workbench) -> object:
        now[0] = self._key[0]
        return choose(self, place, bench)  # type: ignore[arg-type]

    def judging(self: Judge, *args: object) -> object:
        found.append(now[0])
        return judge(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(AutoChoice, "_found", choosing)
    monkeypatch.setattr(Judge, "judge", judging)
    return found


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=rng(seed)) * 0.02


def layers(count: int = 4) -> dict[str, torch.Tensor]:
    return {f"layers.{number}.weight": dense(number) for number in range(count)}


def save_with(writer: NvcompWriter, state: dict[str, torch.Tensor]) -> int:
    """Save, check that it loads, and return the stored size."""
    dcp.save(state, storage_writer=writer, no_dist=True)
    assert_loads(writer.path, state)
    assert writer.last_save is not None
    return writer.last_save.stored_nbytes


def sparse(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * (torch.arange(tensor.numel()).view(SHAPE) % 7 == 0)


ODD: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": torch.clone,
    "zeros": torch.zeros_like,
    "constant": lambda tensor: torch.full_like(tensor, 0.1),
    "sparse": sparse,
    "rounded": lambda tensor: tensor.bfloat16().float(),
    "equal rows": lambda tensor: tensor[:1].expand(SHAPE).clone(),
    "repeated": lambda tensor: tensor[:50].repeat(8, 1),
    "a tenth zeros": lambda tensor: tensor * (torch.arange(tensor.numel()).view(SHAPE) % 10 != 3),
    "a tenth zero rows": lambda tensor: tensor * (torch.arange(SHAPE[0]) % 10 != 3)[:, None],
    "noise": lambda tensor: torch.randint(0, 256, (*SHAPE, 4), dtype=torch.uint8, generator=rng(2)).view(tensor.dtype)[
        ..., 0
    ],
}

# Floats that come to repeat look like floats that do not, and keep their codec, which is no worse than it was.
WAYS = [pair for pair in permutations(ODD, 2) if "dense" in pair and pair[1] not in ("equal rows", "repeated")]


def test_layers_are_judged_once_and_then_remembered(tmp_path: Path, judged: list[str]) -> None:
    writer = NvcompWriter(tmp_path, thread_count=1)
    sizes = {save_with(writer, layers()) for _ in range(3)}
    assert len(judged) == 1 and len(sizes) == 1


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind != "dense"])
def test_one_that_differs_from_its_kind_is_judged(tmp_path: Path, judged: list[str], kind: str) -> None:
    """As a layer that was not trained yet, or was made of copies: its neighbours' codec is not for it."""
    state = layers()
    state["layers.3.weight"] = ODD[kind](state["layers.3.weight"])
    together = save_with(NvcompWriter(tmp_path / "together", thread_count=1), state)
    assert len(judged) == 2 and "layers.3.weight" in judged
    apart = 0
    for name, tensor in state.items():
        forget_all()
        apart += save_with(NvcompWriter(tmp_path / name, thread_count=1), {name: tensor})
    assert together <= apart


@pytest.mark.ci
@pytest.mark.parametrize("way", WAYS, ids=" to ".join)
def test_what_changes_is_judged_again(tmp_path: Path, judged: list[str], way: tuple[str, str]) -> None:
    """From one save to the next, as Adam's moments do at the first step."""
    first, second = ({"w": ODD[kind](dense(1))} for kind in way)
    fresh = save_with(NvcompWriter(tmp_path / "fresh", thread_count=1), second)
    judged.clear()
    forget_all()
    save_with(NvcompWriter(tmp_path / "kept", thread_count=1), first)
    writer = NvcompWriter(tmp_path / "kept", thread_count=1)  # another one, as it is usual for each save
    # a search for matches that finds none any more is noticed by the ratio, after the first such save
    later = [save_with(writer, second) for _ in range(2)]
    assert later[-1] == fresh and len(judged) == 2
    assert later[0] == fresh or way[0] in ("equal rows", "repeated")


def test_dense_floats_are_not_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    look = Judge.look

    def looking(self: Judge, element: ElementType, sample: U8) -> Look:
        looks.append(sample.size)
        return look(self, element, sample)

    monkeypatch.setattr(Judge, "look", looking)
    writer = NvcompWriter(tmp_path, thread_count=1)
    state = layers()
    save_with(writer, state)
    assert len(looks) == len(state)
    save_with(writer, state)
    assert len(looks) == len(state)
    state["layers.1.weight"] = dense(1) * dense(2)  # other exponents, so another size
    save_with(writer, state)
    assert len(looks) == len(state) + 1


def test_nothing_is_shared_between_shapes_and_dtypes(tmp_path: Path, judged: list[str]) -> None:
    state = {"a.1": dense(1), "a.2": dense(2).T.contiguous(), "a.3": dense(3).bfloat16(), "a.4": dense(4)}
    save_with(NvcompWriter(tmp_path, thread_count=1), state)
    assert len(judged) == 3


def test_parts_that_repeat_out_of_reach_are_no_reason_to_search_for_matches(tmp_path: Path) -> None:
    """As experts that were copied from one dense layer: no block holds two of them."""
    part = (torch.randn(1 << 20, generator=rng(1)) * 0.02).bfloat16()
    nbytes = {
        codec: save_with(NvcompWriter(tmp_path / codec, codec=codec), {"experts": part.repeat(4)})
        for codec in ("auto", "planes-zstd")
    }
    assert nbytes["auto"] == nbytes["planes-zstd"]


def test_many_threads_choose_alike(tmp_path: Path) -> None:
    state = layers(24)
    one = save_with(NvcompWriter(tmp_path / "one", thread_count=1), state)
    forget_all()
    assert save_with(NvcompWriter(tmp_path / "many", thread_count=8), state) == pytest.approx(one, abs=8192)
