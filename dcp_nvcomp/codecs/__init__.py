"""Codecs: they define the stored bytes, and know neither IO nor DCP."""

from __future__ import annotations

from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.coders.ans import Ans
from dcp_nvcomp.codecs.coders.deflate import Deflate
from dcp_nvcomp.codecs.coders.zstd import Zstd
from dcp_nvcomp.codecs.transforms.planes import Planes
from dcp_nvcomp.codecs.transforms.stored import Bytes

__all__ = ["Ans", "Bytes", "CodecChain", "Deflate", "Planes", "Zstd"]
