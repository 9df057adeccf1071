/* Zstandard frames (RFC 8878) of literals alone: each block of at most 128 KiB is Huffman-coded, and has no sequences.
 *
 * Any zstd decoder reads them. libzstd can be talked into nearly the same, but not out of searching for matches, which
 * cost half of its time on exponent planes and gain nothing.
 *
 * A block is a run of one byte, or four Huffman-coded streams behind a description of their codes, or the bytes as
 * they are where that would be no shorter. The steps of coding one:
 *
 *   _literals_units.h     takes a copy, in which two symbols are one where that is possible, and counts them
 *   _literals_codes.h     finds the best codes of at most 11 bits
 *   _literals_weights.h   describes the codes
 *   here                  codes the streams, two at the same time, as their instructions do not depend on each other
 *
 * All bytes are counted, so before it is written it is known how long a block will be, but for a few bytes: room for
 * the bytes as they are is enough.
 */

#ifndef LITERALS_ENCODE_H
#define LITERALS_ENCODE_H

#include <stdint.h>
#include <string.h>

#include "_literals_codes.h"
#include "_literals_frame.h"
#include "_literals_units.h"
#include "_literals_weights.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "For little-endian machines; libzstd is used elsewhere."
#endif

enum {
    MIN_FRAME_NBYTES = 1024, /* shorter ones are left to libzstd, which has shorter headers */
    MIN_CODED_NBYTES = 64,   /* of a block; four streams and a table do not pay before */
    FLUSH_NBYTES = 8,   /* what a flush writes, of which the last bytes may not count */
    MAX_PENDING_BITS = 56, /* of a stream: clear of the 8 bits of a code's length, */
    FLUSHED_SYMBOLS = 4,   /* as 7 bits left from before and 4 * 11 are in any case */
    MAX_STREAM_NBYTES = (MAX_BLOCK_NBYTES / 4 * MAX_BITS + 1 + 7) / 8 + FLUSH_NBYTES,
};

enum Kind { SINGLES, LONG_PAIRS, SHORT_PAIRS }; /* of units; pairs by how many bits they take on average */

typedef struct {
    Units units;
    Table table;
    int are_short; /* pairs */
    uint8_t stream[MAX_STREAM_NBYTES]; /* while it is not known where it begins */
} Work;

ALWAYS_INLINE Code code_of(const Code *codes, const void *units, size_t at, enum Kind kind) {
    return codes[kind == SINGLES ? ((const uint8_t *)units)[at] : ((const uint16_t *)units)[at]];
}

/* Codes four pairs of few bits, and flushes. That there is no room for all of their bits is so rare that processors
 * guess right; else it would cost more than a flush. */
ALWAYS_INLINE void code_four(Stream *stream, const Code *codes, const uint16_t *pairs) {
    Code a = codes[pairs[3]], b = codes[pairs[2]], c = codes[pairs[1]], d = codes[pairs[0]];
    put(stream, a);
    put(stream, b);
    if (stream->count + (uint32_t)c + (uint32_t)d > MAX_PENDING_BITS)
        flush(stream);
    put(stream, c);
    put(stream, d);
    flush(stream);
}

/* Codes the units of two streams, `a_left` of them and `b_left`, at most 3 fewer. */
ALWAYS_INLINE void code_units(Stream *a_stream, Stream *b_stream, const Code *codes, const void *a, size_t a_left,
                              const void *b, size_t b_left, enum Kind kind) {
    Stream s = *a_stream, t = *b_stream; /* copies that the compiler can keep in registers */
    for (; a_left > b_left; flush(&s))
        put(&s, code_of(codes, a, --a_left, kind));
    size_t left = b_left;
    flush(&s);
    flush(&t);
    for (; kind == SHORT_PAIRS && left >= 4; left -= 4) {
        code_four(&s, codes, (const uint16_t *)a + left - 4);
        code_four(&t, codes, (const uint16_t *)b + left - 4);
    }
    const size_t flushed = kind == SINGLES ? FLUSHED_SYMBOLS : FLUSHED_SYMBOLS / 2;
    while (left >= flushed) {
        flush(&s);
        for (size_t i = 0; i < flushed; i++) {
            left--;
            put(&s, code_of(codes, a, left, kind));
            put(&t, code_of(codes, b, left, kind));
        }
        flush(&t);
    }
    flush(&s);
    while (left) {
        left--;
        put(&s, code_of(codes, a, left, kind));
        put(&t, code_of(codes, b, left, kind));
    }
    flush(&s);
    flush(&t);
    *a_stream = s;
    *b_stream = t;
}

SHIFTS
static void code_long_pairs(Stream *s, Stream *t, const Code *codes, const uint16_t *a, size_t a_left,
                            const uint16_t *b, size_t b_left) {
    code_units(s, t, codes, a, a_left, b, b_left, LONG_PAIRS);
}

SHIFTS
static void code_short_pairs(Stream *s, Stream *t, const Code *codes, const uint16_t *a, size_t a_left,
                             const uint16_t *b, size_t b_left) {
    code_units(s, t, codes, a, a_left, b, b_left, SHORT_PAIRS);
}

SHIFTS
static void code_singles(Stream *s, Stream *t, const Code *codes, const uint8_t *a, size_t a_left, const uint8_t *b,
                         size_t b_left) {
    code_units(s, t, codes, a, a_left, b, b_left, SINGLES);
}

