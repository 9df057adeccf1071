"""Pins: steps that no rule removes, because someone elsewhere needs them.

A pin is a small file, `.run/pin-<step>`, that anyone with access to the run may put there: an evaluation that loads the
step for hours, a person who wants to keep it. A manager looks for pins right before it removes a step; whoever pins
looks, after the pin is there, whether the step still is.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import socket
from collections.abc import Callable

from dcp_nvcomp.errors import CheckpointError, CheckpointNotFoundError
from dcp_nvcomp.runs.removal import is_being_removed
from dcp_nvcomp.storage.base import Filesystem

_NAME = re.compile(r"pin-(0|[1-9][0-9]{0,17})")


def pinned_steps(own: Filesystem) -> frozenset[int]:
    """Return the pinned steps."""
    matches = (_NAME.fullmatch(name) for name in own.list_names())
    return frozenset(int(match[1]) for match in matches if match)


def is_pinned(own: Filesystem, step: int) -> bool:
    """Return True if a step is pinned."""
    return own.file_nbytes(_name_of(step)) is not None


def pin(own: Filesystem, at: Filesystem, step: int, find_problem: Callable[[], str]) -> None:
    """Pin a step."""
    own.refuse_link()
    own.create_directory()
    was_pinned = is_pinned(own, step)
    own.publish(_name_of(step), json.dumps({"by": _whoever(), "seconds": own.now_seconds()}).encode())
    try:
        problem = "It is being removed." if is_being_removed(at) else find_problem()
    except BaseException:
        if not was_pinned:
            with contextlib.suppress(CheckpointError):  # the first error says more
                unpin(own, step)
        raise
    if problem:
        unpin(own, step)
        raise CheckpointNotFoundError(f"There is no checkpoint of step {step} to pin. {problem}", path=at.path)


def unpin(own: Filesystem, step: int) -> None:
    """Let a step go again; one that is not pinned is fine."""
    own.refuse_link()
    own.remove([_name_of(step)])


def _name_of(step: int) -> str:
    return f"pin-{step}"


def _whoever() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # no such user, as in containers
        return socket.gethostname()
