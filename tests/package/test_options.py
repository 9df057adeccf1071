"""Options are checked when they are given, and the error says what would do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dcp_nvcomp import NvcompReader, NvcompWriter, errors, options
from dcp_nvcomp.calls.suggestions import ONLY_LOADS, ONLY_SAVES, unknown_option
from dcp_nvcomp.maintenance.opening import READER_OPTIONS


@pytest.mark.parametrize(
    ("check", "value", "found"),
    [
        (options.check_budget, 1, 1),
        (options.check_flag, False, False),
        (options.check_flag, 1, True),
        (options.check_flag, np.bool_(False), False),
        (options.check_seconds, 2, 2.0),
        (options.check_seconds, 0.001, 0.001),
    ],
)
def test_what_is_taken(check: Callable[[str, Any], Any], value: Any, found: Any) -> None:
    checked = check("name", value)
    assert checked == found and type(checked) is type(found)


@pytest.mark.parametrize(
    ("check", "values", "wanted"),
    [
        (options.check_budget, (0, -1, 1.5, True, None, "1"), "a positive number of bytes"),
        (options.check_flag, (2, 1.0, None, "zstd"), "True or False"),
        (options.check_seconds, (0, -1, math.inf, math.nan, True, None, "1"), "a positive number of seconds"),
    ],
)
def test_what_is_refused(check: Callable[[str, Any], Any], values: tuple[Any, ...], wanted: str) -> None:
    for value in values:
        with pytest.raises(errors.ConfigurationError) as caught:
            check("name", value)
        assert f"name={value!r} must be {wanted}" in str(caught.value)


def test_threads() -> None:
    assert options.check_thread_count(3) == 3
    assert 1 <= options.check_thread_count(None) <= options.MAX_DEFAULT_THREADS
    for value in (0, -1, 1.0, True):
        with pytest.raises(errors.ConfigurationError, match="thread_count"):
            options.check_thread_count(value)  # type: ignore[arg-type]


def test_choices() -> None:
    assert options.check_choice("engine", "cpu", options.Engine) == "cpu"
    with pytest.raises(errors.ConfigurationError, match="engine='gpu' must be one of 'auto', 'cpu', 'cuda'"):
        options.check_choice("engine", "gpu", options.Engine)


def test_names_of_the_options() -> None:
    for cls in (NvcompWriter, NvcompReader):
        names = options.option_names(cls)
        assert "thread_count" in names and not {"path", "self", "storage_options"} & set(names)


def test_an_unknown_option() -> None:
    assert "did you mean 'codec'?" in str(unknown_option("codek", ["codec"]))
    assert "Unknown option 'x': s3:// takes a, b." in str(unknown_option("x", storage="s3://", takes=["b", "a"]))


def test_options_of_saves_and_loads_alone_are_known_as_such() -> None:
    saves, loads = set(options.option_names(NvcompWriter)), set(options.option_names(NvcompReader))
    assert set(ONLY_SAVES) == saves - loads
    assert set(ONLY_LOADS) == loads - saves


def test_options_of_the_reader_are_not_of_a_storage() -> None:
    parameters = inspect.signature(NvcompReader).parameters.keys()
    assert parameters - {options.DEADLINE_OPTION} == READER_OPTIONS
