import numpy as np
import numpy.typing as npt

_Data = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

def checksum(data: _Data, value: int = 0) -> int: ...
def checksum_by_crc32(data: _Data, value: int = 0) -> int: ...
