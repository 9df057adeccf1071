"""obstore, in a process that may have been forked from one that uses it.

A request wakes threads of obstore's library, which all requests of a process share. A forked child has a library that
believes in these threads, and none of them: whatever it asks for, it waits for ever. So a child gets a library of its
own, loaded from a copy of the file, as the same file is never loaded twice.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType
from typing import Final

from dcp_nvcomp.errors import ConfigurationError

_NAME: Final = "obstore"

_lock = threading.Lock()
_is_parents = False  # whether the modules that are loaded are of the process that this one was forked from


def library() -> ModuleType:
    """Return obstore, able to send requests from this process."""
    global _is_parents
    if _is_parents:
        with _lock:
            if _is_parents:
                _load_copy()
                _is_parents = False
    try:
        import obstore.store
    except ImportError as error:
        raise ConfigurationError("az:// is not available here: pip install 'dcp-nvcomp[azure]'.") from error
    loaded: ModuleType = obstore
    return loaded


def _load_copy() -> None:
    parents = {name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith(f"{_NAME}.")}
    try:
        _import_copy()
    except (ImportError, OSError) as error:
        sys.modules.update(parents)
        raise ConfigurationError(
            "This process was forked from one that has used az://, whose client does not survive a fork, and it can't "
            f"load a copy of the client from {tempfile.gettempdir()}: {error}. Start it with spawn or forkserver, such "
            "as DataLoader(..., multiprocessing_context='forkserver'), or name a directory for the copy with TMPDIR."
        ) from error


def _import_copy() -> None:
    found = importlib.util.find_spec(_NAME)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"{_NAME} is not there")
    with tempfile.TemporaryDirectory(prefix="dcp-nvcomp-") as folder:  # what is loaded stays when the file is removed
        shutil.copytree(found.submodule_search_locations[0], Path(folder, _NAME))
        sys.path.insert(0, folder)
        try:
            import obstore.exceptions
            import obstore.store  # noqa: F401
        finally:
            sys.path.remove(folder)


def _leave_to_parent() -> None:
    global _lock, _is_parents
    _lock = threading.Lock()  # a thread that is not here may hold the parent's
    _is_parents = _NAME in sys.modules


if hasattr(os, "register_at_fork"):  # where there is fork
    os.register_at_fork(after_in_child=_leave_to_parent)
