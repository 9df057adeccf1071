"""Fixtures for the tests of codecs."""

from __future__ import annotations

from pathlib import Path

import pytest

from .sanitizers import compile_sanitized


@pytest.fixture(scope="session")
def sanitized_literals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module `_literals`, compiled from its sources under sanitizers."""
    return compile_sanitized(tmp_path_factory.mktemp("sanitized"))
