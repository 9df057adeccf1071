"""Megatron-core's `dist_checkpointing`: with our strategies, with ours as its defaults, and asynchronously.

In the environment of `make test` this is Megatron-core 0.16; `make test-frameworks` runs it with a newer one.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.format.footers import footers_of
from tests.integrations.launch import check_cleaned, check_ours, check_resumed, needs, notes, printed, start

pytestmark = pytest.mark.ci


def _version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    except metadata.PackageNotFoundError:
        return (0, 16)


# Since 0.17 there are two ways to save asynchronously.
ASYNCHRONOUS = ["mcore"] if _version() < (0, 17) else ["mcore", "nvrx"]


@pytest.mark.parametrize("how", ["registered", *(pytest.param(how, marks=pytest.mark.slow) for how in ASYNCHRONOUS)])
def test_saved_killed_and_resumed(tmp_path: Path, how: str) -> None:
    needs("megatron.core", "megatron-core==0.16.1")
    start("megatron", tmp_path, "train", how, killed=True)
    start("megatron", tmp_path, "resume", how)
    check_resumed(tmp_path, saved=2, last=4)
    path = tmp_path / "iter_0000002"
    check_ours(path)
    check_cleaned(tmp_path, path)
    assert (path / "metadata.json").exists()
    assert (path / "common.pt").exists() == (_version() < (0, 19))


@pytest.mark.parametrize("how", [pytest.param("strategies", marks=pytest.mark.slow), *ASYNCHRONOUS])
def test_killed_in_a_save_and_resumed_on_more_ranks(tmp_path: Path, how: str) -> None:
    needs("megatron.core", "megatron-core==0.16.1")
    start("megatron_resharded", tmp_path, "train", how, killed=True)
    start("megatron_resharded", tmp_path, "resume", how, ranks=3)
    found = notes(tmp_path, ranks=3)
    for rank in range(3):
        for step in (1, 2):  # the second was saved on three ranks, to the directory of the dead save
            assert found[rank, "resume", "loaded", step] == found[rank, "resume", "right", step]
    for step in (1, 2):
        path = tmp_path / f"iter_000000{step}"
        check_ours(path)
        records = [record for footer in footers_of(path) for record in footer.records]
        derived = [record for record in records if record.fqn.startswith("optimizer.state.fp32_param.")]
        assert derived and all(record.base is not None for record in derived), "as Megatron names its masters"


def _printed(script: str, *arguments: str) -> list[str]:
    """Run a script elsewhere: the import of Megatron-core warns of all that is not installed."""
    needs("megatron.core", "megatron-core==0.16.1")
    return printed("-c", script, *arguments).splitlines()


REFUSED = """
import megatron.core
from megatron.core.dist_checkpointing.strategies import torch as strategies

from dcp_nvcomp import ConfigurationError
from dcp_nvcomp.integrations.megatron import NvcompLoadStrategy, NvcompSaveStrategy, register

def refusal(make, **options):
    try:
        make(**options)
    except ConfigurationError as error:
        print(error)

real = megatron.core.__version__
megatron.core.__version__ = "0.20.1"
for make in (NvcompSaveStrategy, NvcompLoadStrategy, register):
    refusal(make)

megatron.core.__version__ = real
reader = strategies._get_filesystem_reader
del strategies._get_filesystem_reader
refusal(NvcompSaveStrategy)

strategies._get_filesystem_reader = reader
refusal(NvcompSaveStrategy, writer={"codek": "auto"})
refusal(NvcompLoadStrategy, reader={"verify": "nosuch"})
refusal(register, reader={"thread_counts": 3})
refusal(NvcompSaveStrategy, separation_hint="model")
"""


def test_what_is_refused_before_a_save() -> None:
    *unknown, private, codec, verify, threads, hint = _printed(REFUSED)
    assert len(unknown) == 3
    assert all("Megatron-core 0.20.1" in line and "0.16 to 0.19" in line for line in unknown)
    assert "has no megatron.core.dist_checkpointing.strategies.torch._get_filesystem_reader" in private
    assert "did you mean 'codec'" in codec and "nosuch" in verify and "did you mean 'thread_count'" in threads
    assert "separation_hint" in hint


REGISTERED = """
import pathlib
import sys

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

from dcp_nvcomp.integrations.megatron import register
from tests.integrations.jobs.common import stand_in_for_cuda

class Subclass(TorchDistSaveShardedStrategy):
    pass

stand_in_for_cuda()
run = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(str(run / "store")), rank=0, world_size=1)
register(writer={"codec": "auto"})
WORLD = dist.group.WORLD
loading = {
    "verl": lambda path: FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), WORLD),
    "SkyRL": lambda path: FullyParallelLoadStrategyWrapper(get_default_load_sharded_strategy(path), WORLD),
}
cases = {
    "by class": TorchDistSaveShardedStrategy("torch_dist", 1),
    "verl": FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(backend="torch_dist", version=1), WORLD),
    "SkyRL": FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), WORLD),
    "hint": TorchDistSaveShardedStrategy("torch_dist", 1, separation_hint="w"),
    "subclass": Subclass("torch_dist", 1),
}
for name, strategy in cases.items():
    path = run / name
    path.mkdir()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(40.0)), "step": 7}
    dist_checkpointing.save(state, str(path), strategy, content_metadata={"made by": name})
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(40))}
    loaded, missing, unexpected = dist_checkpointing.load(
        state, str(path), loading[name](str(path)) if name in loading else None, strict="return_all"
    )
    assert loaded["step"] == 7 and torch.equal(loaded["w"], torch.arange(40.0))
    assert not missing and not unexpected
    assert dist_checkpointing.load_common_state_dict(str(path))["step"] == 7
    assert dist_checkpointing.load_content_metadata(str(path)) == {"made by": name}
    assert list(dist_checkpointing.load_tensors_metadata(str(path))) == ["w"]
    print(name, bool(list(path.glob("__*.metadata"))))
"""


def test_whom_register_reaches(tmp_path: Path) -> None:
    assert _printed(REGISTERED, str(tmp_path)) == [
        "by class True",
        "verl True",
        "SkyRL True",
        "hint False",
        "subclass False",
    ]
