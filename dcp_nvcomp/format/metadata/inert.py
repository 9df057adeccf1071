"""The inert tree that pickle_machine.py makes of a pickle: it only describes, and nothing in it has been called.

pickled                 in the tree
----------------------  -----------------------------------------------------------------------------
None, bool, int, ...    themselves; a tuple is a tuple
list                    `PickledList`
dict                    `PickledDict`, the flat list of its keys and values: no key is ever hashed here
a global that is listed `Global`, our description of it; nothing is imported
NEWOBJ, then BUILD      `Instance` of that global, with its state beside it
REDUCE                  the answer of our own `Global.reduce` to the arguments, which must be immutable
a global that the user  `TrustedCall`: what would be called with what; the reader of the tree decides
trusts, called
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class PickledList(list[Any]):
    """A pickled list."""

    __slots__ = ()


class PickledDict(list[Any]):
    """A pickled dict, as key, value, key, value, ..."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Global:
    """What one exact "module.name" stands for."""

    name: str
    is_class: bool = False  # NEWOBJ without arguments may make an `Instance` of it, which BUILD may fill once
    reduce: Callable[[tuple[Any, ...]], Any] | None = None
    value: Any = None  # what the name itself means: a dtype, or the object that the user trusts
    is_trusted: bool = False  # named by the user; REDUCE and NEWOBJ make a `TrustedCall`


class Instance:
    """A fresh object of a listed class; `state` is what BUILD gave it, None before."""

    __slots__ = ("built", "kind", "state")

    def __init__(self, kind: Global) -> None:
        self.kind = kind
        self.state: Any = None
        self.built: Any = None  # what tree.py made of it


class TrustedCall(Instance):
    """A call of a global that the user trusts; not made yet."""

    __slots__ = ("args", "dict_items", "is_new", "list_items")

    def __init__(self, kind: Global, args: tuple[Any, ...], *, is_new: bool) -> None:
        super().__init__(kind)
        self.args = args
        self.is_new = is_new
        self.list_items: list[Any] = []
        self.dict_items: list[Any] = []
