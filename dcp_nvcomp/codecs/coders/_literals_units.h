/* A block's units: a copy of it, in which, where its bytes lie in a small range, two neighbouring symbols are one
 * number, below the square of that range. So they are counted together, and their codes found and written together, in
 * half the steps.
 *
 * The block may change meanwhile, if another process writes into the tensor. As each byte is copied once, and into the
 * range that was seen before, what is coded is then of no use, but it is the same in every step.
 */

#ifndef LITERALS_UNITS_H
#define LITERALS_UNITS_H

#include "_literals_codes.h"
#include "_literals_frame.h"

enum {
    MAX_PAIRED_RANGE = 128, /* beyond, pairs have so many codes that looking one up is slow */
};

typedef struct {
    int first; /* the lowest symbol, where symbols are paired */
    int range; /* how many values paired symbols may have; 0 where each unit is one symbol */
    union {
        uint16_t counts[2 * MAX_PAIRED_RANGE * MAX_PAIRED_RANGE]; /* of pairs, two or four for each */
        Code codes[MAX_PAIRED_RANGE * MAX_PAIRED_RANGE];         /* of pairs */
    };
    union { /* each stream has its own together */
        uint8_t symbols[MAX_BLOCK_NBYTES];
        uint16_t pairs[MAX_BLOCK_NBYTES / 2 + STREAMS]; /* behind a stream's, the last symbol of an odd number */
    };
} Units;

/* Where a stream's pairs begin. */
static size_t pairs_at(size_t nbytes, int stream) { return (size_t)stream * ((stream_length(nbytes, 0) + 1) / 2); }

VECTORS
static void find_range(const uint8_t *data, size_t nbytes, int *first, int *last) {
    uint8_t lowest = 255, highest = 0;
    for (size_t i = 0; i < nbytes; i++) {
        lowest = data[i] < lowest ? data[i] : lowest;
        highest = data[i] > highest ? data[i] : highest;
    }
    *first = lowest;
    *last = highest;
}

/* A byte that is out of range, as it was not there a moment ago, becomes another. */
VECTORS
static void pair_symbols(const uint8_t *restrict data, size_t length, int first, int range, uint16_t *restrict pairs) {
    uint16_t lowest = (uint16_t)first, highest = (uint16_t)(range - 1), factor = (uint16_t)range;
    for (size_t i = 0; i < length / 2; i++) {
        uint16_t both;
        memcpy(&both, data + 2 * i, 2);
        uint16_t low = (uint16_t)((both & 0xFF) - lowest), high = (uint16_t)((both >> 8) - lowest);
        low = low < highest ? low : highest;
        high = high < highest ? high : highest;
        pairs[i] = (uint16_t)(low + high * factor);
    }
    if (length & 1) {
        uint16_t low = (uint16_t)(data[length - 1] - lowest);
        pairs[length / 2] = low < highest ? low : highest;
    }
}

/* Adds the counts of each pair up, for both of its symbols. */
VECTORS
static void add_pairs(const uint16_t *restrict pairs, int tables, int range, uint32_t *restrict counts) {
    for (int high = 0; high < range; high++) {
        uint32_t sum = 0;
        for (int table = 0; table < tables; table++) {
            const uint16_t *row = pairs + (table * range + high) * range;
            for (int low = 0; low < range; low++) {
                counts[low] += row[low];
                sum += row[low];
            }
        }
        counts[high] += sum;
    }
}

/* Several counters for each pair, used in turn: one that was written a moment ago is slow to read again. Fewer of them
 * where there are many pairs, of which the same does not come so often. */
static void count_pairs(Units *units, size_t nbytes, Table *table) {
    int tables = units->range <= 48 ? 4 : 2;
    size_t squared = (size_t)(units->range * units->range);
    uint16_t *a = units->counts, *b = a + squared;
    uint16_t *c = tables == 4 ? b + squared : a, *d = tables == 4 ? c + squared : b;
    uint32_t *counts = table->counts + units->first;
    memset(units->counts, 0, (size_t)tables * squared * sizeof *a);
    for (int stream = 0; stream < STREAMS; stream++) {
        const uint16_t *pairs = units->pairs + pairs_at(nbytes, stream);
        size_t length = stream_length(nbytes, stream), i = 0;
        for (; i + 4 <= length / 2; i += 4) {
            a[pairs[i]]++;
            b[pairs[i + 1]]++;
            c[pairs[i + 2]]++;
            d[pairs[i + 3]]++;
        }
        for (; i < length / 2; i++)
            a[pairs[i]]++;
        if (length & 1)
            counts[pairs[length / 2]]++;
    }
    add_pairs(units->counts, tables, units->range, counts);
}

static void count_symbols(const Units *units, size_t nbytes, Table *table) {
    uint32_t counts[4][SYMBOLS] = {{0}};
    size_t i = 0;
    for (; i + 8 <= nbytes; i += 8) {
        uint64_t word;
        memcpy(&word, units->symbols + i, 8);
        for (int k = 0; k < 8; k++)
            counts[k & 3][word >> 8 * k & 0xFF]++;
    }
    for (; i < nbytes; i++)
        counts[0][units->symbols[i]]++;
    for (int symbol = 0; symbol < SYMBOLS; symbol++)
        table->counts[symbol] = counts[0][symbol] + counts[1][symbol] + counts[2][symbol] + counts[3][symbol];
}

/* Copies a block whose bytes are from `first` to `last`, and counts its symbols. */
static void take_units(Units *units, Table *table, const uint8_t *data, size_t nbytes, int first, int last) {
    size_t range = (size_t)(last - first + 1);
    int paired = range <= MAX_PAIRED_RANGE && 2 * range * range <= nbytes; /* else the pairs cost more than they save */
    units->first = first;
    units->range = paired ? (int)range : 0;
    memset(table->counts, 0, sizeof table->counts);
    if (paired) {
        for (int stream = 0; stream < STREAMS; stream++) {
            const uint8_t *from = data + (size_t)stream * stream_length(nbytes, 0);
            uint16_t *pairs = units->pairs + pairs_at(nbytes, stream);
            pair_symbols(from, stream_length(nbytes, stream), first, units->range, pairs);
        }
        count_pairs(units, nbytes, table);
    } else {
        memcpy(units->symbols, data, nbytes);
        count_symbols(units, nbytes, table);
    }
    table->symbols = 0;
    for (int symbol = 0; symbol < SYMBOLS; symbol++) {
        if (table->counts[symbol]) {
            table->symbols++;
            table->last = symbol;
        }
    }
}

/* A pair's second symbol is coded first, as streams are coded backwards. */
VECTORS
static void code_pairs(Code *restrict pairs, const Code *restrict codes, int range) {
    for (int high = 0; high < range; high++) {
        Code second = codes[high] >> 8 << 8, length = codes[high] & 0xFF;
        for (int low = 0; low < range; low++)
            *pairs++ = (second >> (codes[low] & 63) | codes[low]) + length;
    }
}

#endif
