"""Globals that the user allows a checkpoint to name: `trusted_globals=` of the readers."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from typing import Any, Final

from dcp_nvcomp.errors import ConfigurationError

# Ends the error for a global; only readers have the option.
TRUST_ADVICE: Final = " If you know what it is and who wrote this checkpoint, allow it with trusted_globals=."


def resolve_trusted_globals(names: Sequence[str]) -> dict[str, Any]:
    """Import the globals of `trusted_globals=`, each named "module.name".

    The file never decides what is imported: it can only name one of these, letter by letter.
    """
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"trusted_globals= takes a sequence of 'module.name' strings, not {names!r}.")
    found = {}
    for name in names:
        try:
            if "." not in name or ":" in name:
                raise ValueError("not of the form 'module.name'")
            found[name] = pkgutil.resolve_name(name)
        except (ValueError, ImportError, AttributeError) as error:
            raise ConfigurationError(f"trusted_globals= names {name!r}, which can't be imported: {error}.") from error
    return found
