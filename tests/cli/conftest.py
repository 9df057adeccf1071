"""Fixtures for the tests of the commands."""

from __future__ import annotations

import pytest

from dcp_nvcomp.storage.local.filesystem import PosixFilesystem


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten days later by the storage's clock: a test can set when a file was written, but not when it arrived."""
    real = PosixFilesystem.now_seconds
    monkeypatch.setattr(PosixFilesystem, "now_seconds", lambda self: real(self) + 10 * 86400)
