"""Constructor options of writer and reader: checks that fail before anything is touched, and how they are shown."""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, get_args

import numpy as np

from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.redaction import without_secrets

Engine = Literal["auto", "cpu", "cuda"]
CheckEncodes = Literal["all", "off"]
Verify = Literal["stored", "full", "off"]
DtypePolicy = Literal["same", "cast"]

MAX_DEFAULT_THREADS = 8
DEADLINE_OPTION = "storage_deadline_seconds"
DEADLINE_SECONDS = 300.0  # survives a server's restart, and a store that is too busy for minutes


def check_budget(name: str, value: int) -> int:
    """Return a memory budget: a positive number of bytes."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"{name}={value!r} must be a positive number of bytes.")
    return value


def check_device_budget(value: int | None) -> int | None:
    """Return the budget of device memory: a positive number of bytes, or None for the default."""
    return None if value is None else check_budget("device_memory_budget", value)


def check_flag(name: str, value: Any) -> bool:
    """Return a flag: True or False, of numpy too, or 1 or 0, and nothing else that is merely truthy or falsy."""
    if not isinstance(value, bool | np.bool_) and not (type(value) is int and value in (0, 1)):
        raise ConfigurationError(f"{name}={value!r} must be True or False.")
    return bool(value)


def check_path(path: Any) -> str:
    """Return a path or URL as text."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise not_a_path(path)
    return text


def not_a_path(value: Any) -> ConfigurationError:
    """Return the error for what was given in place of a path: without its contents, which may be a whole state."""
    given = repr(value) if isinstance(value, str | bytes | int | float | None) else f"a {type(value).__name__}"
    hint = ": the state dict comes first, then the path" if isinstance(value, Mapping) else ""
    return ConfigurationError(f"A checkpoint's path is a non-empty str or Path, not {given}{hint}.")


def check_seconds(name: str, value: float) -> float:
    """Return a time limit: a positive, finite number of seconds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigurationError(f"{name}={value!r} must be a positive number of seconds.")
    return float(value)


def check_thread_count(value: int | None) -> int:
    """Return a number of threads; None means one per CPU that this process may use, at most 8."""
    if value is None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(available, MAX_DEFAULT_THREADS)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"thread_count={value!r} must be a positive number of threads.")
    return value


def check_choice(name: str, value: Any, words: Any) -> str:
    """Return a word that must be one of a `Literal`'s."""
    choices = get_args(words)
    if not isinstance(value, str) or value not in choices:
        raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
    return str(value)


_Stock = Mapping[str, tuple[Callable[[Any], bool], str]]

# Arguments of stock DCP's writers and readers that have no counterpart here: the values that change nothing, and what
# to do instead of any other value.
STOCK_WRITER: Final[_Stock] = {
    "per_thread_copy_ahead": (
        lambda value: value == 10_000_000,
        "Bound the memory of a save with host_memory_budget= and device_memory_budget= instead.",
    ),
    "cache_staged_state_dict": (
        lambda value: value is False,
        "Pass async_stager=BlockingAsyncStager(cache_staged_state_dict=True) to dcp.async_save instead.",
    ),
    "_extensions": (lambda value: not value, "The writer compresses by itself: choose how with codec= instead."),
    "serialization_format": (
        lambda value: getattr(value, "name", None) == "TORCH_SAVE",
        "The format is always that of docs/format.md: leave the argument out.",
    ),
}
STOCK_READER: Final[_Stock] = {
    "_extension_registry": (
        lambda value: value is None,
        "DCP's zstd extension is read without it. Load checkpoints with other extensions with FileSystemReader.",
    )
}


def drop_stock_arguments(options: dict[str, Any], stock: _Stock, owner: type) -> None:
    """Remove the arguments of stock DCP's classes from `options`."""
    for name in stock.keys() & options.keys():
        value = options.pop(name)
        is_harmless, advice = stock[name]
        if not is_harmless(value):
            theirs = "FileSystemWriter" if stock is STOCK_WRITER else "FileSystemReader"
            raise ConfigurationError(
                f"{name}={value!r} is an argument of stock DCP's {theirs}, not of {owner.__name__}. {advice}"
            )


def _own_options(cls: type) -> list[inspect.Parameter]:
    parameters = inspect.signature(cls).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter for parameter in parameters if parameter.kind in named and parameter.name != "path"]


def option_names(cls: type) -> list[str]:
    """Return the names of a constructor's options, to tell a mistyped one from a storage option."""
    return [parameter.name for parameter in _own_options(cls)]


def shown(cls: type, path: str, values: Mapping[str, Any], storage_options: Mapping[str, Any]) -> str:
    """Return the `repr` of a writer or reader: its path and the options that are not the default, without secrets."""
    parts = [repr(without_secrets(path))]
    for option in _own_options(cls):
        value = values.get(option.name, option.default)
        default = check_thread_count(None) if option.name == "thread_count" else option.default
        if value is not default and value != default:
            # a callback could have been bound to anything
            parts.append(f"{option.name}=..." if callable(value) else f"{option.name}={value!r}")
    parts += [f"{name}=..." for name in storage_options]
    return f"{cls.__name__}({', '.join(parts)})"


_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")


def fault_of_name(name: str) -> str | None:
    """Return why no file of a checkpoint may have this relative path; None if one may."""
    parts = name.split("/")
    if "\\" in name or any(ord(character) < 32 for character in name):
        return "it has a backslash or a control character"
    if name.startswith("/") or _SCHEME.match(name) or "::" in name:
        return "it is not relative"
    if ".." in parts or "." in parts or "" in parts:
        return "it has an empty, '.' or '..' part"
    return None


def is_plain_name(name: str) -> bool:
    """Return True for the name of a file or directory that leads nowhere else."""
    return "/" not in name and fault_of_name(name) is None


def parent_and_name(path: str) -> tuple[str, str]:
    """Return the directory or URL that a file is in, and its name there."""
    parent, separator, name = path.rpartition("/")
    if not name:
        raise ConfigurationError(f"{path!r} names a directory, not a file.")
    if fault_of_name(name):
        raise ConfigurationError(
            f"{name!r} can't be the name of a file here, as names with '::', with a backslash or a control character, "
            "or that begin like a URL can't: choose another one.",
            path=path,
        )
    if not separator:
        return os.curdir, name
    if parent.endswith((":/", "://")):  # at the root of a storage: memory://x, file:///x
        return f"{parent}/", name
    return parent or "/", name