static void code_two_streams(Stream *s, Stream *t, const Work *work, size_t nbytes, int at) {
    size_t a_length = stream_length(nbytes, at), b_length = stream_length(nbytes, at + 1);
    const Units *units = &work->units;
    if (units->range) {
        const uint16_t *a = units->pairs + pairs_at(nbytes, at), *b = units->pairs + pairs_at(nbytes, at + 1);
        const Code *codes = work->table.codes + units->first;
        if (a_length & 1)
            put(s, codes[a[a_length / 2]]);
        if (b_length & 1)
            put(t, codes[b[b_length / 2]]);
        if (work->are_short)
            code_short_pairs(s, t, units->codes, a, a_length / 2, b, b_length / 2);
        else
            code_long_pairs(s, t, units->codes, a, a_length / 2, b, b_length / 2);
    } else {
        const uint8_t *a = units->symbols + (size_t)at * stream_length(nbytes, 0);
        code_singles(s, t, work->table.codes, a, a_length, a + a_length, b_length);
    }
    finish(s);
    finish(t);
}

static uint8_t *write_number(uint8_t *out, uint64_t value, int nbytes) {
    memcpy(out, &value, (size_t)nbytes);
    return out + nbytes;
}

/* Codes the four streams of a block and returns where they end; how long the first three are goes into `jumps`. */
static uint8_t *code_streams(uint8_t *out, uint8_t *jumps, Work *work, size_t nbytes) {
    for (int at = 0; at < STREAMS; at += 2) {
        Stream s = {0, 0, out}, t = {0, 0, work->stream};
        code_two_streams(&s, &t, work, nbytes, at);
        size_t s_nbytes = (size_t)(s.out - out), t_nbytes = (size_t)(t.out - work->stream);
        memcpy(s.out, work->stream, t_nbytes);
        out = s.out + t_nbytes;
        jumps = write_number(jumps, s_nbytes, 2);
        if (at == 0)
            jumps = write_number(jumps, t_nbytes, 2);
    }
    return out;
}

static uint8_t *write_block_header(uint8_t *out, size_t nbytes, int kind, int is_last) {
    return write_number(out, (uint64_t)nbytes << 3 | (uint64_t)kind << 1 | (uint64_t)is_last, BLOCK_HEADER_NBYTES);
}

static uint8_t *write_run(uint8_t *out, int symbol, size_t nbytes, int is_last) {
    out = write_block_header(out, nbytes, RUN_BLOCK, is_last);
    *out++ = (uint8_t)symbol;
    return out;
}

static uint8_t *write_raw(uint8_t *out, const uint8_t *data, size_t nbytes, int is_last) {
    out = write_block_header(out, nbytes, RAW_BLOCK, is_last);
    memcpy(out, data, nbytes);
    return out + nbytes;
}

/* Writes one block; returns where it ends. */
static uint8_t *write_block(uint8_t *out, const uint8_t *data, size_t nbytes, int is_last, Work *work) {
    Units *units = &work->units;
    Table *table = &work->table;
    int first, last;
    find_range(data, nbytes, &first, &last);
    if (first == last)
        return write_run(out, first, nbytes, is_last);
    if (nbytes < MIN_CODED_NBYTES)
        return write_raw(out, data, nbytes, is_last);
    take_units(units, table, data, nbytes, first, last);
    if (table->symbols == 1) /* not what was there a moment ago */
        return write_run(out, table->last, nbytes, is_last);
    uint64_t bits = find_codes(table);
    uint8_t description[WEIGHTS_ROOM];
    size_t description_nbytes = write_weights(description, table);
    /* each stream takes at most a byte more than its bits do, and that there are no sequences another one */
    size_t most = LITERALS_HEADER_NBYTES + description_nbytes + JUMP_TABLE_NBYTES + (size_t)(bits / 8) + STREAMS + 1;
    if (!description_nbytes || most >= nbytes)
        return write_raw(out, data, nbytes, is_last);
    work->are_short = bits <= 4 * nbytes; /* four pairs take 32 of 56 bits */
    if (units->range)
        code_pairs(units->codes, table->codes + units->first, units->range);
    uint8_t *block = out + BLOCK_HEADER_NBYTES, *coded = block + LITERALS_HEADER_NBYTES;
    uint8_t *jumps = coded + description_nbytes;
    memcpy(coded, description, description_nbytes);
    uint8_t *end = code_streams(jumps + JUMP_TABLE_NBYTES, jumps, work, nbytes);
    uint64_t coded_nbytes = (uint64_t)(end - coded);
    *end++ = 0; /* no sequences */
    write_block_header(out, (size_t)(end - block), CODED_BLOCK, is_last);
    write_number(block, LITERALS_KIND | (uint64_t)nbytes << 4 | coded_nbytes << 22, LITERALS_HEADER_NBYTES);
    return end;
}

static uint8_t *write_frame_header(uint8_t *out, size_t nbytes) {
    out = write_number(out, FRAME_MAGIC, 4);
    *out++ = FRAME_DESCRIPTOR;
    return write_number(out, nbytes, 4);
}

/* The longest frame, and what a flush writes behind it: no block is longer than its content and a header. */
static size_t frame_room(size_t nbytes) {
    size_t blocks = (nbytes + MAX_BLOCK_NBYTES - 1) / MAX_BLOCK_NBYTES;
    return FRAME_HEADER_NBYTES + blocks * BLOCK_HEADER_NBYTES + nbytes + FLUSH_NBYTES;
}

/* `out` has `frame_room(nbytes)` bytes, and `nbytes` is at least MIN_FRAME_NBYTES. Returns the frame's length. */
static size_t encode_frame(const uint8_t *data, size_t nbytes, uint8_t *out, Work *work) {
    uint8_t *at = write_frame_header(out, nbytes);
    while (nbytes) {
        size_t block_nbytes = nbytes < MAX_BLOCK_NBYTES ? nbytes : MAX_BLOCK_NBYTES;
        at = write_block(at, data, block_nbytes, block_nbytes == nbytes, work);
        data += block_nbytes;
        nbytes -= block_nbytes;
    }
    return (size_t)(at - out);
}

#endif
