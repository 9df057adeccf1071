"""`ans`: nvCOMP's ANS. Opt-in: closed bitstream, only nvCOMP on an NVIDIA GPU reads it. The CUDA engine runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

from dcp_nvcomp.codecs.base import Coder, check_slice_nbytes
from dcp_nvcomp.codecs.configuration import slice_nbytes, text
from dcp_nvcomp.errors import CodecUnavailableError

# nvCOMP's data_type for each element type: the coder models symbols of that width. It has no name for bfloat16.
ANS_DATA_TYPES = {
    "float16": "<f2",
    "bfloat16": "<f2",
    "float32": "<f4",
    "float8_e4m3fn": "|f1",
    "float8_e5m2": "|f1",
}


@dataclass(frozen=True)
class Ans(Coder):
    """nvCOMP ANS.

    Attributes:
        slice_nbytes: bytes in one slice, a multiple of 16, at most 16 MiB. Its fixed overhead wants 1 MiB or more.
        data_type: nvCOMP's name of the element type: `|u1`, `|i1`, `|f1`, `<f2` or `<f4`.
        nvcomp_version: the version that wrote the slices; ANS changed incompatibly in 6.0.
    """

    name: ClassVar[str] = "ans"
    block_nbytes: ClassVar[int] = 4 << 20  # a slice has a fixed overhead, so longer ones pay
    needs_gpu: ClassVar[bool] = True
    needs_plain: ClassVar[bool] = True
    slice_nbytes: int = 1 << 20
    data_type: str = "|u1"
    nvcomp_version: str = ""

    def __post_init__(self) -> None:
        check_slice_nbytes(self.slice_nbytes)

    def configuration(self) -> dict[str, Any]:
        return {
            "slice_nbytes": self.slice_nbytes,
            "data_type": self.data_type,
            "nvcomp_version": self.nvcomp_version,
        }

    @classmethod
    def from_configuration(cls, configuration: dict[str, Any]) -> Ans:
        return cls(
            slice_nbytes(configuration, cls.name),
            text(configuration, "data_type", cls.name),
            text(configuration, "nvcomp_version", cls.name),
        )

    def encoder(self) -> NoReturn:
        raise CodecUnavailableError(
            "codec='ans' is nvCOMP's and needs an NVIDIA GPU, its driver and the package extra dcp-nvcomp[cu12] or "
            "[cu13], and the tensors to be on that GPU. Use codec='auto', which every machine can write and read."
        )

    def decoder(self) -> NoReturn:
        raise CodecUnavailableError(
            "This record was saved with codec='ans', which only nvCOMP on an NVIDIA GPU can decode (extra "
            "dcp-nvcomp[cu12] or [cu13]). On such a machine, load the checkpoint and save it again with codec='auto'; "
            "the result opens anywhere."
        )
