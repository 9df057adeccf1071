"""Every kind of tensor comes back bit for bit, alone and among others, from every codec, into every kind of place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoints import assert_holds
from tests.states import assert_same, assert_same_bits, blank, opposite_of

from .plugins import ORACLE, OURS, OURS_BY_CODEC, OURS_FROM_STOCK, Plugin, on_every_plugin, on_every_reader, quiet_stock
from .values import VALUES, all_values, trained

pytestmark = quiet_stock


@pytest.fixture(scope="module")
def saved_values(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Plugin], Path]:
    """All of VALUES in one checkpoint, saved once by each plugin."""
    paths: dict[Plugin, Path] = {}

    def saved_by(plugin: Plugin) -> Path:
        if plugin.name not in paths:
            path = tmp_path_factory.mktemp(plugin.name)
            dcp.save(all_values(), storage_writer=plugin.writer(path))
            paths[plugin.name] = path
        return paths[plugin.name]

    return saved_by


@pytest.mark.ci
@on_every_reader
def test_each_value_survives_alone(saved_values: Callable[[Plugin], Path], plugin: Plugin) -> None:
    for name, expected in all_values().items():
        state = {name: opposite_of(expected)}
        destination = state[name]
        dcp.load(state, storage_reader=plugin.reader(saved_values(plugin)))
        assert_same_bits(state[name], expected, name)
        assert state[name] is destination, name


@pytest.mark.ci
@pytest.mark.parametrize("plugin", OURS_BY_CODEC, ids=str)
def test_all_values_survive_in_every_codec(saved_values: Callable[[Plugin], Path], plugin: Plugin) -> None:
    assert_holds(plugin.reader(saved_values(plugin)), all_values())


@pytest.mark.ci
@pytest.mark.parametrize("plugin", [ORACLE, OURS], ids=str)
@pytest.mark.parametrize(
    "options", [{"thread_count": 1}, {"thread_count": 4}, {"single_file_per_rank": False}], ids=str
)
def test_values_survive_any_number_of_threads_and_files(
    tmp_path: Path, plugin: Plugin, options: dict[str, int]
) -> None:
    dcp.save(all_values(), storage_writer=plugin.writer(tmp_path, **options))
    assert_holds(plugin.reader(tmp_path), all_values())


@pytest.mark.parametrize("verify", ["stored", "full", "off"])
def test_values_survive_any_way_to_verify(saved_values: Callable[[Plugin], Path], verify: str) -> None:
    assert_holds(OURS.reader(saved_values(OURS), verify=verify), all_values())


def _every_other_column(value: torch.Tensor) -> torch.Tensor:
    wide = opposite_of(torch.cat([value, value], dim=1))
    return wide[:, ::2]


DESTINATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda value: opposite_of(value.t().contiguous()).t(),
    "every-other-column": _every_other_column,
    "part-of-larger-storage": lambda value: opposite_of(torch.cat([value, value, value]))[len(value) : 2 * len(value)],
    "parameter": lambda value: torch.nn.Parameter(opposite_of(value)),
    "channels-last": lambda value: (
        opposite_of(value).view(1, 1, *value.shape).to(memory_format=torch.channels_last)[0, 0]
    ),
}


@on_every_reader
@pytest.mark.parametrize("place", DESTINATIONS)
def test_value_lands_in_any_layout(tmp_path: Path, plugin: Plugin, place: str) -> None:
    expected = trained(torch.float32, (601, 700))
    dcp.save({"w": expected}, storage_writer=plugin.writer(tmp_path))
    destination = DESTINATIONS[place](expected)
    strides = destination.stride()
    state = {"w": destination}
    dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert state["w"] is destination and destination.stride() == strides
    assert_same_bits(destination, expected)


@on_every_reader
def test_load_leaves_the_rest_of_the_storage_alone(tmp_path: Path, plugin: Plugin) -> None:
    expected = trained(torch.bfloat16, (400, 1000))
    dcp.save({"w": expected}, storage_writer=plugin.writer(tmp_path))
    around = torch.zeros(402, 1002, dtype=torch.bfloat16)
    dcp.load({"w": around[1:-1, 1:-1]}, storage_reader=plugin.reader(tmp_path))
    assert_same_bits(around[1:-1, 1:-1], expected)
    assert not around[0].any() and not around[-1].any() and not around[:, 0].any() and not around[:, -1].any()


@on_every_plugin
def test_tensors_that_share_storage(tmp_path: Path, plugin: Plugin) -> None:
    whole = trained(torch.float32, (64, 64))
    saved = {"whole": whole, "same": whole, "half": whole[:32], "transposed": whole.t()}
    dcp.save(saved, storage_writer=plugin.writer(tmp_path))
    assert_holds(plugin.reader(tmp_path), saved)


@on_every_reader
def test_keys_that_share_a_destination(tmp_path: Path, plugin: Plugin) -> None:
    """Tied weights are one tensor under two names on both sides."""
    tied = trained(torch.float32, (500, 700))
    dcp.save({"a": tied, "b": tied}, storage_writer=plugin.writer(tmp_path))
    destination = opposite_of(tied)
    dcp.load({"a": destination, "b": destination}, storage_reader=plugin.reader(tmp_path))
    assert_same_bits(destination, tied)


@on_every_plugin
def test_save_leaves_the_tensors_alone(tmp_path: Path, plugin: Plugin) -> None:
    values = all_values()
    before = {name: (value.stride(), value.storage_offset(), value._version) for name, value in values.items()}
    dcp.save(values, storage_writer=plugin.writer(tmp_path))
    for name, value in values.items():
        assert (value.stride(), value.storage_offset(), value._version) == before[name], name
        assert_same_bits(value, VALUES[name](), name)


LARGE: dict[str, Callable[[], Any]] = {
    "rows": lambda: trained(torch.float32, (2048, 3072)),
    "one-row": lambda: trained(torch.bfloat16, (1, 10_000_019)),
    "transposed": lambda: trained(torch.float32, (3072, 2048)).t(),
    "expanded": lambda: trained(torch.float32, (1, 1500)).expand(4000, 1500),
    "conj": lambda: trained(torch.float32, (1500, 4000)).view(torch.complex64).conj(),
    "object": lambda: bytes(trained(torch.float32, (5_000_000,)).numpy()),
}


@pytest.mark.ci
@pytest.mark.parametrize("plugin", [OURS, OURS_FROM_STOCK], ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_budget_smaller_than_the_value(tmp_path: Path, plugin: Plugin, name: str) -> None:
    expected = {"large": LARGE[name](), "small": trained(torch.bfloat16, (11,))}
    budget = {"host_memory_budget": 8 << 20}
    dcp.save(expected, storage_writer=plugin.writer(tmp_path, **(budget if plugin.writes == "ours" else {})))
    assert_holds(plugin.reader(tmp_path, **budget), expected)


AMBIENT: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference-mode": torch.inference_mode,
    "no-grad": torch.no_grad,
    "default-device-meta": lambda: torch.device("meta"),
    "default-dtype": lambda: _set_for_a_while(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: _set_for_a_while(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "one-thread": lambda: _set_for_a_while(torch.get_num_threads, torch.set_num_threads, 1),
}


@contextlib.contextmanager
def _set_for_a_while(get: Callable[[], Any], set_to: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    set_to(value)
    yield
    set_to(before)


@pytest.mark.ci
@on_every_reader
@pytest.mark.parametrize("ambient", AMBIENT)
def test_settings_of_the_calling_thread_do_not_matter(tmp_path: Path, plugin: Plugin, ambient: str) -> None:
    """Work may be done on other threads, and helpers may allocate: neither shows."""
    with torch.inference_mode(ambient == "inference-mode"):
        expected = {
            **{name: value.clone() for name, value in all_values().items() if name.startswith(("trained", "conj"))},
            "object": [1, 2],
        }
        state = blank(expected)
    with AMBIENT[ambient]():
        dcp.save(expected, storage_writer=plugin.writer(tmp_path, thread_count=3))
        dcp.load(state, storage_reader=plugin.reader(tmp_path))
    assert_same(state, expected)


@on_every_plugin
def test_calling_thread_keeps_its_settings(tmp_path: Path, plugin: Plugin) -> None:
    before = (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_rng_state())
    expected = {"w": trained(torch.float32, (500, 700))}
    dcp.save(expected, storage_writer=plugin.writer(tmp_path))
    dcp.load({"w": opposite_of(expected["w"])}, storage_reader=plugin.reader(tmp_path))
    after = (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_rng_state())
    assert after[:3] == before[:3]
    assert_same_bits(after[3], before[3])


@on_every_plugin
def test_meta_tensor_can_not_be_saved(tmp_path: Path, plugin: Plugin) -> None:
    state = {"fine": torch.ones(3), "hollow": torch.empty(4, 5, device="meta")}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state, storage_writer=plugin.writer(tmp_path))
    assert not (tmp_path / ".metadata").exists()
    if plugin == OURS:
        message = str(caught.value)
        assert "hollow" in message and "meta" in message


@on_every_plugin
@pytest.mark.usefixtures("process_group")
def test_meta_destination_is_allocated(tmp_path: Path, plugin: Plugin) -> None:
    expected = trained(torch.float32, (40, 50))
    dcp.save({"w": expected}, storage_writer=plugin.writer(tmp_path / "c"))
    state = {"w": torch.empty(40, 50, device="meta")}
    dcp.load(state, storage_reader=plugin.reader(tmp_path / "c"))
    assert_same_bits(state["w"], expected)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", [OURS], ids=str)
def test_more_elements_than_an_int32_counts(tmp_path: Path, plugin: Plugin) -> None:
    count = 2**31 + 12_345
    expected = torch.zeros(count, dtype=torch.int8)
    marks = torch.tensor([0, 1, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, count - 1])
    expected[marks] = torch.arange(1, len(marks) + 1, dtype=torch.int8)
    dcp.save({"long": expected}, storage_writer=plugin.writer(tmp_path))
    loaded = torch.ones(count, dtype=torch.int8)
    dcp.load({"long": loaded}, storage_reader=plugin.reader(tmp_path))
    assert torch.equal(loaded, expected)
