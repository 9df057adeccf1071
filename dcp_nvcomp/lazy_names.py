"""Imports public names when they are first used: torch takes seconds, and the command's help needs none of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str], *, modules: Sequence[str] = ()) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562).

    Args:
        package: its name.
        homes: names, separated by spaces, by the module of dcp_nvcomp in which they are defined.
        modules: submodules of the package that are imported as well.
    """
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"dcp_nvcomp.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
