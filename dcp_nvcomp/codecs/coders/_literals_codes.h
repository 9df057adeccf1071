/* The codes of a block: the shortest prefix codes of at most 11 bits for its counts, in the canonical order of RFC
 * 8878 (4.2.1), and the streams that they are written to (4.2.2).
 *
 * Lengths are Huffman's where those are short enough, else package-merge's (Larmore and Hirschberg). That matters:
 * lengths that are cut and mended cost 0.1 % of an exponent plane, and 1 % of quantized weights.
 */

#ifndef LITERALS_CODES_H
#define LITERALS_CODES_H

#include <stdint.h>
#include <string.h>

/* Wider vectors, and shifts by a variable in one instruction, where the processor has them. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#define SHIFTS __attribute__((target_clones("bmi2", "default")))
#else
#define VECTORS
#define SHIFTS
#endif

enum {
    SYMBOLS = 256,
    MAX_BITS = 11, /* of a code, by the RFC */
};

/* Of one symbol, or of two: the bits at the top, how many they are in the lowest eight bits. */
typedef uint64_t Code;

static inline Code make_code(uint64_t bits, unsigned length) {
    return length ? bits << (64 - length) | length : 0;
}

typedef struct {
    uint32_t counts[SYMBOLS];
    uint8_t lengths[SYMBOLS];
    Code codes[SYMBOLS];
    int symbols;    /* how many occur */
    int last;       /* the highest that occurs */
    int max_length; /* of a code */
} Table;

/* Bits are appended above those that are there, and a decoder reads them from the end of a stream. */
typedef struct {
    uint64_t bits; /* the last `count` of them are the top ones */
    unsigned count;
    uint8_t *out;
} Stream;

/* Of at most 56 bits together, with the 7 that a flush may leave: lengths below them must fall out. */
static inline void put(Stream *stream, Code code) {
    stream->bits = stream->bits >> (code & 63) | code;
    stream->count += (uint32_t)code; /* between the length and the bits themselves all are zero */
}

/* Leaves at most 7 bits. Writes 8 bytes, of which the last ones, or all if there is no bit, will be written again. */
static inline void flush(Stream *stream) {
    uint64_t bits = stream->bits >> (-stream->count & 63);
    memcpy(stream->out, &bits, 8);
    stream->out += stream->count >> 3;
    stream->count &= 7;
}

/* Ends a stream: one more bit tells a decoder where the last byte's padding begins. */
static inline void finish(Stream *stream) {
    put(stream, make_code(1, 1));
    flush(stream);
    stream->out += stream->count > 0;
}

/* Symbols that occur, the rarest first, as count << 8 | symbol. Each is compared with all: there are few, and several
 * comparisons are made at a time, none of which has to be guessed. */
VECTORS
static int sort_symbols(const Table *table, uint32_t *sorted) {
    uint32_t keys[SYMBOLS];
    int found = 0;
    for (int symbol = 0; symbol <= table->last; symbol++)
        if (table->counts[symbol])
            keys[found++] = table->counts[symbol] << 8 | (uint32_t)symbol;
    for (int i = 0; i < found; i++) {
        uint32_t key = keys[i], lower = 0;
        for (int j = 0; j < found; j++)
            lower += keys[j] < key;
        sorted[lower] = key;
    }
    return found;
}

/* Huffman's lengths for counts in rising order: the two rarest nodes are joined until one is left; then depths, from
 * the root down. Returns the longest. */
static int huffman(const uint32_t *counts, int leaves, uint8_t *lengths) {
    uint32_t weight[2 * SYMBOLS];
    uint16_t parent[2 * SYMBOLS];
    uint8_t depth[2 * SYMBOLS] = {0};
    int leaf = 0, joined = leaves, nodes = 2 * leaves - 1;
    memcpy(weight, counts, (size_t)leaves * sizeof *weight);
    for (int node = leaves; node < nodes; node++) {
        weight[node] = 0;
        for (int child = 0; child < 2; child++) {
            int next = leaf < leaves && (joined == node || weight[leaf] <= weight[joined]) ? leaf++ : joined++;
            weight[node] += weight[next];
            parent[next] = (uint16_t)node;
        }
    }
    depth[nodes - 1] = 0;
    for (int node = nodes - 2; node >= 0; node--)
        depth[node] = (uint8_t)(depth[parent[node]] + 1);
    memcpy(lengths, depth, (size_t)leaves);
    return depth[0];
}

