"""Puts itself between the package and every call of its storage layer, whichever storage that is.

with interposed(hook): ...        each call becomes hook(name, call, *arguments, **options)
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from dcp_nvcomp.errors import StorageError
from dcp_nvcomp.loading import reader
from dcp_nvcomp.saving import save_options
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.faults.intercept import Counted, Intercepted

Hook = Callable[..., Any]

# All that asks the storage. What only computes, as `location`, does not, nor do attributes, as `parallel_reads`.
_CALLS: Final = frozenset(
    {
        *("create_directory", "remove_directory", "free_nbytes", "open_output", "open_replacement", "publish"),
        *("read", "read_into", "read_all", "file_nbytes", "list_files", "list_names", "list_below", "list_uploads"),
        *("abort_uploads", "now_seconds", "remove"),
    }
)
_STREAM_CALLS: Final = frozenset({"write", "close", "abort"})
_STREAMS: Final = ("open_output", "open_replacement")
_NEVER_RAISES: Final = "abort"


def _interposing(hook: Hook) -> Callable[..., Any]:
    def of_filesystem(name: str, call: Any, *arguments: Any, **options: Any) -> Any:
        result = hook(name, call, *arguments, **options)
        return Intercepted(result, _STREAM_CALLS, hook) if name in _STREAMS else result

    def opened(*arguments: Any, **options: Any) -> Any:
        filesystem: Filesystem = open_filesystem(*arguments, **options)
        return Intercepted(filesystem, _CALLS, of_filesystem)

    return opened


@contextlib.contextmanager
def interposed(hook: Hook) -> Iterator[None]:
    """Let all calls that saves and loads of this process make go through a hook."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (save_options, reader):
            patch.setattr(module, "open_filesystem", _interposing(hook))
        yield


class FailingOnce(Counted):
    """A hook under which one call fails, as it does when the connection is lost until the deadline is over."""

    def __init__(self, at: int, *, done: bool) -> None:
        super().__init__()
        self._at, self._done = at, done
        self.lost: Any = None

    def carry_out(self, at: int, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if at != self._at:
            return call(*arguments, **options)
        if name == _NEVER_RAISES:
            return call(*arguments, **options)
        if self._done:
            self.lost = call(*arguments, **options)
        failure = StorageError("The connection was lost.", path="here", errno=errno.ETIMEDOUT)
        failure.outcome_unknown = True
        raise failure
