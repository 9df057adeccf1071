"""What to say of a key that is not there: the keys that may have been meant, and how the call takes them."""

from __future__ import annotations

import difflib
import heapq
import re
from collections import Counter
from collections.abc import Collection, Mapping

# A key is near if as much of it is alike, of 1.
_LIKENESS = 0.6
# Of many keys only these are compared letter by letter, which takes 0.1 ms for each.
_MOST_COMPARED = 200
_NUMBER = re.compile(r"[0-9]{1,9}")


def missing_key(wanted: str, there: Collection[str], *, nests: bool = True) -> str:
    """Return a sentence that says that a key is missing, and what is there instead."""
    longer = sorted(key for key in there if key.endswith(f".{wanted}"))
    if longer and nests:
        prefix = longer[0].removesuffix(wanted)
        nested = "".join(f'{{"{part}": ' for part in prefix.split(".")[:-1])
        return (
            f"There is no {wanted!r}; the checkpoint has {_listed(longer)}: pass {nested}...{'}' * nested.count('{')}."
        )
    if longer:
        return f"There is no {wanted!r}; the checkpoint has {_listed(longer)}."
    shorter = max((key for key in there if wanted.endswith(f".{key}")), key=len, default=None)
    if shorter is not None:
        extra = wanted.removesuffix(shorter)
        return f"There is no {wanted!r}; the checkpoint has {shorter!r}, without {extra!r} before it."
    below = sorted(key for key in there if key.startswith(f"{wanted}."))
    if below:
        return f"There is no {wanted!r} itself; the checkpoint has {_listed(below)} below it."
    return f"There is no {wanted!r}; the checkpoint has {_nearest_or_all(wanted, there)}."


def missing_below_prefix(name: str, prefix: str, names: Collection[str], there: Collection[str]) -> str:
    """Return what to say of a module's key that is missing: which prefix would have been right, if another one is."""
    right = _prefix_of(name, prefix, names, there)
    if right is not None:
        example = f"{right}{name}"
        return f"There is no {prefix + name!r}; the checkpoint has {example!r}: pass prefix={right!r}."
    return missing_key(prefix + name, there, nests=False)


def missing_prefix(prefix: str, there: Collection[str]) -> str:
    """Return what to say if no key begins with a prefix."""
    prefixes = {key[: dot.end()] for key in there for dot in re.finditer(r"\.", key)}
    # where the prefix is part of a longer one, that is what was meant
    longer = sorted(one for one in prefixes if one.endswith(f".{prefix}"))
    found = longer or _nearest(prefix, prefixes) or sorted({one for one in prefixes if one.count(".") == 1})
    if not found:
        return f"No key begins with {prefix!r}; the checkpoint has {_nearest_or_all(prefix, there)}."
    return f"No key begins with {prefix!r}, but with {_listed(found)}."


def _prefix_of(name: str, given: str, names: Collection[str], there: Collection[str]) -> str | None:
    """Return the prefix below which the checkpoint has a key, and most of the others beside it."""
    ends = [key for key in there if key.endswith(name) and (key == name or key[-len(name) - 1] == ".")]
    keys = there if isinstance(there, Mapping) else set(there)
    counts = {prefix: sum(prefix + one in keys for one in names) for prefix in (key.removesuffix(name) for key in ends)}
    most = max(counts.values(), default=0)
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    return max(best, key=lambda prefix: (_common_ends(given, prefix), -_number_gap(given, prefix)), default=None)


def _nearest_or_all(wanted: str, there: Collection[str]) -> str:
    near = _nearest(wanted, there)
    if near:
        return _listed(near)
    if len(there) <= 3:
        return _listed(sorted(there)) if there else "no keys at all"
    tops = Counter(key.split(".")[0] for key in there)
    some = [f"{top!r}" if count == 1 else f"{count} below {top!r}" for top, count in tops.most_common(3)]
    return f"{_counted(there)}, none of them like it: {', '.join(some)}{', ...' if len(tops) > 3 else ''}"


def _nearest(wanted: str, there: Collection[str]) -> list[str]:
    """Return up to three keys that are like the wanted one, the most alike first; those of other layers before all."""
    if _NUMBER.search(wanted):
        shape = _NUMBER.sub("0", wanted)
        others = [key for key in there if _NUMBER.sub("0", key) == shape]
        if others:
            return heapq.nsmallest(3, others, key=lambda key: (_number_gap(wanted, key), key))
    alike = heapq.nlargest(_MOST_COMPARED, there, key=lambda key: _common_ends(wanted, key))
    matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)
    found = []
    for key in alike:
        matcher.set_seq1(key)
        likeness = matcher.ratio()
        if likeness >= _LIKENESS:
            found.append((-round(likeness, 2), _number_gap(wanted, key), key))
    return [key for *_, key in sorted(found)[:3]]


def _common_ends(one: str, other: str) -> float:
    """Return which part of two keys is the same at their beginnings and ends: quick, and good enough to choose by."""
    most = min(len(one), len(other))
    front = next((at for at in range(most) if one[at] != other[at]), most)
    back = next((at for at in range(most - front) if one[-1 - at] != other[-1 - at]), most - front)
    return 2 * (front + back) / (len(one) + len(other) or 1)


def _number_gap(one: str, other: str) -> int:
    """Return how far apart the numbers in two keys are, as those of layers."""
    numbers = [[int(found) for found in _NUMBER.findall(key)] for key in (one, other)]
    return sum(abs(a - b) for a, b in zip(*numbers, strict=False))


def _counted(there: Collection[str]) -> str:
    return f"{len(there)} key{'' if len(there) == 1 else 's'}"


def _listed(keys: list[str]) -> str:
    shown = ", ".join(map(repr, keys[:3]))
    return shown if len(keys) <= 3 else f"{shown} and {len(keys) - 3} more"
