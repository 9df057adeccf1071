"""What the bytes are: codecs without IO and without DCP."""

from __future__ import annotations

from dcp_nvcomp.codecs.ans import Ans
from dcp_nvcomp.codecs.base import CodecChain
from dcp_nvcomp.codecs.deflate import Deflate
from dcp_nvcomp.codecs.planes import Planes
from dcp_nvcomp.codecs.stored import Bytes
from dcp_nvcomp.codecs.zstd import Zstd

__all__ = ["Ans", "Bytes", "CodecChain", "Deflate", "Planes", "Zstd"]
