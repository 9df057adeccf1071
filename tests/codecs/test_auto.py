"""`auto` makes no state larger than the best of the codecs that it chooses from would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from benchmarks.auto_states import FIXED_CODECS, auto_states
from benchmarks.peers import data_nbytes
from dcp_nvcomp import NvcompWriter
from tests.checkpoints import assert_loads

# A footer names the codecs; that is nearly all of a file of zeros.
DESCRIPTION_NBYTES = 128

STATES = auto_states(3 << 20, 1536 << 10)


def stored_nbytes(path: Path, state: dict[str, torch.Tensor], writer: NvcompWriter) -> int:
    dcp.save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
    return data_nbytes(path)


# Four slices of which are judged, and not all.
STATES["many blocks of a constant"] = {"layer": torch.full((3 << 20,), 0.1)}


@pytest.mark.ci
@pytest.mark.parametrize("name", STATES)
def test_auto_is_about_as_small_as_the_smallest(tmp_path: Path, name: str) -> None:
    state = STATES[name]
    sizes = {
        codec: stored_nbytes(tmp_path / "fixed", state, NvcompWriter(tmp_path, codec=fixed))
        for codec, fixed in FIXED_CODECS.items()
    }
    writer = NvcompWriter(tmp_path, codec="auto")
    for _ in range(2):  # chosen, then remembered
        nbytes = stored_nbytes(tmp_path / "auto", state, writer)
        assert nbytes <= 1.003 * min(sizes.values()) + DESCRIPTION_NBYTES, (nbytes, sizes)
    assert_loads(tmp_path / "auto", state)
