/* The kernels of rowcol.py, which says what they are for; rowcol_numpy.py is the same in numpy, and makes the same bytes.
 *
 * They change the planes `rest` and `exponent` of a block that was split, or make them: everything is in bytes, and in
 * the nearest caches. What a file says only decides values, never places, but for lengths, which the caller checks.
 */

#ifndef ROWCOL_KERNELS_H
#define ROWCOL_KERNELS_H

#include "_block_kernels.h"

enum {
    FLAG_PREDICTED = 4,
    FLAG_NARROW_ROWS = 8,
    ESCAPES_SHIFT = 8,
    MIDDLE = 64,        /* the symbol of a value that is as predicted */
    VALUE_SYMBOLS = 128,      /* of which 0 stands for an escape */
    MAX_ROWS = 0xFFFF,    /* of a block that is predicted: so sums fit */
    MAX_COLUMNS = 1 << 20,
    MOST_FLOATS = 1 << 24, /* of a block that is predicted: so flags have room for the number of escapes */
    SUMMED_WORDS = 128, /* at a time: as many pairs of bytes fit into 16 bits */
    SUMMED_ROWS = 32,    /* at a time: as many values fit into 16 bits */
    JUDGED = 1024,      /* floats of a block by which it is judged whether prediction pays */
    LOG_SCALE = 256,    /* of logarithms */
    WORTHWHILE = 16,    /* what it has to gain for each float, in bits of that scale */
};

/* A block as its codec sees it. */
typedef struct {
    size_t count, columns, rows; /* the last row may be short */
} Matrix;

static Matrix matrix_of(size_t count, size_t columns) {
    return (Matrix){count, columns, columns ? count / columns + (count % columns != 0) : 0};
}

/* The length of what is kept of the rows. */
static uint64_t rows_nbytes(Matrix m, uint32_t flags) {
    return flags & FLAG_NARROW_ROWS ? 2 + (uint64_t)m.rows : 2 * (uint64_t)m.rows;
}

/* The length of the plane `rest` with these flags. */
static uint64_t predicted_nbytes(Matrix m, uint32_t flags) {
    uint64_t signs = flags & FLAG_PACKED_REST ? 0 : ((uint64_t)m.count + 7) / 8;
    return rows_nbytes(m, flags) + m.columns + 2 * (uint64_t)(flags >> ESCAPES_SHIFT) + signs + ((uint64_t)m.count + 1) / 2;
}

static size_t row_length(Matrix m, size_t row) {
    size_t left = m.count - row * m.columns;
    return left < m.columns ? left : m.columns;
}

/* What is predicted of a float: its exponent, and three bits of its mantissa. */
static uint16_t value_of(uint8_t rest, uint8_t exponent) { return (uint16_t)(exponent << 3 | (rest >> 4 & 7)); }

/* ---- prediction -------------------------------------------------------------------------------------------------- */

/* The sum of the bytes of words, at most SUMMED_WORDS, each byte masked after a shift: of pairs of them, side by side. */
VECTORS
static uint32_t sum_words(const uint8_t *words, int shift, uint64_t mask, ptrdiff_t count) {
    const uint64_t even = 0x00FF00FF00FF00FF;
    uint64_t sums = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        uint64_t word;
        memcpy(&word, words + 8 * i, 8);
        word = word >> shift & mask;
        sums += (word & even) + (word >> 8 & even);
    }
    return (uint32_t)((sums & 0xFFFF) + (sums >> 16 & 0xFFFF) + (sums >> 32 & 0xFFFF) + (sums >> 48));
}

/* The sum of the values of a row. */
static uint32_t sum_row(const uint8_t *rest, const uint8_t *exponent, size_t count) {
    uint32_t sum = 0;
    size_t at = 0;
    for (size_t words; (words = (count - at) / 8) > 0; at += 8 * words) {
        words = words < SUMMED_WORDS ? words : SUMMED_WORDS;
        sum += sum_words(exponent + at, 0, UINT64_MAX, (ptrdiff_t)words) << 3;
        sum += sum_words(rest + at, 4, 0x0707070707070707, (ptrdiff_t)words);
    }
    for (; at < count; at++)
        sum += value_of(rest[at], exponent[at]);
    return sum;
}

