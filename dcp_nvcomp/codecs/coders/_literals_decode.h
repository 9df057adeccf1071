/* Decodes frames as _literals_encode.h writes them: an order of magnitude less to consider than what libzstd knows of the
 * format, and all streams of exponents.
 *
 * The four streams of a block are decoded side by side, as the steps of one have to wait for each other. That the
 * lowest of 64 bits is set, and so shows how many were shifted out, is zstd's trick (huf_decompress.c). A table tells
 * what the next 11 bits hold (_literals_tables.h), for exponents three or four symbols.
 *
 * Frames come from outside: whatever is not as expected is left to libzstd, which knows if it is wrong.
 */

#ifndef LITERALS_DECODE_H
#define LITERALS_DECODE_H

#include "_literals_tables.h"

enum {
    MIN_DECODED_NBYTES = 64, /* of a coded block; shorter ones are seldom coded */
    WINDOWS_A_ROUND = 5,     /* of 11 bits, of the 57 at least that are there */
};

/* One stream of a block, and where its symbols go. */
typedef struct {
    const uint8_t *stream;
    size_t left; /* how many of its bits are not read yet; from the last to the first */
    uint8_t *out;
    uint8_t *end;
} Lane;

/* A lane while it is decoded fast. */
typedef struct {
    uint64_t bits; /* the next ones at the top; the lowest one that is set is no bit of the stream */
    const uint8_t *in;
    uint8_t *out;
} Cursor;

ALWAYS_INLINE size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static inline void fill_bits(Cursor *cursor, unsigned used) {
    uint64_t bits;
    memcpy(&bits, cursor->in, sizeof bits);
    cursor->bits = (bits | 1) << used;
}

ALWAYS_INLINE void take_window(Cursor *cursor, const Window *windows) {
    Window window = windows[cursor->bits >> (64 - MAX_BITS)];
    uint64_t symbols = window >> 16;
    memcpy(cursor->out, &symbols, sizeof symbols);
    cursor->out += window >> 8 & 0xFF;
    cursor->bits <<= window & 63;
}

ALWAYS_INLINE void refill(Cursor *cursor) {
    unsigned used = (unsigned)__builtin_ctzll(cursor->bits);
    cursor->in -= used >> 3;
    fill_bits(cursor, used & 7);
}

/* How many rounds of so many windows a lane has bytes for in any case: for what a round reads behind the 7 bits of the
 * one before, and for what it writes, if all its windows are full and the last is written as 8 bytes. */
ALWAYS_INLINE size_t rounds_of(const Cursor *cursor, const Lane *lane, int windows) {
    size_t in_nbytes = (size_t)(7 + windows * MAX_BITS) / 8;
    size_t out_nbytes = (size_t)(windows - 1) * MAX_WINDOW_SYMBOLS + 8;
    return smaller((size_t)(cursor->in - lane->stream) / in_nbytes, (size_t)(lane->end - cursor->out) / out_nbytes);
}

static Cursor begin_lane(const Lane *lane) {
    Cursor cursor = {0, lane->stream + (lane->left + 7) / 8 - sizeof(uint64_t), lane->out};
    fill_bits(&cursor, (unsigned)(-lane->left & 7));
    return cursor;
}

static void end_lane(Lane *lane, const Cursor *cursor) {
    lane->left = 8 * (size_t)(cursor->in - lane->stream) + 64 - (size_t)__builtin_ctzll(cursor->bits);
    lane->out = cursor->out;
}

/* Decodes four lanes, of at least 64 bits each, until one of them is near an end. */
SHIFTS
static void decode_together(Lane *lanes, const Window *windows) {
    Cursor a = begin_lane(&lanes[0]), b = begin_lane(&lanes[1]);
    Cursor c = begin_lane(&lanes[2]), d = begin_lane(&lanes[3]);
    for (;;) {
        size_t of_ab = smaller(rounds_of(&a, &lanes[0], WINDOWS_A_ROUND), rounds_of(&b, &lanes[1], WINDOWS_A_ROUND));
        size_t of_cd = smaller(rounds_of(&c, &lanes[2], WINDOWS_A_ROUND), rounds_of(&d, &lanes[3], WINDOWS_A_ROUND));
        size_t rounds = smaller(of_ab, of_cd);
        if (!rounds)
            break;
        for (; rounds; rounds--) {
            for (int i = 0; i < WINDOWS_A_ROUND; i++) {
                take_window(&a, windows);
                take_window(&b, windows);
                take_window(&c, windows);
                take_window(&d, windows);
            }
            refill(&a);
            refill(&b);
            refill(&c);
            refill(&d);
        }
    }
    end_lane(&lanes[0], &a);
    end_lane(&lanes[1], &b);
    end_lane(&lanes[2], &c);
    end_lane(&lanes[3], &d);
}

ALWAYS_INLINE void decode_rounds(Cursor *cursor, const Lane *lane, const Window *windows, int in_a_round) {
    for (size_t rounds; (rounds = rounds_of(cursor, lane, in_a_round)) > 0;) {
        for (; rounds; rounds--) {
            for (int i = 0; i < in_a_round; i++)
                take_window(cursor, windows);
            refill(cursor);
        }
    }
}

