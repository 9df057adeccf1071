"""Public names have docstrings, also in rooms where ruff leaves it to the name."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

import dcp_nvcomp
from dcp_nvcomp import codecs, errors, runs, tools


@pytest.mark.parametrize("module", [dcp_nvcomp, codecs, errors, runs, tools], ids=lambda module: module.__name__)
def test_public_classes_and_functions_have_docstrings(module: ModuleType) -> None:
    named = {name: getattr(module, name) for name in getattr(module, "__all__", vars(module)) if name[0] != "_"}
    described = [name for name, one in named.items() if inspect.isroutine(one) or inspect.isclass(one)]
    assert not [name for name in described if not named[name].__doc__]