/* Adds some rows, at most SUMMED_ROWS, to the sums of columns: halves of words are enough for so many. */
VECTORS
static void sum_columns(const uint8_t *restrict rest, const uint8_t *restrict exponent, size_t columns, size_t rows,
                        uint16_t *restrict some, uint32_t *restrict sums) {
    memset(some, 0, columns * sizeof *some);
    for (size_t row = 0; row < rows; row++, rest += columns, exponent += columns)
        for (size_t i = 0; i < columns; i++)
            some[i] = (uint16_t)(some[i] + value_of(rest[i], exponent[i]));
    for (size_t i = 0; i < columns; i++)
        sums[i] += some[i];
}

VECTORS
static void symbols_of(const uint8_t *restrict rest, const uint8_t *restrict exponent, const int16_t *restrict column,
                       int16_t row, uint8_t *restrict symbols, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        int16_t symbol = (int16_t)(value_of(rest[i], exponent[i]) - row - column[i] + MIDDLE);
        symbols[i] = (uint16_t)(symbol - 1) < VALUE_SYMBOLS - 1 ? (uint8_t)symbol : 0;
    }
}

/* What the floats' rows and columns predict: rows of their mean, columns of what their mean is beside that. */
static void find_vectors(Matrix m, const uint8_t *rest, const uint8_t *exponent, uint16_t *row, int16_t *column,
                         uint32_t *sums) {
    uint16_t *some = (uint16_t *)column; /* whose place is free until then */
    size_t whole = m.count / m.columns;
    uint32_t total = 0;
    memset(sums, 0, m.columns * sizeof *sums);
    for (size_t number = 0; number < whole; number++) {
        size_t at = number * m.columns;
        uint32_t sum = sum_row(rest + at, exponent + at, m.columns);
        row[number] = (uint16_t)((2 * (uint64_t)sum + m.columns) / (2 * m.columns));
        total += row[number];
        if (number % SUMMED_ROWS == 0) {
            size_t rows = whole - number < SUMMED_ROWS ? whole - number : SUMMED_ROWS;
            sum_columns(rest + at, exponent + at, m.columns, rows, some, sums);
        }
    }
    /* all are moved up, so that nothing is negative where it is divided */
    uint32_t twice = 2 * (uint32_t)whole, up = twice * 2048 + (uint32_t)whole;
    for (size_t at = 0; at < m.columns; at++) {
        int32_t mean = (int32_t)((up + 2 * sums[at] - 2 * total) / twice) - 2048;
        column[at] = (int16_t)(mean < -128 ? -128 : mean > 127 ? 127 : mean);
    }
    if (whole < m.rows) {
        size_t at = whole * m.columns, left = m.count - at;
        uint32_t sum = sum_row(rest + at, exponent + at, left);
        row[whole] = (uint16_t)((2 * (uint64_t)sum + left) / (2 * left));
    }
}

/* ---- does it pay ------------------------------------------------------------------------------------------------- */

/* count * log2(count), the logarithm in pieces of straight lines: integers, so that everyone decides alike. */
static int64_t weighted_log(uint32_t count) {
    if (count == 0)
        return 0;
    int top = 31 - __builtin_clz(count);
    return (int64_t)count * (top * LOG_SCALE + (int64_t)(((uint64_t)count * LOG_SCALE) >> top) - LOG_SCALE);
}

/* Whether the entropy of symbols is so much lower than that of exponents, which are three bits shorter. */
static int pays(Matrix m, const uint8_t *exponent, const uint8_t *symbols, uint64_t added_nbytes) {
    uint32_t exponents[256] = {0}, coded[VALUE_SYMBOLS] = {0};
    int64_t judged = 0, gain = 0;
    for (size_t at = 0, step = m.count / JUDGED | 1; at < m.count; at += step, judged++) {
        exponents[exponent[at]]++;
        coded[symbols[at]]++;
    }
    for (int at = 0; at < 256; at++)
        gain -= weighted_log(exponents[at]);
    for (int at = 0; at < VALUE_SYMBOLS; at++)
        gain += weighted_log(coded[at]);
    int64_t added = (int64_t)(8 * LOG_SCALE * added_nbytes * (uint64_t)judged / m.count);
    return gain + (3 * LOG_SCALE - WORTHWHILE) * judged > added;
}

/* ---- planes ------------------------------------------------------------------------------------------------------ */

VECTORS
static void join_nibbles(const uint8_t *restrict low, const uint8_t *restrict high, uint8_t *restrict out,
                         ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++)
        out[i] = (uint8_t)((low[i] & 15) | high[i] << 4);
}