/* Decodes one lane, of at least 64 bits, nearly to its end. */
SHIFTS
static void decode_alone(Lane *lane, const Window *windows) {
    Cursor cursor = begin_lane(lane);
    decode_rounds(&cursor, lane, windows, WINDOWS_A_ROUND);
    decode_rounds(&cursor, lane, windows, 1);
    end_lane(lane, &cursor);
}

/* Decodes what is left of a lane. Returns 0 if its bits are not exactly those of its symbols. */
static int finish_lane(Lane *lane, const Tables *tables) {
    while (lane->out < lane->end) {
        unsigned bits = peek(lane->stream, lane->left, MAX_BITS);
        Window window = tables->windows[WINDOWS + bits];
        size_t count = window >> 8 & 0xFF, length = window & 0xFF;
        if (count > (size_t)(lane->end - lane->out)) { /* the last ones were made of zeros that are not in the stream */
            int at = tables->count - 1;
            while (tables->starts[at] > bits)
                at--;
            count = 1;
            length = tables->lengths[at];
        }
        if (length > lane->left)
            return 0;
        lane->left -= length;
        for (window >>= 16; count; count--, window >>= 8)
            *lane->out++ = (uint8_t)window;
    }
    return lane->left == 0;
}

/* Decodes four streams behind their jump table, `nbytes` together, into `count` symbols. */
static int decode_streams(const uint8_t *in, size_t nbytes, uint8_t *out, size_t count, const Tables *tables) {
    Lane lanes[STREAMS];
    size_t start = JUMP_TABLE_NBYTES;
    int are_long = 1;
    for (int at = 0; at < STREAMS; at++) {
        size_t length = at < 3 ? (size_t)(in[2 * at] | in[2 * at + 1] << 8) : nbytes - start;
        if (length > nbytes - start)
            return 0;
        lanes[at] = (Lane){in + start, stream_bits(in + start, length), out, out + stream_length(count, at)};
        if (!lanes[at].left)
            return 0;
        are_long &= lanes[at].left >= 64;
        out = lanes[at].end;
        start += length;
    }
    if (are_long)
        decode_together(lanes, tables->windows + WINDOWS);
    for (int at = 0; at < STREAMS; at++) {
        if (lanes[at].left >= 64)
            decode_alone(&lanes[at], tables->windows + WINDOWS);
        if (!finish_lane(&lanes[at], tables))
            return 0;
    }
    return 1;
}

static uint64_t read_number(const uint8_t *in, int nbytes) {
    uint64_t number = 0;
    memcpy(&number, in, (size_t)nbytes);
    return number;
}

/* Decodes a block that is coded, to at most `room` bytes; returns how many, or 0. */
static size_t decode_block(const uint8_t *in, size_t nbytes, uint8_t *out, size_t room, Tables *tables) {
    if (nbytes < LITERALS_HEADER_NBYTES + 1)
        return 0;
    uint64_t header = read_number(in, LITERALS_HEADER_NBYTES);
    size_t count = header >> 4 & 0x3FFFF, coded_nbytes = header >> 22;
    /* and behind the literals nothing but a zero: no sequences */
    if ((header & 15) != LITERALS_KIND || nbytes != LITERALS_HEADER_NBYTES + coded_nbytes + 1 || in[nbytes - 1])
        return 0;
    if (count < MIN_DECODED_NBYTES || count > room || count > MAX_BLOCK_NBYTES)
        return 0;
    Description description;
    in += LITERALS_HEADER_NBYTES;
    size_t description_nbytes = read_weights(in, coded_nbytes, &description);
    if (!description_nbytes || coded_nbytes - description_nbytes < JUMP_TABLE_NBYTES)
        return 0;
    order_symbols(tables, &description);
    make_windows(tables);
    in += description_nbytes;
    return decode_streams(in, coded_nbytes - description_nbytes, out, count, tables) ? count : 0;
}

/* Decodes a frame to exactly `room` bytes. Returns 0 if it is not of the kind that is decoded here; what is in `out`
 * has no meaning then. */
static int decode_frame(const uint8_t *in, size_t nbytes, uint8_t *out, size_t room, Tables *tables) {
    if (nbytes < FRAME_HEADER_NBYTES || read_number(in, 4) != FRAME_MAGIC || in[4] != FRAME_DESCRIPTOR)
        return 0;
    if (read_number(in + 5, 4) != room)
        return 0;
    size_t most = smaller(room, MAX_BLOCK_NBYTES), at = FRAME_HEADER_NBYTES;
    for (int is_last = 0; !is_last;) {
        if (nbytes - at < BLOCK_HEADER_NBYTES)
            return 0;
        uint64_t header = read_number(in + at, BLOCK_HEADER_NBYTES);
        size_t size = header >> 3, decoded = size;
        int kind = header >> 1 & 3;
        is_last = header & 1;
        at += BLOCK_HEADER_NBYTES;
        size_t taken = kind == RUN_BLOCK ? 1 : size;
        if (size == 0 || size > most || taken > nbytes - at || (kind != CODED_BLOCK && size > room))
            return 0;
        if (kind == RAW_BLOCK)
            memcpy(out, in + at, size);
        else if (kind == RUN_BLOCK)
            memset(out, in[at], size);
        else
            decoded = kind == CODED_BLOCK ? decode_block(in + at, size, out, room, tables) : 0;
        if (!decoded)
            return 0;
        at += taken;
        out += decoded;
        room -= decoded;
    }
    return at == nbytes && room == 0;
}

#endif
