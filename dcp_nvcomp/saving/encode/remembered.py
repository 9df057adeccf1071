"""What `auto` remembers of earlier saves: each record's chain, what it was chosen for, and what it came to.

A choice is forgotten when its ratio drifts. Dense floats share a judgement with others of their name but for its
numbers, their kin, until one of them forgets it: the next of them is judged then, for all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from dcp_nvcomp.codecs.base import CodecChain, ElementType
from dcp_nvcomp.codecs.choose import Look, is_predicted, literal_exponents

_DRIFT = 0.02
_MOST_REMEMBERED = 1 << 17
_LOOK_EVERY = 16
_DIGITS = re.compile(r"\d+")

# What a choice is remembered by: fqn, dtype, shape and offsets. Not a named tuple: that takes longer to make.
ChoiceKey = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def choice_key(fqn: str, element: ElementType, shape: tuple[int, ...], offsets: tuple[int, ...]) -> ChoiceKey:
    return fqn, element.name, shape, offsets


@dataclass(frozen=True, eq=False)
class _Kin:
    """The chain of dense floats of one name but for its numbers, from one judgement."""

    chain: CodecChain


@dataclass
class _Kept:
    """A choice, what it was made for, and what it came to (stored over uncompressed size) when first used."""

    look: Look
    chain: CodecChain
    kin: _Kin | None  # None if the look or the chain is not that of dense floats
    achieved: float | None = None
    uses: int = 0  # in later saves: without a look on a device, without a judgement on the host

    @property
    def is_trusted(self) -> bool:
        return self.achieved is not None and self.kin is not None

    def expects(self, ratio: float) -> bool:
        return self.achieved is not None and abs(ratio - self.achieved) <= _DRIFT * self.achieved


class ChoiceMemory:
    """The choices of earlier saves. Any thread may use it: each step is one operation on a dict."""

    def __init__(self) -> None:
        self._kept: dict[ChoiceKey, _Kept] = {}
        self._dense: dict[tuple[str, str, tuple[int, ...]], _Kin] = {}

    def recall(self, key: ChoiceKey, look: Look) -> CodecChain | None:
        """Return what an earlier save chose for this shard, if it still looks the same."""
        kept = self._kept.get(key)
        return kept.chain if kept is not None and kept.look.resembles(look) else None

    def trust(self, key: ChoiceKey) -> CodecChain | None:
        """Return what an earlier save chose for a shard of dense floats, to be used if `expects` then agrees."""
        kept = self._kept.get(key)
        return kept.chain if kept is not None and kept.is_trusted else None

    def trust_unseen(self, key: ChoiceKey) -> CodecChain | None:
        """`trust` it, if it was looked at in one of the last saves."""
        kept = self._kept.get(key)
        if kept is None or not kept.is_trusted:
            return None
        kept.uses = (kept.uses + 1) % _LOOK_EVERY
        return kept.chain if kept.uses else None

    def age(self, key: ChoiceKey) -> None:
        """Forget a choice for dense floats that has served `_LOOK_EVERY` saves."""
        kept = self._kept.get(key)
        if kept is not None and kept.kin is not None:
            kept.uses += 1
            if kept.uses >= _LOOK_EVERY:
                self.forget(key)

    def expects(self, key: ChoiceKey, ratio: float) -> bool:
        """Return True if a trusted choice led to about the same ratio as before."""
        kept = self._kept.get(key)
        return kept is not None and kept.expects(ratio)

    def of_dense_kin(self, key: ChoiceKey) -> CodecChain | None:
        """Return the chain of a tensor of the same name, but for numbers, shape and dtype that was judged dense."""
        kin = self._dense.get(_kind(key))
        return kin.chain if kin is not None else None

    def keep(self, key: ChoiceKey, element: ElementType, look: Look, chain: CodecChain) -> None:
        if len(self._kept) >= _MOST_REMEMBERED:
            self._kept.clear()
            self._dense.clear()
        kin = None
        if look.is_dense and _is_of_dense(chain, element):
            kin = self._dense.get(_kind(key))
            if kin is None or kin.chain != chain:
                kin = self._dense[_kind(key)] = _Kin(chain)
        self._kept[key] = _Kept(look, chain, kin)

    def forget(self, key: ChoiceKey) -> None:
        """Forget a choice, and the judgement that it came from: others that have that one find what is judged next."""
        kept = self._kept.pop(key, None)
        if kept is not None and kept.kin is not None and kept.kin is self._dense.get(_kind(key)):
            self._dense.pop(_kind(key), None)

    def achieved(self, key: ChoiceKey, ratio: float) -> None:
        """Take note of what a choice came to, and forget it if that has drifted."""
        kept = self._kept.get(key)
        if kept is None:
            return
        if kept.achieved is None:
            kept.achieved = ratio
        elif not kept.expects(ratio):
            self.forget(key)


@dataclass(frozen=True)
class RememberedChoices:
    """What a process remembers of tensors in host memory and of those on devices."""

    host: ChoiceMemory = field(default_factory=ChoiceMemory)
    device: ChoiceMemory = field(default_factory=ChoiceMemory)


def _is_of_dense(chain: CodecChain, element: ElementType) -> bool:
    return chain == literal_exponents(element) or is_predicted(chain)


def _kind(key: ChoiceKey) -> tuple[str, str, tuple[int, ...]]:
    fqn, dtype, shape, _ = key
    return _DIGITS.sub("#", fqn), dtype, shape
