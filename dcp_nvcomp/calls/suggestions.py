"""What to say of a key that is not there: the keys that may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = ["missing_key"]


def missing_key(wanted: str, there: Collection[str]) -> str:
    """Return a sentence that says that a key is missing, and what is there instead.

    Args:
        wanted: the key.
        there: the keys of the checkpoint.
    """
    longer = sorted(key for key in there if key.endswith(f".{wanted}"))
    if longer:
        prefix = longer[0].removesuffix(wanted)
        nested = "".join(f'{{"{part}": ' for part in prefix.split(".")[:-1])
        return (
            f"There is no {wanted!r}; the checkpoint has {_listed(longer)}: "
            f"pass {nested}...{'}' * nested.count('{')}, or prefix={prefix!r} where a call takes one."
        )
    shorter = [key for key in there if wanted.endswith(f".{key}")]
    if shorter:
        extra = wanted.removesuffix(shorter[0])
        return f"There is no {wanted!r}; the checkpoint has {shorter[0]!r}, without {extra!r} before it."
    below = sorted(key for key in there if key.startswith(f"{wanted}."))
    if below:
        return f"There is no {wanted!r} itself; the checkpoint has {_listed(below)} below it."
    close = difflib.get_close_matches(wanted, there, 3, 0.6)
    if close:
        return f"There is no {wanted!r}; the checkpoint has {_listed(close)}."
    return f"There is no {wanted!r}; the checkpoint has {_listed(sorted(there)) if there else 'no keys at all'}."


def _listed(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:3]))
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
