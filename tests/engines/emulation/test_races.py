"""The kernels have no races, and every barrier and atomic is one without which they would: see mutations/kernels.py."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import pytest

from dcp_nvcomp.engines.cuda.device import kernel_source
from tests.effort import THOROUGH
from tests.faults.mutations import Mutation
from tests.faults.mutations.__main__ import ROOT
from tests.faults.mutations.kernels import KERNELS, MUTATIONS

from .build import RacesBuild, compiler
from .cases import MODULES, Module
from .memory import SharedMemory, WrongResultError
from .races import KernelError, Races

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")

# 0 forward, 1 backward, others shuffled
SEEDS = range(10) if THOROUGH else (2,)
MUTANTS = MUTATIONS if THOROUGH else MUTATIONS[:: len(MUTATIONS) // 4]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> RacesBuild:
    return RacesBuild(tmp_path_factory.mktemp("races"))


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory()
    yield memory
    memory.close()


def check(module: Module, command: list[str], memory: SharedMemory, seeds: Iterable[int]) -> None:
    with Races(command, memory) as races:
        for seed in seeds:
            module.check(memory, functools.partial(races.launch, seed=seed))


@pytest.mark.ci
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_unchanged(build: RacesBuild, memory: SharedMemory, module: Module) -> None:
    command = build.program(module.name, kernel_source(*module.sources), module.options)
    check(module, command, memory, SEEDS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.row)
def test_mutant(build: RacesBuild, memory: SharedMemory, mutant: Mutation) -> None:
    path = ROOT / mutant.file
    text = path.read_text()
    mutated = text.replace(mutant.old, mutant.new)
    assert mutated != text
    caught = False
    for module in (module for module in MODULES if path.name in module.sources):
        source = kernel_source(*module.sources).replace(text, mutated)
        command = build.program("mutant", source, module.options)
        try:
            check(module, command, memory, [2])
        except (KernelError, WrongResultError):
            caught = True
    assert caught


def test_every_kernel_is_run() -> None:
    run = {source for module in MODULES for source in module.sources}
    assert {path.name for path in (ROOT / KERNELS).iterdir()} == run