/* Merges two lists in rising order, each between a 0 and a UINT32_MAX: from both ends at once, as each step has to
 * wait for the one before. Of equals, those of the first list come first; is_first says which they are. */
static void merge(const uint32_t *first, int first_length, const uint32_t *second, int second_length, uint32_t *merged,
                  uint8_t *is_first) {
    int length = first_length + second_length, half = length / 2;
    int low = 0, high = first_length; /* in the first list; what is not from there is from the second */
    for (int at = 0; at < length - half; at++) {
        int back = length - 1 - at;
        uint32_t a = first[low], b = second[at - low], c = first[high - 1], d = second[back - high];
        int low_taken = a <= b, high_taken = c > d;
        merged[at] = low_taken ? a : b;
        is_first[at] = (uint8_t)low_taken;
        merged[back] = high_taken ? c : d;
        is_first[back] = (uint8_t)high_taken;
        low += low_taken;
        high -= high_taken;
    }
}

/* The best lengths of at most MAX_BITS, for counts in rising order. A level's list has all leaves and the pairs of the
 * level before, by weight; of the last level the first 2 * leaves - 2 are taken, and each time that a leaf is taken,
 * in itself or in a pair, its code gets a bit longer. */
static void package_merge(const uint32_t *counts, int leaves, uint8_t *lengths) {
    uint32_t singles[SYMBOLS + 2], pairs[SYMBOLS + 2], list[2 * SYMBOLS];
    uint8_t is_leaf[MAX_BITS][2 * SYMBOLS];
    int wanted = 2 * leaves - 2, length = leaves;
    memcpy(singles + 1, counts, (size_t)leaves * sizeof *counts);
    memcpy(list, counts, (size_t)leaves * sizeof *counts);
    memset(is_leaf[0], 1, (size_t)leaves);
    singles[0] = pairs[0] = 0;
    singles[leaves + 1] = UINT32_MAX;
    for (int level = 1; level < MAX_BITS; level++) {
        int paired = (length < wanted ? length : wanted) / 2;
        for (int pair = 0; pair < paired; pair++)
            pairs[pair + 1] = list[2 * pair] + list[2 * pair + 1];
        pairs[paired + 1] = UINT32_MAX;
        merge(singles + 1, leaves, pairs + 1, paired, list, is_leaf[level]);
        length = leaves + paired;
    }
    memset(lengths, 0, (size_t)leaves);
    for (int level = MAX_BITS - 1; level >= 0; level--) {
        int taken = 0;
        for (int at = 0; at < wanted; at++)
            taken += is_leaf[level][at];
        for (int leaf = 0; leaf < taken; leaf++)
            lengths[leaf]++;
        wanted = 2 * (wanted - taken);
    }
}

/* Canonical codes: the longest first, and symbols in their order among codes of equal length. */
static void assign_codes(Table *table) {
    uint32_t of_length[MAX_BITS + 1] = {0}, next[MAX_BITS + 1], code = 0;
    for (int symbol = 0; symbol <= table->last; symbol++)
        of_length[table->lengths[symbol]]++;
    for (int length = table->max_length; length > 0; length--) {
        next[length] = code;
        code = (code + of_length[length]) >> 1;
    }
    for (int symbol = 0; symbol <= table->last; symbol++) {
        unsigned length = table->lengths[symbol];
        table->codes[symbol] = make_code(length ? next[length]++ : 0, length);
    }
}

/* Of a table with the counts of two symbols at least. Returns how many bits all of them take. */
static uint64_t find_codes(Table *table) {
    uint32_t keys[SYMBOLS], counts[SYMBOLS];
    uint8_t lengths[SYMBOLS];
    uint64_t bits = 0;
    int leaves = sort_symbols(table, keys);
    for (int i = 0; i < leaves; i++)
        counts[i] = keys[i] >> 8;
    if (huffman(counts, leaves, lengths) > MAX_BITS)
        package_merge(counts, leaves, lengths);
    memset(table->lengths, 0, sizeof table->lengths);
    for (int i = 0; i < leaves; i++) {
        table->lengths[keys[i] & 0xFF] = lengths[i];
        bits += (uint64_t)counts[i] * lengths[i];
    }
    table->max_length = lengths[0];
    assign_codes(table);
    return bits;
}

#endif
