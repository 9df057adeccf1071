"""Warnings of what costs time and nothing else: a GPU that is left out, memory that is not page-locked.

Users who turn warnings into errors (`-W error`) want to find mistakes in their code. A GPU that fails is not one, and
the save or load goes on without it: so the warning is logged there instead of raised, and no checkpoint is lost.
"""

from __future__ import annotations

import logging
import warnings

logger = logging.getLogger(__name__)


def warn(message: str, *, stacklevel: int = 1) -> None:
    """Issue a RuntimeWarning, or log it where warnings are errors."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)
    except RuntimeWarning:
        logger.warning("%s", message)
