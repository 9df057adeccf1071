/* What a decoder needs of a block's codes: their description (RFC 8878, 4.2.1) becomes a table of windows, the next 11
 * bits of a stream, each with as many symbols as lie in it whole.
 *
 * Such a table is made of smaller ones: what a window of 11 bits holds is its first symbol, and what the rest of it
 * holds, a shorter window. Codes of one symbol are next to each other, so that most of it is copied in long runs.
 *
 * A description that this does not understand, or that is wrong, is left to libzstd.
 */

#ifndef LITERALS_TABLES_H
#define LITERALS_TABLES_H

#include "_literals_codes.h"
#include "_literals_frame.h"

enum {
    WINDOWS = 1 << MAX_BITS,
    MAX_WINDOW_SYMBOLS = 6,
    MIN_STATES_LOG = 5,     /* of FSE's states for weights */
    MAX_STATES_LOG = 6,
    MAX_WEIGHT = MAX_BITS,
};

/* From the lowest byte up: how many bits the symbols take, how many symbols there are, and the symbols. */
typedef uint64_t Window;

typedef struct {
    uint8_t weights[SYMBOLS]; /* of each symbol up to the last */
    int symbols;              /* up to the last */
    unsigned max_length;      /* of a code */
} Description;

typedef struct {
    Window windows[2 * WINDOWS]; /* those of b bits begin at 1 << b */
    uint8_t symbols[SYMBOLS];    /* in the order of their codes, those with the longest first; */
    uint8_t lengths[SYMBOLS];    /* how long these are, */
    uint16_t starts[SYMBOLS];    /* and the first window that begins with each */
    int count;
} Tables;

/* ---- bits that are read backwards -------------------------------------------------------------------------------- */

static inline unsigned highest_bit(unsigned value) { return 31 - (unsigned)__builtin_clz(value); }

/* How many bits are in a stream, before the highest bit of its last byte, which marks its end. 0 if there is none. */
static size_t stream_bits(const uint8_t *stream, size_t nbytes) {
    return nbytes && stream[nbytes - 1] ? 8 * (nbytes - 1) + highest_bit(stream[nbytes - 1]) : 0;
}

/* The last `count` of a stream's first `left` bits, 11 at most; zeros stand for those that it does not have. */
static unsigned peek(const uint8_t *stream, size_t left, unsigned count) {
    size_t low = left > count ? left - count : 0;
    unsigned there = (unsigned)(left - low), shift = 0, word = 0;
    for (size_t at = low >> 3; 8 * at < left; at++, shift += 8)
        word |= (unsigned)stream[at] << shift;
    return (word >> (low & 7) & ((1u << there) - 1)) << (count - there);
}

/* ---- weights ----------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t weight;
    uint8_t nbits; /* to be read, */
    uint8_t base;  /* and what they are added to, is the next state */
} State;

/* Reads how many of the states each weight has (4.1.1); returns how many bytes that takes, or 0. `in` has a few bytes
 * more than `nbytes`. Shares of less than one state, which no encoder gives to weights, are left to libzstd. */
static size_t read_shares(const uint8_t *in, size_t nbytes, unsigned *log, unsigned *shares) {
    *log = (in[0] & 15u) + 5;
    if (*log < MIN_STATES_LOG || *log > MAX_STATES_LOG)
        return 0;
    size_t bit = 4;
    unsigned left = 1u << *log;
    for (int weight = 0; left; weight++) {
        if (weight > MAX_WEIGHT || bit > 8 * nbytes)
            return 0;
        uint32_t word;
        memcpy(&word, in + bit / 8, sizeof word);
        word >>= bit % 8;
        unsigned length = highest_bit(left + 1) + 1, half = 1u << (length - 1), shorter = 2 * half - 2 - left;
        unsigned value = word & (half - 1);
        if (value < shorter) {
            length--;
        } else {
            value = word & (2 * half - 1);
            value -= value >= half ? shorter : 0;
        }
        bit += length;
        if (value == 0)
            return 0;
        shares[weight] = value - 1;
        left -= value - 1;
        for (unsigned more = value == 1 ? 3 : 0; more == 3; bit += 2) { /* how many others have none */
            if (bit > 8 * nbytes)
                return 0;
            more = (unsigned)(in[bit / 8] | in[bit / 8 + 1] << 8) >> bit % 8 & 3;
            weight += (int)more;
        }
    }
    return bit <= 8 * nbytes ? (bit + 7) / 8 : 0;
}

static void make_states(State *states, unsigned log, const unsigned *shares) {
    unsigned size = 1u << log, at = 0, next[MAX_WEIGHT + 1];
    for (unsigned weight = 0; weight <= MAX_WEIGHT; weight++) {
        next[weight] = shares[weight];
        for (unsigned i = 0; i < shares[weight]; i++) {
            states[at].weight = (uint8_t)weight;
            at = (at + size / 2 + size / 8 + 3) % size;
        }
    }
    for (State *state = states; state < states + size; state++) {
        unsigned number = next[state->weight]++;
        state->nbits = (uint8_t)(log - highest_bit(number));
        state->base = (uint8_t)((number << state->nbits) - size);
    }
}

