"""What a run keeps for itself, in small files below its root.

    .run/id             <id, 32 hexadecimal digits>, and the run's root, without links and secrets
    .run/pin-<step>     a step that no rule removes, because someone elsewhere needs it
    .run/kept           {"schema": 1, "steps": {"<step>": ["last 3", "best loss"]}}, for people who list the run
    .run/abandoned      {"schema": 1, "saves": {"<step>": ["<save id>", ...]}, "damaged": ["<save id>", ...]}

A manager looks for pins right before it removes a step; whoever pins looks, after the pin is there, whether the step
still is. A save that `abandoned` names is no part of the run any more, which went back to an earlier step: it is not
the newest, no rule counts it, and it goes unless a restore found it damaged.

The fast tier's directories are claimed for the id. A copy of a run has the id of the original, and would restore and
upload what that one has there. So where the root is another one, the run gets a new id if one of this id is still at
the old root and does not see what is written here.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import re
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dcp_nvcomp.calls.json_text import parse_json
from dcp_nvcomp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConcurrentSaveError,
    ConfigurationError,
    StorageError,
)
from dcp_nvcomp.format.metadata.shares import is_being_removed
from dcp_nvcomp.format.names import step_in
from dcp_nvcomp.maintenance.completeness import RUN_FOLDER
from dcp_nvcomp.options import DEADLINE_OPTION
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem, real_place

logger = logging.getLogger(__name__)

_PIN: Final = "pin-"
_KEPT_NAME = "kept"
_MOST_NBYTES = 64 << 20
_ABANDONED_NAME = "abandoned"
ID_NAME: Final = "id"
_MOST_ID_NBYTES: Final = 1 << 14
_LOOK_SECONDS: Final = 30.0  # at the old root, which may be on a server that is gone
_SERVER: Final = re.compile(r"([a-z][a-z0-9+.\-]*)://([^/]*)")
_ANY_BUCKET: Final = ("s3", "gs")  # the owner of another bucket is sent no secrets


def pinned_steps(own: Filesystem) -> frozenset[int]:
    return frozenset(step for name in own.list_names() if (step := step_in(name, _PIN)) is not None)


def is_pinned(own: Filesystem, step: int) -> bool:
    return own.file_nbytes(_pin_name_of(step)) is not None


def pin(own: Filesystem, at: Filesystem, step: int, find_problem: Callable[[], str]) -> None:
    own.refuse_link()
    own.create_directory()
    was_pinned = is_pinned(own, step)
    own.publish(_pin_name_of(step), json.dumps({"by": _user_and_host(), "seconds": own.now_seconds()}).encode())
    try:
        problem = "It is being removed." if is_being_removed(at) else find_problem()
    except BaseException:
        if not was_pinned:
            with contextlib.suppress(CheckpointError):  # the first error says more
                unpin(own, step)
        raise
    if problem:
        if not was_pinned:  # what is wrong with it may pass, and someone has wanted it to stay
            unpin(own, step)
        raise CheckpointNotFoundError(f"There is no checkpoint of step {step} to pin. {problem}", path=at.path)


def unpin(own: Filesystem, step: int) -> None:
    own.refuse_link()
    own.remove([_pin_name_of(step)])


def _pin_name_of(step: int) -> str:
    return f"{_PIN}{step}"


def _user_and_host() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (OSError, KeyError):  # no such user, as in containers
        return socket.gethostname()


def write_kept(own: Filesystem, kept: Mapping[int, tuple[str, ...]]) -> None:
    steps = {str(step): list(reasons) for step, reasons in sorted(kept.items())}
    own.refuse_link()
    own.publish(_KEPT_NAME, json.dumps({"schema": 1, "steps": steps}).encode())


def read_kept(own: Filesystem) -> dict[int, tuple[str, ...]]:
    """Return why steps are kept; nothing if no manager wrote it down, or if it can't be read."""
    try:
        if own.file_nbytes(_KEPT_NAME) is None:
            return {}
        found = parse_json(own.read_all(_KEPT_NAME, limit_nbytes=_MOST_NBYTES))
        return {int(step): tuple(map(str, reasons)) for step, reasons in found["steps"].items()}
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError):
        return {}


@dataclass(frozen=True)
class Abandoned:
    # ids by step; of what replicas saved each for itself also what these have in common: not all of them may be seen
    saves: Mapping[int, frozenset[str]] = field(default_factory=dict)
    damaged: frozenset[str] = frozenset()  # the ids of those that turned out damaged

    def has(self, step: int, save_id: str, replica_id: str = "") -> bool:
        """Return whether a save is one of them, or another replica's save of the same state is."""
        known = self.saves.get(step, frozenset())
        return save_id in known or (replica_id != "" and replica_id in known)


