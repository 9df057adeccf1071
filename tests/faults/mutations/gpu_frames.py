"""The protections of a GPU from frames that are none, and of its use from warnings."""

from __future__ import annotations

from tests.faults.mutations import Mutation

_FILE = "dcp_nvcomp/engines/cuda/frame_checks.py"
_TESTS = "tests/engines/test_frame_checks.py -k made_by_hand"


def _unchecked(*changes: tuple[str, str]) -> tuple[Mutation, ...]:
    return tuple(Mutation("frames for the GPU", _FILE, old, new, _TESTS) for old, new in changes)


def _before_the_gpu(file: str, old: str, new: str) -> Mutation:
    return Mutation(
        "frames for the GPU", f"dcp_nvcomp/engines/cuda/{file}", old, new, "tests/engines/test_bad_frames.py"
    )


_CHECKS = _unchecked(
    ("word & 0xFFFFFFFF == _ZSTD_MAGIC", "word == word"),
    ("begin + 3 <= stop", "begin == begin"),
    ("descriptor & 8 == 0", "descriptor >= 0"),
    ("(no_dictionary, ", "(descriptor >= 0, "),
    ("(field_nbytes == 0) | (field == lengths)", "field_nbytes >= 0"),
    ("window_nbytes <= np.maximum(2 * lengths, _ZSTD_WINDOW_NBYTES)", "window_nbytes >= 0"),
    ('(following <= stop, "a zstd', '(size >= 0, "a zstd'),
    ("kind != _RESERVED", "kind >= 0"),
    ("(size <= limit", "(size >= 0"),
    ("is_last <= (following == stop)", "size >= 0"),
    ("least <= frames.lengths", "least >= 0"),
    ("most >= frames.lengths", "most >= 0"),
    ("count <= self._limit", "count >= 0"),
    ("(sequences_at < self._stop", "(count >= 0"),
    ("has_own_table | has_table[numbers]", "at >= 0"),
    ("~has_own_table | (first > 0)", "at >= 0"),
    ("(at < stop, ", "(at >= 0, "),
    ("(count >= 6, ", "(count >= 0, "),
    ("(last != 0) & ", ""),
    (" & (count <= nbits)", ""),
    (" & (nbits <= _ZSTD_CODE_NBITS * count)", ""),
    ("(at + 1 == self._stop, ", "(at >= 0, "),
    ("~none | (at == self._stop)", "at >= 0"),
    ("none | (at + 1 + _TABLES_NBYTES[modes] < self._stop)", "at >= 0"),
    ("none | (modes & 3 == 0)", "at >= 0"),
    ("none | ~_REPEATS[modes] | has_sequences[self._numbers]", "at >= 0"),
    ("none | (self._frames.bytes_at(self._stop - 1) > 0)", "at >= 0"),
    ("shortest <= self._limit", "shortest >= 0"),
    ('(following <= stop, "a deflate', '(length >= 0, "a deflate'),
    ("kind != 3", "kind >= 0"),
    ("~is_stored | (length ^ (word >> 24 & 0xFFFF) == 0xFFFF)", "length >= 0"),
    ("~is_dynamic | ((word >> 3 & 31 < 30) & (word >> 8 & 31 < 30))", "length >= 0"),
    ("left[live] >= 0", "length >= 0"),
    ("~ends | (left[live] == 0)", "length >= 0"),
    ("~ends | (following == stop)", "length >= 0"),
    ("left[live] <= (stop - begin) * _DEFLATE_RATIO", "length >= 0"),
    ("if rounds > _MOST_BLOCKS:", "if False:"),
    ("np.minimum(at, self._last_word)", "at"),
)

MUTATIONS = (
    *_CHECKS,
    _before_the_gpu("engine.py", "if number not in faults]", "]"),
    _before_the_gpu("decode.py", "pieces.coded & (stored_nbytes < pieces.lengths)", "pieces.coded"),
    _before_the_gpu("decode.py", "starts[which] - run_start", "starts[which]"),
    Mutation(
        "warnings of imports",
        "dcp_nvcomp/engines/cuda/support.py",
        "with _WARNINGS_LOCK, warnings",
        "with warnings",
        "tests/engines/test_cuda_support.py",
    ),
)
