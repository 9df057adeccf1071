"""What stands between a tensor and a zstd frame that decodes to something else, or memory that is not its own."""

from __future__ import annotations

from tests.faults.mutations import Mutation

_TESTS = "tests/codecs/test_literals_sanitized.py"
_MADE = f"{_TESTS} -k frames_made"
_DECODING = "tests/codecs/test_literals_decoding.py"
_WHOLE_BLOCKS = "tests/codecs/test_planes_literals.py"
_WHOLE = f"{_WHOLE_BLOCKS} -k sanitizers"
_FLIPPED = f"{_WHOLE_BLOCKS} -k a_bit_that_flipped"


def _mutations(file: str, *changes: tuple[str, str, str]) -> tuple[Mutation, ...]:
    source = f"dcp_nvcomp/codecs/{file}"
    return tuple(Mutation("literals", source, old, new, tests) for old, new, tests in changes)


MUTATIONS = (
    *_mutations(
        "coders/_literals_encode.h",
        ("FLUSHED_SYMBOLS = 4,", "FLUSHED_SYMBOLS = 6,", _MADE),
        ("MAX_PENDING_BITS = 56,", "MAX_PENDING_BITS = 64,", _MADE),
        ("for (; a_left > b_left; flush(&s))", "for (; a_left > b_left + 1; flush(&s))", _MADE),
        ("put(s, codes[a[a_length / 2]]);", ";", _MADE),
        ("put(t, codes[b[b_length / 2]]);", ";", _MADE),
        ("if (!description_nbytes || most >= nbytes)", "if (!description_nbytes)", _MADE),
        ("+ nbytes + FLUSH_NBYTES;", "+ nbytes - 8;", _MADE),
    ),
    *_mutations(
        "coders/_literals.c",
        (" && (size_t)out.len >= frame_room(data_nbytes)", "", _MADE),
    ),
    *_mutations(
        "coders/_literals_units.h",
        ("high = high < highest ? high : highest;", "", f"{_TESTS} -k pairs"),
        ("range <= MAX_PAIRED_RANGE && ", "", _MADE),
    ),
    *_mutations(
        "coders/_literals_codes.h",
        ("if (huffman(counts, leaves, lengths) > MAX_BITS)", "if (0)", _MADE),
        ("put(stream, make_code(1, 1));", "", _MADE),
    ),
    *_mutations(
        "coders/_literals_weights.h",
        (
            "fse.states[fse.starts[weights[symbol]]];",
            "fse.states[fse.starts[weights[symbol]] + fse.shares[weights[symbol]] - 1];",
            _MADE,
        ),
        ("counts[weight] && !share ? 1 : share;", "share;", _MADE),
        ("if (counts[weights[0]] < (uint32_t)total)", "if (total > 1)", _MADE),
    ),
    *_mutations(
        "coders/_literals_tables.h",
        ("if (weight > MAX_WEIGHT || bit > 8 * nbytes)", "if (bit > 8 * nbytes)", f"{_DECODING} -k corrupt"),
        (" || sum >= WINDOWS", "", f"{_DECODING} -k corrupt"),
        ("if (left & (left - 1))", "if (0)", f"{_DECODING} -k corrupt"),
        ("return shortest + (left == 1) >= 2;", "return 1;", f"{_DECODING} -k descriptions"),
        ("count < SYMBOLS - 2", "count < 2 * SYMBOLS", f"{_DECODING} -k corrupt"),
        ("if (nbytes == 0 || nbytes >= room)", "if (nbytes == 0)", f"{_DECODING} -k corrupt"),
        ("shortest == 1 ? MAX_WINDOW_SYMBOLS - 1 : ", "", f"{_DECODING} -k encoder_makes"),
    ),
    *_mutations(
        "coders/_literals_decode.h",
        ("WINDOWS_A_ROUND = 5,", "WINDOWS_A_ROUND = 6,", f"{_DECODING} -k encoder_makes"),
        ("(windows - 1) * MAX_WINDOW_SYMBOLS + 8", "windows * 2", f"{_DECODING} -k encoder_makes"),
        ("(size_t)(7 + windows * MAX_BITS) / 8", "(size_t)windows", f"{_DECODING} -k corrupt_frames"),
        ("if (length > nbytes - start)", "if (0)", f"{_DECODING} -k corrupt_frames"),
        ("if (lanes[at].left >= 64)", "if (lanes[at].left)", f"{_DECODING} -k encoder_makes"),
        ("        if (length > lane->left)\n            return 0;\n", "", f"{_DECODING} -k corrupt"),
        ("return lane->left == 0;", "return 1;", f"{_DECODING} -k corrupt"),
        (" || count > room", " || count > room + 5000", f"{_DECODING} -k wrong_length"),
        (" || size > most", " || size > 2 * most", f"{_DECODING} -k none_of_ours"),
        ("taken > nbytes - at || ", "", f"{_DECODING} -k cut"),
        ("return at == nbytes && room == 0;", "return 1;", f"{_DECODING} -k wrong_length"),
    ),
    *_mutations(
        "_planes_literals.c",
        ("if ((size_t)call.out.len < room)", "if (0)", _WHOLE),
        (" || job->slice_nbytes % ALIGNMENT_NBYTES", "", _WHOLE),
        ("if (stored > nbytes || block->nbytes - at < padded(stored))", "if (stored > nbytes)", _WHOLE),
        ("if (stored > nbytes || ", "if (", _WHOLE),
        ("if (block->nbytes < at || block->nbytes - at < padded(rest_nbytes))", "if (0)", _WHOLE),
        ("if ((size_t)PyTuple_Size(slices) != slice_count(&call->job, block))", "if (0)", _WHOLE),
        ("size_t stored = coded < nbytes ? coded : nbytes;", "size_t stored = coded;", _WHOLE),
        ("check_stored && crc32c(0, block->data, block->nbytes) != block->encoded_crc", "0", _WHOLE),
        ("if (job->blocks[number].crc != crcs[number])", "if (0)", _WHOLE),
        ("block->crc = crc32c(block->crc, row, nbytes);\n                block->seen", "block->seen", _WHOLE),
    ),
    *_mutations(
        "_crc32c.h",
        ("make_lane_table(short_lane, SHORT_LANE_NBYTES);", "make_lane_table(short_lane, LANE_NBYTES);", _WHOLE),
    ),
    *_mutations(
        "planes_literals.py",
        ('self.slice_nbytes, verify != "off", verify', "self.slice_nbytes, False, verify", _FLIPPED),
        ('verify == "full"\n', "False\n", f"{_WHOLE_BLOCKS} -k not_those_saved"),
    ),
)
