"""Fixtures for the tests of codecs."""

from __future__ import annotations

from pathlib import Path

import pytest

from .sanitizers import compile_sanitized


@pytest.fixture(scope="session")
def sanitized_literals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module `_literals`, compiled from its sources under sanitizers."""
    return compile_sanitized(tmp_path_factory.mktemp("sanitized"), "coders/_literals.c")


@pytest.fixture(scope="session")
def sanitized_planes_literals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module `_planes_literals`, compiled from its sources under sanitizers."""
    pytest.importorskip("dcp_nvcomp.codecs._planes_literals")  # not for this processor
    return compile_sanitized(tmp_path_factory.mktemp("sanitized"), "_planes_literals.c")
