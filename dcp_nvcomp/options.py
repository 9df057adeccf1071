"""Checks of constructor options that writer and reader share: wrong ones are refused before anything is touched."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

from dcp_nvcomp.errors import ConfigurationError

__all__ = [
    "DEADLINE_OPTION",
    "DEADLINE_SECONDS",
    "ENGINES",
    "check_budget",
    "check_choice",
    "check_seconds",
    "check_thread_count",
    "option_names",
    "unknown_option",
]

ENGINES = ("auto", "cpu", "cuda")
MAX_DEFAULT_THREADS = 8
DEADLINE_OPTION = "storage_deadline_seconds"
DEADLINE_SECONDS = 300.0  # a server that restarts, or a store that is too busy for minutes, is survived


def check_budget(name: str, value: int) -> int:
    """A memory budget in bytes: a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"{name}={value!r} must be a positive number of bytes.")
    return value


def check_seconds(name: str, value: float) -> float:
    """A time limit: a positive, finite number of seconds."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigurationError(f"{name}={value!r} must be a positive number of seconds.")
    return float(value)


def check_thread_count(value: int | None) -> int:
    """A number of threads; None means one per CPU that this process may use, at most 8."""
    if value is None:
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(available, MAX_DEFAULT_THREADS)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ConfigurationError(f"thread_count={value!r} must be a positive number of threads.")
    return value


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of some words."""
    if value not in choices:
        raise ConfigurationError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
    return str(value)


def option_names(cls: type) -> list[str]:
    """Names of the options of a constructor, to tell a mistyped one from a storage option."""
    parameters = inspect.signature(cls).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


def unknown_option(option: str, close: Sequence[str], otherwise: str) -> ConfigurationError:
    """The error for an option that nobody takes.

    Args:
        option: its name.
        close: names that were perhaps meant.
        otherwise: what to say where there is none.
    """
    hint = f"did you mean {close[0]!r}?" if close else f"{otherwise}."
    return ConfigurationError(f"Unknown option {option!r}: {hint}")