VECTORS
static void part_nibbles(const uint8_t *restrict joined, uint8_t *restrict low, uint8_t *restrict high, uint8_t sign,
                         ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        low[i] = (uint8_t)((joined[i] & 15) | sign);
        high[i] = (uint8_t)(joined[i] >> 4 | sign);
    }
}

VECTORS
static void add_signs(const uint8_t *restrict rest, uint8_t *restrict signs, uint8_t bit, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++)
        signs[i] |= rest[i] & 0x80 ? bit : 0;
}

VECTORS
static void take_signs(const uint8_t *restrict signs, uint8_t *restrict rest, uint8_t bit, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++)
        rest[i] |= signs[i] & bit ? 0x80 : 0;
}

/* Writes the values of the floats whose symbol is zero. */
static uint8_t *put_escapes(Matrix m, const uint8_t *rest, const uint8_t *exponent, const uint8_t *symbols,
                            uint8_t *out) {
    const uint8_t *end = symbols + m.count;
    for (const uint8_t *at = symbols; (at = memchr(at, 0, (size_t)(end - at))); at++) {
        size_t place = (size_t)(at - symbols);
        uint16_t value = value_of(rest[place], exponent[place]);
        memcpy(out, &value, 2);
        out += 2;
    }
    return out;
}

/* The number of zeros, at most one more than `most`: there are few. */
static size_t zeros_of(const uint8_t *symbols, size_t count, size_t most) {
    size_t zeros = 0;
    const uint8_t *end = symbols + count;
    for (const uint8_t *at = symbols; zeros <= most && (at = memchr(at, 0, (size_t)(end - at))); at++)
        zeros++;
    return zeros;
}

/* Writes what is kept of the rows: a value each, or the least, and a byte each of what they have beside it. */
static uint8_t *put_rows(const uint16_t *row, size_t rows, uint16_t least, int are_narrow, uint8_t *out) {
    if (!are_narrow) {
        memcpy(out, row, 2 * rows);
        return out + 2 * rows;
    }
    memcpy(out, &least, 2);
    out += 2;
    for (size_t number = 0; number < rows; number++)
        *out++ = (uint8_t)(row[number] - least);
    return out;
}

/* Memory of `predict`: sums, vectors, symbols and a new `rest`, each at most as long as what is predicted at all. */
static size_t predict_room(size_t count, size_t columns) {
    return (sizeof(uint32_t) + sizeof(int16_t)) * columns + 2 * (count / columns + 1) + 2 * count;
}

/* Whether a block of this shape is predicted at all. */
static int is_predictable(Matrix m, uint32_t flags) {
    return m.count >= 2 * m.columns && m.rows <= MAX_ROWS && m.count <= MOST_FLOATS && predicted_nbytes(m, flags) <= m.count;
}

/* Predicts the values of a block that was split, in place; returns its flags, 0 if that does not pay and nothing was
 * done. `seen` are the signs; `room` has `predict_room` bytes, at a multiple of 4. */
