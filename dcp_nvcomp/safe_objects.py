"""Stored Python objects: what may be loaded of them, and how."""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from dcp_nvcomp.errors import ConfigurationError, CorruptDataError, UnsafeObjectError

__all__ = ["SafeLoader"]


class SafeLoader:
    """Loads stored objects with `weights_only=True`, widened by globals that the user trusts.

    Args:
        trusted_globals: dotted names, such as `"torchao.dtypes.AffineQuantizedTensor"`.
        check_objects: whether DCP's bytes items are checked too, before the planner unpickles them without limits.

    Raises:
        ConfigurationError: a name can't be imported.
    """

    def __init__(self, trusted_globals: Sequence[str], *, check_objects: bool) -> None:
        self._trusted = [_import(name) for name in trusted_globals]
        self._check_objects = check_objects

    def checked(self, data: io.BytesIO, fqn: str) -> io.BytesIO:
        """A bytes item, unchanged; loaded safely once before if that was asked for.

        Raises:
            UnsafeObjectError: it needs a global that is not allowed.
        """
        if self._check_objects:
            self._load(data, fqn)
            data.seek(0)
        return data

    def load_tensor(self, data: io.BytesIO, fqn: str) -> torch.Tensor:
        """A tensor that was stored as `torch.save` writes it.

        Raises:
            UnsafeObjectError: it needs a global that is not allowed.
            CorruptDataError: it is not a tensor.
        """
        loaded = self._load(data, fqn)
        if not isinstance(loaded, torch.Tensor):
            raise CorruptDataError(f"A {type(loaded).__name__} is stored where a tensor must be.", fqn=fqn)
        return loaded

    def _load(self, data: io.BytesIO, fqn: str) -> Any:
        try:
            with torch.serialization.safe_globals(self._trusted):
                return torch.load(data, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeObjectError(
                "A stored object needs more than weights_only loading allows. If you trust this checkpoint, name its "
                "globals in trusted_globals=, or register them with torch.serialization.add_safe_globals. "
                f"torch says: {error}",
                fqn=fqn,
            ) from error
        except (RuntimeError, EOFError, ValueError) as error:
            raise CorruptDataError(f"A stored object can't be loaded: {error}", fqn=fqn) from error


def _import(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigurationError(f"trusted_globals names {name!r}, which can't be imported: {error}.") from error
