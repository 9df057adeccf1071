/* The description of a table of codes (RFC 8878, 4.2.1.1 and 4.2.1.2): the weights of all symbols but the last, whose
 * own follows from theirs. They are listed, or compressed by FSE where that is shorter.
 *
 * A list has four bits for each symbol up to the last, so it can't reach beyond symbol 128; and since the exponents of
 * trained floats begin near 90, most of it would be zeros. By FSE they take some 30 bytes instead of 63.
 *
 * Here FSE has 64 states, which the weights share by how often they occur (32 would save a byte now and then). Two
 * states take turns, one for even symbols and one for odd. Weights are coded from the last to the first: of the states
 * of a weight the one is taken from which a decoder can get to the state that follows, and the bits that it needs for
 * that are written. For the last two weights no bits are: a state of theirs is where coding begins. As a decoder ends
 * where it misses bits, the last weight but one must begin in a state that asks for some; a weight's first state does,
 * unless there is no other weight.
 */

#ifndef LITERALS_WEIGHTS_H
#define LITERALS_WEIGHTS_H

#include "_literals_codes.h"

enum {
    MAX_LISTED_SYMBOL = 128,
    MAX_FSE_NBYTES = 127,
    STATES_LOG = 6,
    STATES = 1 << STATES_LOG,
    WEIGHTS = MAX_BITS + 1,
    /* what FSE may take before it is known to be too long: shares, weights and what flushes write */
    WEIGHTS_ROOM = 1 + 2 * WEIGHTS + SYMBOLS * STATES_LOG / 8 + 16,
};

typedef struct {
    int shares[WEIGHTS];    /* how many states each weight has; together all */
    int starts[WEIGHTS];    /* where in `states` they are listed, */
    uint8_t states[STATES]; /* in rising order */
} Fse;

/* Shares in proportion to the counts, at least one for each weight that occurs (Webster's method). */
static void share_states(Fse *fse, const uint32_t *counts, int total) {
    int left = STATES;
    for (int weight = 0; weight < WEIGHTS; weight++) {
        int share = (int)counts[weight] * STATES / total;
        fse->shares[weight] = counts[weight] && !share ? 1 : share;
        left -= fse->shares[weight];
    }
    for (int step = left < 0 ? -1 : 1; left; left -= step) {
        int best = -1;
        for (int weight = 0; weight < WEIGHTS; weight++) {
            if (!counts[weight] || (step < 0 && fse->shares[weight] == 1))
                continue;
            if (best >= 0) { /* one is given where the count for each is highest, and taken where it is lowest */
                int here = (int)counts[weight] * (2 * fse->shares[best] + step);
                int there = (int)counts[best] * (2 * fse->shares[weight] + step);
                if (step * here <= step * there)
                    continue;
            }
            best = weight;
        }
        fse->shares[best] += step;
    }
}

/* The RFC deals states out in steps (4.1.1). */
static void deal_states(Fse *fse) {
    uint8_t weight_of[STATES];
    int next[WEIGHTS], listed = 0, at = 0;
    for (int weight = 0; weight < WEIGHTS; weight++) {
        next[weight] = fse->starts[weight] = listed;
        listed += fse->shares[weight];
        for (int i = 0; i < fse->shares[weight]; i++) {
            weight_of[at] = (uint8_t)weight;
            at = (at + STATES / 2 + STATES / 8 + 3) % STATES;
        }
    }
    for (int state = 0; state < STATES; state++)
        fse->states[next[weight_of[state]]++] = (uint8_t)state;
}

/* Each share as a number up to what is left, of which the lowest take a bit less (4.1.1). */
static uint8_t *write_shares(uint8_t *out, const Fse *fse) {
    Stream stream = {0, 0, out};
    unsigned left = STATES;
    put(&stream, make_code(STATES_LOG - 5, 4));
    for (int weight = 0; left; weight++) {
        unsigned value = (unsigned)fse->shares[weight] + 1, length = 0;
        while ((left + 1) >> length)
            length++;
        unsigned shorter = (1u << length) - 1 - (left + 1), half = 1u << (length - 1);
        put(&stream, make_code(value < half ? value : value + shorter, value < shorter ? length - 1 : length));
        left -= value - 1;
        if (value == 1) { /* none; then two bits say how many more have none, and 3 that there may be others */
            unsigned more = 0;
            for (; weight + 1 < WEIGHTS && !fse->shares[weight + 1]; weight++)
                more++;
            for (; more >= 3; more -= 3)
                put(&stream, make_code(3, 2));
            put(&stream, make_code(more, 2));
        }
        flush(&stream);
    }
    return stream.out + (stream.count > 0);
}

/* Moves to the state of `weight` from which a decoder gets to `state`, and writes the bits for its way. */
static inline void code_weight(Stream *stream, const Fse *fse, int *state, int weight) {
    int from = *state + STATES, share = fse->shares[weight];
    unsigned length = 0;
    while (from >> length >= 2 * share)
        length++;
    put(stream, make_code((uint64_t)from & ((1u << length) - 1), length));
    flush(stream);
    *state = fse->states[fse->starts[weight] + (from >> length) - share];
}

/* Of at least two weights that are not all the same. */
static uint8_t *write_fse(uint8_t *out, const uint8_t *weights, int total, const uint32_t *counts) {
    Fse fse;
    int states[2]; /* of even and of odd symbols */
    share_states(&fse, counts, total);
    deal_states(&fse);
    Stream stream = {0, 0, write_shares(out, &fse)};
    for (int symbol = total - 2; symbol < total; symbol++)
        states[symbol & 1] = fse.states[fse.starts[weights[symbol]]];
    for (int symbol = total - 3; symbol >= 0; symbol--)
        code_weight(&stream, &fse, &states[symbol & 1], weights[symbol]);
    put(&stream, make_code((uint64_t)states[1], STATES_LOG));
    put(&stream, make_code((uint64_t)states[0], STATES_LOG));
    finish(&stream);
    return stream.out;
}

static uint8_t *list_weights(uint8_t *out, const uint8_t *weights, int total) {
    for (int symbol = 0; symbol < total; symbol += 2)
        *out++ = (uint8_t)(weights[symbol] << 4 | weights[symbol + 1]); /* zero behind the last */
    return out;
}

/* Returns the length of the description, or 0 if there is none: 256 symbols with codes of eight bits. */
static size_t write_weights(uint8_t *out, const Table *table) {
    uint8_t weights[SYMBOLS] = {0};
    uint32_t counts[WEIGHTS] = {0};
    int total = table->last;
    for (int symbol = 0; symbol < total; symbol++) {
        int length = table->lengths[symbol];
        weights[symbol] = (uint8_t)(length ? table->max_length + 1 - length : 0);
        counts[weights[symbol]]++;
    }
    size_t listed = total <= MAX_LISTED_SYMBOL ? (size_t)(total + 1) / 2 : MAX_FSE_NBYTES + 1;
    if (counts[weights[0]] < (uint32_t)total) {
        size_t nbytes = (size_t)(write_fse(out + 1, weights, total, counts) - (out + 1));
        if (nbytes < listed && nbytes <= MAX_FSE_NBYTES) {
            *out = (uint8_t)nbytes;
            return 1 + nbytes;
        }
    }
    if (total > MAX_LISTED_SYMBOL)
        return 0;
    *out = (uint8_t)(127 + total);
    return (size_t)(list_weights(out + 1, weights, total) - out);
}

#endif
