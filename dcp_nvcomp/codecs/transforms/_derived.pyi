import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

def split_rows(rows: U8, base: U8, low: U8, high: U8, most: int) -> tuple[int, int, int]: ...
def merge_rows(low: U8, exceptions: U8, base: U8, rows: U8) -> int | None: ...