@dataclass(frozen=True)
class LeftBehind:
    abandoned: Abandoned  # all that the run has left behind once it saves
    durable: frozenset[int]  # the steps of which the durable tier has nothing else
    on_nodes: frozenset[int]  # the steps of which there is nothing else


def write_abandoned(own: Filesystem, abandoned: Abandoned) -> None:
    own.refuse_link()
    own.create_directory()
    saves = {str(step): sorted(save_ids) for step, save_ids in sorted(abandoned.saves.items())}
    document = {"schema": 1, "saves": saves, "damaged": sorted(abandoned.damaged)}
    own.publish(_ABANDONED_NAME, json.dumps(document).encode())


def read_abandoned(own: Filesystem) -> Abandoned:
    if own.file_nbytes(_ABANDONED_NAME) is None:
        return Abandoned()
    data = own.read_all(_ABANDONED_NAME, limit_nbytes=_MOST_NBYTES)
    try:
        document = parse_json(data)
        # where there is one id it stood alone once
        saves = {
            int(step): frozenset([found] if isinstance(found, str) else map(str, found))
            for step, found in document["saves"].items()
        }
        damaged = document.get("damaged", ())
        if not all(isinstance(one, str | int) for one in damaged):
            raise TypeError("damaged")
        return Abandoned(saves, frozenset(one for one in damaged if isinstance(one, str)))  # once there were steps
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(
            "It says which steps the run has left behind, and is damaged: remove it if there are none.",
            path=own.location(_ABANDONED_NAME),
        ) from error


def run_id(own: Filesystem, root: str, storage_options: Mapping[str, Any]) -> str:
    place = without_secrets(real_place(root))
    if own.file_nbytes(ID_NAME) is None:
        with contextlib.suppress(ConcurrentSaveError):
            own.publish(ID_NAME, _id_text(uuid.uuid4().hex, place), overwrite=False)
    found, known_place = _read_id(own)
    if known_place == place:
        return found
    if known_place and _is_copy(own, found, known_place, place, storage_options):
        original, found = found, uuid.uuid4().hex
        logger.warning(
            "This run is a copy of the one at %s: its id is %s from now on, and no longer %s. Give it a fast tier of "
            "its own.",
            known_place,
            found,
            original,
        )
    elif known_place:
        logger.info("This run was moved from %s, or is reached by another path.", known_place)
    own.publish(ID_NAME, _id_text(found, place))
    return found


def _id_text(found: str, place: str) -> bytes:
    return f"{found}\n{place}".encode("utf-8", "surrogateescape")


def _read_id(own: Filesystem) -> tuple[str, str]:
    """Return id and root; no root of a run that was made before it was written down."""
    text = own.read_all(ID_NAME, limit_nbytes=_MOST_ID_NBYTES).decode("utf-8", "surrogateescape")
    found, _, place = text.partition("\n")
    return found, place


def _is_copy(own: Filesystem, found: str, old: str, new: str, storage_options: Mapping[str, Any]) -> bool:
    """Return whether a run of the same id is at the old root, and is not this one."""
    there = _opened_there(old, new, storage_options)
    if there is None:
        return False
    mark = f"here-{uuid.uuid4().hex}"
    with contextlib.closing(there):
        try:
            if _read_id(there)[0] != found:
                return False
            own.publish(mark, b"")
            try:
                return there.file_nbytes(mark) is None
            finally:
                own.remove([mark])
        except CheckpointError as error:
            logger.info("Whether a run is still at %s is not known: %s", old, error)
            return False


def _opened_there(old: str, new: str, storage_options: Mapping[str, Any]) -> Filesystem | None:
    """Open `.run` at the old root; None where that can't be, or would send credentials to a server of another name."""
    server, here = _SERVER.match(old), _SERVER.match(new)
    options: dict[str, Any] = {DEADLINE_OPTION: _LOOK_SECONDS}
    if server is not None and here is not None and server[1] == here[1]:
        options = {**storage_options, **options}
    if server is not None and server[1] not in _ANY_BUCKET and (here is None or server[0] != here[0]):
        return None
    try:
        return open_filesystem(f"{old.rstrip('/')}/{RUN_FOLDER}", storage_options=options)
    except ConfigurationError:
        return None
