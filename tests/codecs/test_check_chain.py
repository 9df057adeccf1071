"""Chains of a user's chooser: what no reader could decode, or a writer could not look up, is refused before a save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dcp_nvcomp.codecs import Bytes, CodecChain, Planes, Zstd
from dcp_nvcomp.codecs.base import ELEMENT_TYPES
from dcp_nvcomp.codecs.registry import check_chain
from dcp_nvcomp.errors import ConfigurationError
from tests.checkpoints import assert_loads, save


class Unhashable(Bytes):
    __hash__ = None  # type: ignore[assignment]


def test_planes_may_be_named_in_a_list(tmp_path: Path) -> None:
    chain = CodecChain(Planes(4, ["exponent"]), Zstd())  # type: ignore[arg-type]
    assert chain == CodecChain(Planes(4), Zstd())
    state = {"w": torch.randn(300, 200)}
    save(tmp_path, state, codec=chain)
    assert_loads(tmp_path, state)


def test_a_chain_that_cannot_be_hashed_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unhashable"):
        check_chain(CodecChain(Unhashable()), ELEMENT_TYPES["uint8"])
