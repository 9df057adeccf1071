"""How `async_save` stages tensors in host memory: training's cores decide, unless a measurement or a test does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from unittest.mock import patch

from dcp_nvcomp.saving import save as async_save

Staged = Literal["copy", "encode"]


@contextmanager
def staged_by(how: Staged) -> Iterator[None]:
    """Have the saves that begin meanwhile copied, for the background process, or encoded before the call returns."""
    with patch.object(async_save, "has_spare_core", lambda: how == "copy"):
        yield