static uint32_t predict(Matrix m, uint8_t *rest, uint8_t *exponent, int seen, uint8_t *room) {
    uint32_t flags = seen == SEEN_POSITIVE ? FLAG_PACKED_REST : 0;
    if (seen == SEEN_NEGATIVE)
        flags = FLAG_PACKED_REST | FLAG_NEGATIVE;
    flags |= FLAG_PREDICTED;
    if (!is_predictable(m, flags))
        return 0;
    uint32_t *sums = (uint32_t *)(void *)room;
    uint16_t *row = (uint16_t *)(sums + m.columns);
    int16_t *column = (int16_t *)(row + m.rows);
    uint8_t *symbols = (uint8_t *)(column + m.columns), *made = symbols + m.count, *at = made;
    find_vectors(m, rest, exponent, row, column, sums);
    for (size_t number = 0; number < m.rows; number++) {
        size_t start = number * m.columns;
        symbols_of(rest + start, exponent + start, column, (int16_t)row[number], symbols + start,
                   (ptrdiff_t)row_length(m, number));
    }
    uint16_t least = row[0], highest = row[0];
    for (size_t number = 1; number < m.rows; number++) {
        least = row[number] < least ? row[number] : least;
        highest = row[number] > highest ? row[number] : highest;
    }
    if (m.rows > 2 && highest - least <= UINT8_MAX)
        flags |= FLAG_NARROW_ROWS;
    size_t most = (size_t)(m.count - predicted_nbytes(m, flags)) / 2, escapes = zeros_of(symbols, m.count, most);
    if (escapes > most ||
        !pays(m, exponent, symbols, rows_nbytes(m, flags) + m.columns + 2 * escapes))
        return 0;
    flags |= (uint32_t)escapes << ESCAPES_SHIFT;
    at = put_rows(row, m.rows, least, (flags & FLAG_NARROW_ROWS) != 0, at);
    for (size_t i = 0; i < m.columns; i++)
        *at++ = (uint8_t)column[i];
    if (escapes)
        at = put_escapes(m, rest, exponent, symbols, at);
    if (!(flags & FLAG_PACKED_REST)) {
        size_t eighth = (m.count + 7) / 8;
        memset(at, 0, eighth);
        for (size_t bit = 0, start = 0; start < m.count; bit++, start += eighth)
            add_signs(rest + start, at, (uint8_t)(1 << bit), (ptrdiff_t)(m.count - start < eighth ? m.count - start : eighth));
        at += eighth;
    }
    size_t half = (m.count + 1) / 2;
    join_nibbles(rest, rest + half, at, (ptrdiff_t)(m.count - half));
    if (m.count % 2)
        at[half - 1] = rest[half - 1] & 15;
    memcpy(rest, made, (size_t)(at - made) + half);
    memcpy(exponent, symbols, m.count);
    return flags;
}

/* ---- and back ---------------------------------------------------------------------------------------------------- */

VECTORS
static void values_of(const uint8_t *restrict symbols, const uint8_t *restrict column, int16_t row,
                      uint8_t *restrict rest, uint8_t *restrict exponent, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        uint16_t value = (uint16_t)(symbols[i] + row + (int8_t)column[i]);
        exponent[i] = (uint8_t)(value >> 3);
        rest[i] |= (uint8_t)((value & 7) << 4);
    }
}

/* Makes the planes of a block from its predicted ones, `packed` of `predicted_nbytes`; 0 if these are not possible. */
static int restore(Matrix m, uint32_t flags, const uint8_t *packed, const uint8_t *symbols, uint8_t *rest,
                   uint8_t *exponent) {
    size_t escapes = flags >> ESCAPES_SHIFT, half = (m.count + 1) / 2;
    const uint8_t *row = packed, *column = row + rows_nbytes(m, flags), *escape = column + m.columns;
    const uint8_t *signs = escape + 2 * escapes, *nibbles = packed + predicted_nbytes(m, flags) - half;
    if (zeros_of(symbols, m.count, escapes) != escapes)
        return 0;
    uint8_t sign = (uint8_t)(flags & FLAG_NEGATIVE ? 0x80 : 0);
    part_nibbles(nibbles, rest, rest + half, sign, (ptrdiff_t)(m.count - half));
    if (m.count % 2)
        rest[half - 1] = (uint8_t)((nibbles[half - 1] & 15) | sign);
    if (!(flags & FLAG_PACKED_REST)) {
        size_t eighth = (m.count + 7) / 8;
        for (size_t bit = 0, start = 0; start < m.count; bit++, start += eighth)
            take_signs(signs, rest + start, (uint8_t)(1 << bit), (ptrdiff_t)(m.count - start < eighth ? m.count - start : eighth));
    }
    for (size_t number = 0; number < m.rows; number++) {
        uint16_t predicted;
        size_t start = number * m.columns;
        memcpy(&predicted, flags & FLAG_NARROW_ROWS ? row : row + 2 * number, 2);
        if (flags & FLAG_NARROW_ROWS)
            predicted = (uint16_t)(predicted + row[2 + number]);
        values_of(symbols + start, column, (int16_t)((predicted & 0x7FF) - MIDDLE), rest + start, exponent + start,
                  (ptrdiff_t)row_length(m, number));
    }
    const uint8_t *end = symbols + m.count;
    for (const uint8_t *at = symbols; escapes && (at = memchr(at, 0, (size_t)(end - at))); at++, escape += 2) {
        size_t place = (size_t)(at - symbols);
        uint16_t value;
        memcpy(&value, escape, 2);
        exponent[place] = (uint8_t)(value >> 3);
        rest[place] = (uint8_t)((rest[place] & 0x8F) | (value & 7) << 4);
    }
    return 1;
}

#endif
