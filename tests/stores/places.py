"""One checkpoint's place on a store: saves of states that tell their number, and what is asked afterwards.

place.save(1), place.save(2) -> the error, or None        place.loaded() -> 1 or 2, else it fails
place.clean() removes what was left, as if two days had passed; place.left() is what it should have removed
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_nvcomp import NvcompWriter, errors, tools
from dcp_nvcomp.format.metadata.roots import read_roots
from dcp_nvcomp.maintenance import opening
from dcp_nvcomp.maintenance.cleaning import Cleaning
from dcp_nvcomp.storage.base import Filesystem
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import load
from tests.states import State, assert_same

_TWO_DAYS_SECONDS: Final = 172_800.0
PART_NBYTES: Final = 5 << 20  # the smallest that S3 takes
_IN_PARTS: Final = ("s3://", "az://", "gs://")


def numbered(number: int, *, nbytes: int = 8_000) -> State:
    """Return a state of which each value tells its number, so that a mixture of two is found."""
    return {
        "w": torch.full((nbytes // 8,), number, dtype=torch.int64),
        "b": torch.full((100,), float(number)),
        "step": number,
    }


def error_of(failure: dcp.CheckpointException) -> errors.CheckpointError:
    """Return what of ours a rank raised; anything else is a failure of the test."""
    cause = failure.failures[min(failure.failures)][0]
    assert isinstance(cause, errors.CheckpointError), cause
    return cause


@dataclass(frozen=True)
class Place:
    """A checkpoint's place."""

    url: str  # where, or a path
    options: dict[str, Any] = field(repr=False)  # of the storage
    nbytes: int = 8_000  # size of the largest tensor of what is saved there
    deadline_seconds: float = 60.0  # option of writers

    @property
    def plain_url(self) -> str:
        """The URL without its protocol and a login, as part of which each error should have it."""
        return self.url.rpartition("@")[2].rpartition("//")[2]

    def with_nbytes(self, nbytes: int) -> Place:
        """Return the same place for states of another size, which go there in parts if that is how it takes them."""
        parts = {"default_block_size": PART_NBYTES} if self.url.startswith(_IN_PARTS) else {}
        return replace(self, nbytes=nbytes, options={**self.options, **parts})

    def within(self, deadline_seconds: float) -> Place:
        """Return the same place with another deadline."""
        return replace(self, deadline_seconds=deadline_seconds)

    def below(self, name: str) -> Place:
        """Return another place, whose URL goes on with a name."""
        return replace(self, url=f"{self.url}/{name}")

    def state(self, number: int) -> State:
        """Return what the save of that number saves."""
        return numbered(number, nbytes=self.nbytes)

    def writer(self, **options: Any) -> NvcompWriter:
        """Return a writer that makes the same calls each time."""
        given = {"thread_count": 1, "codec": "none", "storage_deadline_seconds": self.deadline_seconds}
        return NvcompWriter(self.url, **{**given, **options}, **self.options)

    def save(
        self, number: int, writer: NvcompWriter | None = None, *, state: State | None = None
    ) -> errors.CheckpointError | None:
        """Save, and return the error of ours that it failed with."""
        try:
            dcp.save(
                self.state(number) if state is None else state, storage_writer=writer or self.writer(), no_dist=True
            )
        except dcp.CheckpointException as failure:
            return error_of(failure)
        return None

    def loaded(self, **options: Any) -> int:
        """Load, make sure that all is of one save, and return its number."""
        given = {"storage_deadline_seconds": self.deadline_seconds, **options, **self.options}
        found = load(self.url, self.state(0), **given)
        number = int(found["step"])
        assert_same(found, self.state(number))
        return number

    def filesystem(self) -> Filesystem:
        """Open it as the package does."""
        return open_filesystem(self.url, storage_options=self.options, deadline_seconds=self.deadline_seconds)

    def names(self) -> set[str]:
        """Return the names of all files there."""
        return set(self.filesystem().list_names())

    def live(self) -> set[str]:
        """Return the names of the files that a checkpoint needs."""
        filesystem = self.filesystem()
        return set().union(*(root.names() for root in read_roots(filesystem, set(filesystem.list_names()))))

    def left(self) -> set[str]:
        """Return what no checkpoint needs: files, and uploads that were not finished."""
        return (self.names() - self.live()) | {upload.name for upload in self.filesystem().list_uploads()}

    def clean(self, patch: pytest.MonkeyPatch, **options: Any) -> Cleaning:
        """Clean as if two days had passed by the server's clock."""

        def opened_later(*arguments: Any, **given: Any) -> Filesystem:
            filesystem = open_filesystem(*arguments, **given)
            now_seconds = filesystem.now_seconds
            filesystem.now_seconds = lambda: now_seconds() + _TWO_DAYS_SECONDS  # type: ignore[method-assign]
            return filesystem

        with patch.context() as patched:
            patched.setattr(opening, "open_filesystem", opened_later)
            return tools.clean(self.url, storage_options=self.options, **options)
