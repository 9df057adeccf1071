"""The compiled kernels of `derived`: they make what numpy does, and touch nothing else."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from dcp_nvcomp.codecs.transforms import derived_numpy

from .sanitizers import compile_sanitized, run_sanitized
from .test_derived import BLOCKS, columns_of, rounded, trained

kernels = pytest.importorskip("dcp_nvcomp.codecs.transforms._derived")


_LOW, _ROWS, _BASE = np.zeros(64, np.uint8), np.zeros((2, 64), np.uint8), np.zeros((2, 32), np.uint8)
REFUSED = [
    ("split_rows", (_ROWS, _BASE[:1], _LOW, _LOW, 1)),
    ("split_rows", (_ROWS, _BASE[:, :30], _LOW, _LOW, 1)),
    ("split_rows", (_ROWS, _BASE, _LOW[:62], _LOW, 1)),
    ("split_rows", (_ROWS, _BASE, _LOW, _LOW[:62], 1)),
    ("split_rows", (_ROWS, _BASE, _LOW, _LOW, 11)),
    ("split_rows", (_ROWS, _BASE, _LOW, _LOW, -1)),
    ("split_rows", (_ROWS.reshape(-1), _BASE, _LOW, _LOW, 1)),
    ("split_rows", (_ROWS[:, :62], _BASE[:, :31], _LOW[:62], _LOW[:62], 1)),
    ("merge_rows", (_LOW[:62], _LOW[:6], _LOW, _ROWS)),
    ("merge_rows", (_LOW, _LOW[:5], _LOW, _ROWS)),
    ("merge_rows", (_LOW, _LOW[:6], _LOW[:62], _ROWS)),
]


def test_planes_of_other_blocks_are_refused() -> None:
    for name, arguments in [*REFUSED, ("split_rows", (np.zeros((2, 128), np.uint8)[:, ::2], _BASE, _LOW, _LOW, 1))]:
        with pytest.raises(ValueError, match="planes"):
            getattr(kernels, name)(*arguments)


SANITIZED = """
import numpy as np
(cases, refused), made = pickle.loads(pathlib.Path(sys.argv[2]).read_bytes()), []
for name, arguments in refused:
    try:
        getattr(kernels, name)(*arguments)
    except ValueError:
        continue
    raise AssertionError(arguments)
for rows, base, most, positions in cases:
    half = rows.size // 2
    low, high = np.empty(half, np.uint8), np.empty(half, np.uint8)
    count, *crcs = kernels.split_rows(rows, base, low, high, most)
    found = high[: 6 * count if count >= 0 else half].tobytes()
    into = np.empty_like(rows)
    flat = np.ascontiguousarray(base).reshape(-1)
    back = kernels.merge_rows(low, high[: 6 * count], flat, into) if count >= 0 else None
    wrong = np.concatenate([np.array(positions, np.uint32).view(np.uint8), np.zeros(2 * len(positions), np.uint8)])
    made.append((count, crcs, low.tobytes(), found, back, into.tobytes() if back is not None else None,
                 kernels.merge_rows(low, wrong, flat, into) is None))
pathlib.Path(sys.argv[3]).write_bytes(pickle.dumps(made))
"""


@pytest.mark.ci
def test_under_sanitizers(tmp_path: Path) -> None:
    cases = []
    for rows, width, first, count in BLOCKS:
        masters = trained(rows * width)
        weights = rounded(masters).copy()
        weights[:: max(1, weights.size // 5)] ^= 0x20
        master = columns_of(masters, rows, 4 * first, 4 * (first + count)).copy()
        weight = columns_of(weights, rows, 2 * first, 2 * (first + count)).copy()
        most = rows * count // 3
        cases += [(master, weight, limit, [0, rows * count]) for limit in (0, min(1, most), most)]
    (tmp_path / "cases").write_bytes(pickle.dumps((cases, REFUSED)))
    run_sanitized(
        SANITIZED, compile_sanitized(tmp_path, "transforms/_derived.c"), tmp_path / "cases", tmp_path / "made"
    )
    for (master, weight, most, _), found in zip(cases, pickle.loads((tmp_path / "made").read_bytes()), strict=True):
        low, high = (np.empty(master.size // 2, np.uint8) for _ in range(2))
        count, *crcs = derived_numpy.split_rows(master, weight, low, high, most)
        listed = high[: 6 * count] if count >= 0 else high
        assert found[:4] == (count, crcs, low.tobytes(), listed.tobytes())
        assert count < 0 or found[4:6] == (crcs[0], master.tobytes())
        assert found[6], "a position that is not in the block"
