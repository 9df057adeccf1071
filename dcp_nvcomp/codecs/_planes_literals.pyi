import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

DECODED: int
SHORT: int
FOREIGN: int
STORED_CRC: int
DECODED_CRC: int

def encode_rows(
    rows: U8, widths: tuple[int, ...], float_nbytes: int, slice_nbytes: int, columns: int, out: memoryview
) -> list[tuple[int, int, int, tuple[int, ...], int, int]] | None: ...
def decode_rows(
    blocks: list[tuple[memoryview, int, tuple[int, ...], int, int]],
    widths: tuple[int, ...],
    rows: U8,
    float_nbytes: int,
    slice_nbytes: int,
    columns: int,
    check_stored: bool,
    check_decoded: bool,
) -> int: ...
