"""Codecs: they define the stored bytes, and know neither IO nor DCP."""

from __future__ import annotations

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.coders import Ans, Deflate, Zstd
from dcp_nvcomp.codecs.transforms import Bytes, Planes
from dcp_nvcomp.codecs.transforms.derived import Derived
from dcp_nvcomp.codecs.transforms.rowcol import RowCol

__all__ = ["Ans", "Bytes", "CodecChain", "Deflate", "Derived", "Planes", "RowCol", "Zstd"]