/* Decodes weights that FSE compressed; returns how many, or 0. Two states take turns until bits are missing. */
static int expand_weights(const uint8_t *in, size_t nbytes, uint8_t *weights) {
    State states[1 << MAX_STATES_LOG];
    unsigned shares[MAX_WEIGHT + 1 + 3] = {0}, log, state[2];
    uint8_t padded[127 + sizeof(uint32_t)] = {0};
    memcpy(padded, in, nbytes);
    size_t shares_nbytes = read_shares(padded, nbytes, &log, shares);
    if (!shares_nbytes)
        return 0;
    make_states(states, log, shares);
    const uint8_t *stream = in + shares_nbytes;
    size_t left = stream_bits(stream, nbytes - shares_nbytes);
    if (left < 2 * log)
        return 0;
    for (int turn = 0; turn < 2; turn++, left -= log)
        state[turn] = peek(stream, left, log);
    for (int count = 0; count < SYMBOLS - 2; count++) {
        const State *now = states + state[count & 1];
        weights[count] = now->weight;
        if (now->nbits > left) {
            weights[count + 1] = states[state[~count & 1]].weight;
            return count + 2;
        }
        state[count & 1] = now->base + peek(stream, left, now->nbits);
        left -= now->nbits;
    }
    return 0;
}

/* The last symbol's weight completes the others' to a power of two. */
static int complete_weights(Description *description, int count) {
    unsigned sum = 0, shortest = 0;
    for (int symbol = 0; symbol < count; symbol++) {
        unsigned weight = description->weights[symbol]; /* up to 15, of which those above MAX_WEIGHT are too much */
        sum += 1u << weight >> 1;
        shortest += weight == 1;
    }
    if (!sum || sum >= WINDOWS)
        return 0;
    unsigned length = highest_bit(sum) + 1, left = (1u << length) - sum;
    if (left & (left - 1))
        return 0;
    description->weights[count] = (uint8_t)(highest_bit(left) + 1);
    description->symbols = count + 1;
    description->max_length = length;
    return shortest + (left == 1) >= 2; /* else no code is as long as that */
}

/* Reads a description; returns its length, or 0. */
static size_t read_weights(const uint8_t *in, size_t room, Description *description) {
    int count = room ? in[0] - 127 : 0;
    size_t nbytes = count > 0 ? (size_t)(count + 1) / 2 : room ? in[0] : 0;
    if (nbytes == 0 || nbytes >= room)
        return 0;
    if (count > 0) {
        for (int symbol = 0; symbol < count; symbol++)
            description->weights[symbol] = in[1 + symbol / 2] >> (symbol & 1 ? 0 : 4) & 15;
    } else {
        count = expand_weights(in + 1, nbytes, description->weights);
    }
    return count && complete_weights(description, count) ? 1 + nbytes : 0;
}

/* ---- windows ----------------------------------------------------------------------------------------------------- */

static void order_symbols(Tables *tables, const Description *description) {
    int next[MAX_WEIGHT + 2] = {0};
    unsigned start = 0;
    tables->count = 0;
    for (int symbol = 0; symbol < description->symbols; symbol++)
        next[description->weights[symbol] + 1] += description->weights[symbol] > 0;
    for (int weight = 1; weight <= MAX_WEIGHT; weight++)
        next[weight + 1] += next[weight];
    for (int symbol = 0; symbol < description->symbols; symbol++) {
        unsigned weight = description->weights[symbol];
        if (weight) {
            int at = next[weight]++;
            tables->symbols[at] = (uint8_t)symbol;
            tables->lengths[at] = (uint8_t)(description->max_length + 1 - weight);
            tables->count++;
        }
    }
    for (int at = 0; at < tables->count; at++) {
        tables->starts[at] = (uint16_t)start;
        start += (unsigned)WINDOWS >> tables->lengths[at];
    }
}

/* A symbol, and behind it those of a window that has at most five. */
ALWAYS_INLINE Window with_first(Window rest, int symbol, unsigned length) {
    const Window numbers = 0xFFFF, first = (Window)symbol << 16 | 1 << 8 | length;
    return (rest & numbers) + ((rest & ~numbers) << 8) + first;
}

/* Fills the windows of `nbits`, of which what follows the first symbol is looked at up to `seen` bits. */
ALWAYS_INLINE void fill_windows(Tables *tables, int nbits, int seen) {
    Window *windows = tables->windows + ((size_t)1 << nbits);
    int at = 0;
    while (tables->lengths[at] > nbits)
        at++;
    memset(windows, 0, (size_t)(tables->starts[at] >> (MAX_BITS - nbits)) * sizeof *windows);
    for (; at < tables->count; at++) {
        int symbol = tables->symbols[at], length = tables->lengths[at], follow = nbits - length;
        int used = follow < seen ? follow : seen;
        Window *to = windows + (tables->starts[at] >> (MAX_BITS - nbits));
        const Window *rest = tables->windows + ((size_t)1 << used);
        if (used == follow) {
            for (int i = 0; i < 1 << follow; i++)
                to[i] = with_first(rest[i], symbol, (unsigned)length);
            continue;
        }
        for (int i = 0; i < 1 << follow; i++)
            to[i] = with_first(rest[i >> (follow - used)], symbol, (unsigned)length);
    }
}

/* If there is a code of one bit, a window could have more symbols than there is room for; five bits can't. */
VECTORS
static void make_windows(Tables *tables) {
    int shortest = tables->lengths[tables->count - 1];
    int seen = shortest == 1 ? MAX_WINDOW_SYMBOLS - 1 : MAX_BITS - shortest;
    tables->windows[1] = 0;
    for (int nbits = 1; nbits <= seen; nbits++) {
        if (nbits < shortest)
            memset(tables->windows + ((size_t)1 << nbits), 0, ((size_t)1 << nbits) * sizeof(Window));
        else
            fill_windows(tables, nbits, nbits);
    }
    fill_windows(tables, MAX_BITS, seen);
}

#endif
