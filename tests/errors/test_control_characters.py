"""Nothing in a message is obeyed by a terminal, whatever a file is called or says."""

from __future__ import annotations

import pickle

import pytest

from dcp_nvcomp import CheckpointError, RankFailedError, StorageError


@pytest.mark.parametrize("harm", ["\x1b[2J", "\x9b1m", "\r", "\x07", "\x7f", "\u202e", "\u2028", "\ud800", "\0"])
def test_messages(harm: str) -> None:
    error = CheckpointError(f"It says {harm}.", path=f"run/{harm}", fqn=harm)
    error.message += f" And {harm}."
    for one in (error, pickle.loads(pickle.dumps(error)), StorageError.from_os_error("read", harm, OSError(harm))):
        assert harm not in str(one) and harm not in repr(one)
        str(one).encode()
    assert harm not in str(RankFailedError.of({0: harm, 1: harm}))


def test_what_stays() -> None:
    text = "Zeile 1\n\tZeile 2: über 3\u00a0GB, 日本語"
    assert CheckpointError(text).message == text
