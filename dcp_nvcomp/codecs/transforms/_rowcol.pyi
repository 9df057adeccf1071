import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]

def predict_planes(rest: U8, exponent: U8, columns: int, seen: int) -> int: ...
def restore_planes(packed: U8, symbols: U8, rest: U8, exponent: U8, columns: int, flags: int) -> bool: ...
