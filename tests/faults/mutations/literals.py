"""What stands between a tensor and a zstd frame that decodes to something else, or memory that is overwritten."""

from __future__ import annotations

from tests.faults.mutations import Mutation

_TESTS = "tests/codecs/test_literals_sanitized.py"
_MADE = f"{_TESTS} -k frames_made"


def _mutations(file: str, *changes: tuple[str, str, str]) -> tuple[Mutation, ...]:
    source = f"dcp_nvcomp/codecs/coders/{file}"
    return tuple(Mutation("literals", source, old, new, tests) for old, new, tests in changes)


MUTATIONS = (
    *_mutations(
        "_literals.c",
        ("FLUSHED_SYMBOLS = 4,", "FLUSHED_SYMBOLS = 6,", _MADE),
        ("for (; a_left > b_left; flush(&s))", "for (; a_left > b_left + 1; flush(&s))", _MADE),
        ("put(s, codes[a[a_length / 2]]);", ";", _MADE),
        ("put(t, codes[b[b_length / 2]]);", ";", _MADE),
        ("if (!description_nbytes || most >= nbytes)", "if (!description_nbytes)", _MADE),
        (" && (size_t)out.len >= frame_room(data_nbytes)", "", _MADE),
        ("+ nbytes + FLUSH_NBYTES;", "+ nbytes - 8;", _MADE),
    ),
    *_mutations(
        "_literals_units.h",
        ("high = high < highest ? high : highest;", "", f"{_TESTS} -k pairs"),
        ("range <= MAX_PAIRED_RANGE && ", "", _MADE),
    ),
    *_mutations(
        "_literals_codes.h",
        ("if (huffman(counts, leaves, lengths) > MAX_BITS)", "if (0)", _MADE),
        ("put(stream, make_code(1, 1));", "", _MADE),
    ),
    *_mutations(
        "_literals_weights.h",
        (
            "fse.states[fse.starts[weights[symbol]]];",
            "fse.states[fse.starts[weights[symbol]] + fse.shares[weights[symbol]] - 1];",
            _MADE,
        ),
        ("counts[weight] && !share ? 1 : share;", "share;", _MADE),
        ("if (counts[weights[0]] < (uint32_t)total)", "if (total > 1)", _MADE),
    ),
)
