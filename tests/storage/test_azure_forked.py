"""Azure from a process that was forked from one that has used it, as DataLoader's workers may be: it is refused."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from dcp_nvcomp import open_checkpoint
from dcp_nvcomp.errors import ConfigurationError
from dcp_nvcomp.storage.open import open_filesystem
from tests.checkpoints import save

from .suite import Place

pytestmark = pytest.mark.azure

STATE = {"w": torch.arange(3 << 20), "b": torch.ones(5)}
LIMIT_SECONDS = 60.0  # ends what hangs


def error_in_child(do: Callable[[], Any]) -> str:
    """Return the words of the ConfigurationError that a function raises in a forked child."""

    def run() -> None:
        with pytest.raises(ConfigurationError) as caught:
            do()
        sending.send(str(caught.value))

    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    sending.close()
    try:
        assert receiving.poll(LIMIT_SECONDS), "the child hangs"
        return str(receiving.recv())
    finally:
        child.kill()
        child.join()


def test_a_child_that_opens_it_again(azure_store: Place) -> None:
    url, options = azure_store
    filesystem = open_filesystem(url, storage_options=options)
    unfinished = filesystem.open_output("unfinished")
    unfinished.write(bytes(40 << 20))
    assert "forkserver" in error_in_child(lambda: open_filesystem(url, storage_options=options))
    assert "forkserver" in error_in_child(lambda: unfinished.write(bytes(40 << 20)))
    unfinished.close()
    assert filesystem.file_nbytes("unfinished") == 40 << 20


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_the_workers_of_a_data_loader(azure_store: Place, context: str) -> None:
    url, options = azure_store
    save(url, STATE, **options)
    with open_checkpoint(url, **options) as checkpoint:
        assert torch.equal(checkpoint["b"][:], STATE["b"])
        loader: Any = DataLoader(
            checkpoint.dataset(),
            batch_size=None,
            num_workers=2,
            multiprocessing_context=context,
            timeout=LIMIT_SECONDS,
        )
        if context == "fork":
            with pytest.raises(ConfigurationError, match="forkserver"):
                dict(loader)
            return
        found = dict(loader)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[key], STATE[key]) for key in STATE)
