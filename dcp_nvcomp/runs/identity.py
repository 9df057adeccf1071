"""The id of a run, and the place that it belongs to.

    .run/id     <id, 32 hexadecimal digits>
                <the run's root, without links and secrets>

The fast tier's directories are claimed for an id. A copy of a run has the id of the original, and with the same fast
tier it would restore, and upload, what that one has there. So where the root is another one, either the run was moved,
or is reached by another path, and the new root is written down; or it is a copy, and gets an id of its own. It is a
copy if a run of this id is at the old root still, and does not see what is written here.
"""

from __future__ import annotations

import contextlib
import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any, Final

from dcp_nvcomp.errors import CheckpointError, ConcurrentSaveError, ConfigurationError
from dcp_nvcomp.maintenance.seen import RUN_FOLDER
from dcp_nvcomp.options import DEADLINE_OPTION
from dcp_nvcomp.redaction import without_secrets
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem, real_place

logger = logging.getLogger(__name__)

ID_NAME: Final = "id"
_MOST_NBYTES: Final = 1 << 14
_LOOK_SECONDS: Final = 30.0  # at the old root, which may be on a server that is gone
_SERVER: Final = re.compile(r"([a-z][a-z0-9+.\-]*)://([^/]*)")
_ANY_BUCKET: Final = ("s3", "gs")  # the owner of another bucket is sent no secrets


def run_id(own: Filesystem, root: str, storage_options: Mapping[str, Any]) -> str:
    """Return the id of a run, and draw one if it has none, or has that of the run it is a copy of."""
    place = without_secrets(real_place(root))
    if own.file_nbytes(ID_NAME) is None:
        with contextlib.suppress(ConcurrentSaveError):
            own.publish(ID_NAME, _text(uuid.uuid4().hex, place), overwrite=False)
    found, known_place = _read(own)
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
    own.publish(ID_NAME, _text(found, place))
    return found


def _text(found: str, place: str) -> bytes:
    return f"{found}\n{place}".encode()


def _read(own: Filesystem) -> tuple[str, str]:
    """Return id and root; no root of a run that was made before it was written down."""
    text = own.read_all(ID_NAME, limit_nbytes=_MOST_NBYTES).decode("utf-8", "replace")
    found, _, place = text.partition("\n")
    return found, place


def _is_copy(own: Filesystem, found: str, old: str, new: str, storage_options: Mapping[str, Any]) -> bool:
    """Return whether a run of the same id is at the old root, and is not this one."""
    there = _opened(old, new, storage_options)
    if there is None:
        return False
    mark = f"here-{uuid.uuid4().hex}"
    with contextlib.closing(there):
        try:
            if _read(there)[0] != found:
                return False
            own.publish(mark, b"")
            try:
                return there.file_nbytes(mark) is None
            finally:
                own.remove([mark])
        except CheckpointError as error:
            logger.info("Whether a run is still at %s is not known: %s", old, error)
            return False


def _opened(old: str, new: str, storage_options: Mapping[str, Any]) -> Filesystem | None:
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
