/* Zstandard frames (RFC 8878) of literals alone: each block of at most 128 KiB is Huffman-coded, and has no sequences.
 *
 * Any zstd decoder reads them. libzstd can be talked into nearly the same, but not out of searching for matches, which
 * cost half of its time on exponent planes and gain nothing.
 *
 * Two of a block's four streams are coded at the same time, as their instructions do not depend on each other. Codes are
 * made from a sample of the block where that is safe: counting every byte would take as long as coding it.
 *
 * A block is read several times. If somebody writes into it meanwhile, what comes out is of no use, but nothing is
 * written where it does not belong: a byte that was not there before has a code of no bits.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "For little-endian machines; libzstd is used elsewhere."
#endif

enum {
    MAX_BLOCK_NBYTES = 128 << 10,
    MIN_BLOCK_NBYTES = 1024, /* shorter ones are left to libzstd, which writes smaller tables */
    MAX_BITS = 11,           /* of a code, by the RFC */
    MAX_LISTED_SYMBOL = 128, /* the last symbol's weight is implied, and at most 128 weights can be listed plainly */
    MAX_STREAM_NBYTES = (MAX_BLOCK_NBYTES / 4 * MAX_BITS + 1 + 7) / 8 + 8, /* with what a flush writes beyond its end */
    HEADER_NBYTES = 4 + 1 + 4,
    BLOCK_HEADER_NBYTES = 3,
    LITERALS_HEADER_NBYTES = 5,
    JUMP_TABLE_NBYTES = 6,
    FLUSHED_SYMBOLS = 4, /* 7 bits left from before and 4 codes of 11 bits stay clear of the 8 bits of an entry's length */
    SAMPLED_NBYTES = 64, /* of each */
    SAMPLED_FROM_NBYTES = 248, /* no power of two, as rows of tensors are: it would see the same columns of each */
    MAX_UNSEEN = 16, /* symbols that get a code although the sample has none: each costs 1/2048 of the codes at most */
};

/* Wider vectors and shifts by a variable in one instruction, where the processor has them. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#define SHIFTS __attribute__((target_clones("bmi2", "default")))
#else
#define VECTORS
#define SHIFTS
#endif

/* A code in the top bits, its length in the lowest eight. */
typedef uint64_t Code;

typedef struct {
    uint32_t counts[256]; /* of a sample, perhaps; never 0 for a symbol that occurs */
    uint8_t lengths[256];
    Code codes[256];
    int symbols;    /* how many have a code */
    int first;      /* the lowest that occurs */
    int last;       /* the highest that occurs */
    int max_length; /* of a code */
} Table;

VECTORS
static void find_range(const uint8_t *data, size_t nbytes, Table *table) {
    uint8_t lowest = 255, highest = 0;
    for (size_t i = 0; i < nbytes; i++) {
        lowest = data[i] < lowest ? data[i] : lowest;
        highest = data[i] > highest ? data[i] : highest;
    }
    table->first = lowest;
    table->last = highest;
}

/* Counts the first `sampled` bytes of every `from`. Four counters for each symbol, used in turn: one that was written a
 * moment ago is slow to read again, and the same symbols come again and again. */
static void count_symbols(Table *table, const uint8_t *data, size_t nbytes, size_t sampled, size_t from) {
    uint32_t counts[4][256] = {{0}};
    for (size_t start = 0; start < nbytes; start += from) {
        size_t stop = start + sampled < nbytes ? start + sampled : nbytes, i = start;
        for (; i + 8 <= stop; i += 8) {
            uint64_t word;
            memcpy(&word, data + i, 8);
            for (int k = 0; k < 8; k++)
                counts[k & 3][word >> 8 * k & 0xFF]++;
        }
        for (; i < stop; i++)
            counts[0][data[i]]++;
    }
    table->symbols = 0;
    memset(table->counts, 0, sizeof table->counts);
    for (int symbol = table->first; symbol <= table->last; symbol++) {
        table->counts[symbol] = counts[0][symbol] + counts[1][symbol] + counts[2][symbol] + counts[3][symbol];
        table->symbols += table->counts[symbol] != 0;
    }
}

/* Counts a sample, and gives every other symbol in the range a code too. Not where those would be many. */
static int count_sample(Table *table, const uint8_t *data, size_t nbytes) {
    if (nbytes < 64 * SAMPLED_FROM_NBYTES)
        return 0;
    count_symbols(table, data, nbytes, SAMPLED_NBYTES, SAMPLED_FROM_NBYTES);
    if (table->last - table->first + 1 - table->symbols > MAX_UNSEEN)
        return 0;
    for (int symbol = table->first; symbol <= table->last; symbol++)
        if (!table->counts[symbol])
            table->counts[symbol] = 1;
    table->symbols = table->last - table->first + 1;
    return 1;
}

/* Lengths of Huffman's codes: the two rarest nodes are joined until one is left; then depths, from the root down. */
static void find_lengths(Table *table, const uint8_t *rarest_first) {
    uint32_t weight[512];
    uint16_t parent[512];
    uint8_t depth[512];
    int leaves = table->symbols, leaf = 0, joined = leaves, nodes = 2 * leaves - 1;
    for (int i = 0; i < leaves; i++)
        weight[i] = table->counts[rarest_first[i]];
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
    for (int i = 0; i < leaves; i++)
        table->lengths[rarest_first[i]] = depth[i];
}

/* Cut lengths to MAX_BITS, so that the codes still fill the whole space of codes, as the format wants. */
static void limit_lengths(Table *table, const uint8_t *rarest_first) {
    int space = 1 << MAX_BITS, used = 0, leaves = table->symbols;
    for (int i = 0; i < leaves; i++) {
        uint8_t *length = &table->lengths[rarest_first[i]];
        if (*length > MAX_BITS)
            *length = MAX_BITS;
        used += 1 << (MAX_BITS - *length);
    }
    while (used > space) { /* the longest code that can still grow: of those, the rarest symbol's */
        int longest = -1;
        for (int i = 0; i < leaves; i++) {
            int length = table->lengths[rarest_first[i]];
            if (length < MAX_BITS && (longest < 0 || length > table->lengths[rarest_first[longest]]))
                longest = i;
        }
        used -= 1 << (MAX_BITS - 1 - table->lengths[rarest_first[longest]]++);
    }
    for (int i = leaves - 1; used < space; i = i ? i - 1 : leaves - 1) { /* what became free, to the most frequent */
        uint8_t *length = &table->lengths[rarest_first[i]];
        int gain = 1 << (MAX_BITS - *length);
        if (gain <= space - used) {
            used += gain;
            (*length)--;
        }
    }
}

/* Canonical codes: the longest first, and symbols in their order among codes of equal length. */
static void assign_codes(Table *table) {
    uint32_t of_length[MAX_BITS + 1] = {0}, next[MAX_BITS + 1], code = 0;
    memset(table->codes, 0, sizeof table->codes);
    table->max_length = 0;
    for (int symbol = 0; symbol <= table->last; symbol++) {
        int length = table->lengths[symbol];
        of_length[length]++;
        if (length > table->max_length)
            table->max_length = length;
    }
    for (int length = table->max_length; length > 0; length--) {
        next[length] = code;
        code = (code + of_length[length]) >> 1;
    }
    for (int symbol = 0; symbol <= table->last; symbol++) {
        int length = table->lengths[symbol];
        table->codes[symbol] = length ? (Code)next[length]++ << (64 - length) | (Code)length : 0;
    }
}

static void build_codes(Table *table) {
    uint8_t rarest_first[256];
    int found = 0;
    memset(table->lengths, 0, sizeof table->lengths);
    for (int symbol = 0; symbol <= table->last; symbol++) { /* insertion sort: they are few */
        if (!table->counts[symbol])
            continue;
        int at = found++;
        for (; at > 0 && table->counts[rarest_first[at - 1]] > table->counts[symbol]; at--)
            rarest_first[at] = rarest_first[at - 1];
        rarest_first[at] = (uint8_t)symbol;
    }
    find_lengths(table, rarest_first);
    limit_lengths(table, rarest_first);
    assign_codes(table);
}

/* Bits are appended above those that are there, and a decoder reads them from the end of a stream. */
typedef struct {
    uint64_t bits; /* the last `count` of them are the top ones */
    unsigned count;
    uint8_t *out;
} Stream;

static inline void put(Stream *stream, Code code) {
    stream->bits = stream->bits >> (code & 63) | code;
    stream->count += (uint32_t)code; /* between the length and the code itself all bits are zero */
}

static inline void flush(Stream *stream) { /* writes 8 bytes, of which the last ones will be written again */
    uint64_t bits = stream->count ? stream->bits >> (64 - stream->count) : 0;
    memcpy(stream->out, &bits, 8);
    stream->out += stream->count >> 3;
    stream->count &= 7;
}

/* The last symbols, or rather the first: streams are coded backwards. */
static void finish(Stream *stream, const Code *codes, const uint8_t *data, size_t left) {
    flush(stream);
    while (left)
        put(stream, codes[data[--left]]);
    put(stream, (Code)1 << 63 | 1); /* one more bit tells a decoder where the last byte's padding begins */
    flush(stream);
    stream->out += stream->count > 0;
}

static uint8_t *write_number(uint8_t *out, uint64_t value, int nbytes) {
    memcpy(out, &value, (size_t)nbytes);
    return out + nbytes;
}

/* Codes two streams: `a_left` symbols, and `b_left`, at most 3 fewer. */
SHIFTS
static void code_pair(Stream *s_in, Stream *t_in, const Code *codes, const uint8_t *a, size_t a_left, const uint8_t *b,
                      size_t b_left) {
    Stream s = *s_in, t = *t_in; /* copies that the compiler can keep in registers */
    while (a_left > b_left)
        put(&s, codes[a[--a_left]]);
    size_t left = b_left;
    while (left >= FLUSHED_SYMBOLS) {
        flush(&s);
        for (int i = 0; i < FLUSHED_SYMBOLS; i++) {
            left--;
            put(&s, codes[a[left]]);
            put(&t, codes[b[left]]);
        }
        flush(&t);
    }
    finish(&s, codes, a, left);
    finish(&t, codes, b, left);
    *s_in = s;
    *t_in = t;
}

/* Codes the four streams of a block and returns where they end; how long the first three are goes into `jumps`. */
static uint8_t *code_streams(uint8_t *out, uint8_t *jumps, const Code *codes, const uint8_t *data, size_t nbytes) {
    uint8_t second[MAX_STREAM_NBYTES];
    size_t quarter = (nbytes + 3) / 4;
    for (int pair = 0; pair < 2; pair++) {
        const uint8_t *a = data + 2 * pair * quarter, *b = a + quarter;
        Stream s = {0, 0, out}, t = {0, 0, second};
        code_pair(&s, &t, codes, a, quarter, b, pair ? nbytes - 3 * quarter : quarter);
        size_t s_nbytes = (size_t)(s.out - out), t_nbytes = (size_t)(t.out - second);
        memcpy(s.out, second, t_nbytes);
        out = s.out + t_nbytes;
        jumps = write_number(jumps, s_nbytes, 2);
        if (!pair)
            jumps = write_number(jumps, t_nbytes, 2);
    }
    return out;
}

/* The weights of all symbols but the last, four bits each. */
static uint8_t *write_weights(uint8_t *out, const Table *table) {
    *out++ = (uint8_t)(127 + table->last);
    for (int symbol = 0; symbol < table->last; symbol += 2) {
        int weights[2];
        for (int i = 0; i < 2; i++) {
            int length = symbol + i < table->last ? table->lengths[symbol + i] : 0;
            weights[i] = length ? table->max_length + 1 - length : 0;
        }
        *out++ = (uint8_t)(weights[0] << 4 | weights[1]);
    }
    return out;
}

/* Writes one block; returns where it ends, or NULL if it can't be written so. There is room for the longest. */
static uint8_t *write_block(uint8_t *out, const uint8_t *data, size_t nbytes, int is_last, Table *table) {
    find_range(data, nbytes, table);
    if (table->first == table->last) { /* a run of one byte */
        out = write_number(out, (uint64_t)nbytes << 3 | 1 << 1 | (uint64_t)is_last, BLOCK_HEADER_NBYTES);
        *out++ = data[0];
        return out;
    }
    if (table->last > MAX_LISTED_SYMBOL)
        return NULL;
    if (!count_sample(table, data, nbytes)) {
        count_symbols(table, data, nbytes, nbytes, nbytes);
        if (table->symbols < 2) /* not what was there a moment ago */
            return NULL;
    }
    build_codes(table);
    uint8_t *block = out + BLOCK_HEADER_NBYTES, *weights = block + LITERALS_HEADER_NBYTES;
    uint8_t *jumps = write_weights(weights, table);
    uint8_t *end = code_streams(jumps + JUMP_TABLE_NBYTES, jumps, table->codes, data, nbytes);
    uint64_t coded_nbytes = (uint64_t)(end - weights);
    *end++ = 0; /* no sequences */
    size_t block_nbytes = (size_t)(end - block);
    if (block_nbytes >= nbytes)
        return NULL;
    write_number(out, (uint64_t)block_nbytes << 3 | 2 << 1 | (uint64_t)is_last, BLOCK_HEADER_NBYTES);
    write_number(block, 2 | 3 << 2 | (uint64_t)nbytes << 4 | coded_nbytes << 22, LITERALS_HEADER_NBYTES);
    return end;
}

static uint8_t *write_header(uint8_t *out, size_t nbytes) {
    out = write_number(out, 0xFD2FB528, 4);
    /* a single segment: the window is the content, whose size follows, here in 4 bytes */
    *out++ = 2 << 6 | 1 << 5;
    return write_number(out, nbytes, 4);
}

/* What a block may take before it is known that it is shorter than its content. */
static size_t block_room(size_t nbytes) {
    return BLOCK_HEADER_NBYTES + LITERALS_HEADER_NBYTES + 1 + (MAX_LISTED_SYMBOL + 1) / 2 + JUMP_TABLE_NBYTES +
           nbytes * MAX_BITS / 8 + 4 * 16 + 1;
}

static size_t encode(const uint8_t *data, size_t nbytes, uint8_t *out, size_t room) {
    Table table;
    uint8_t *at = out;
    if (nbytes > UINT32_MAX || room < HEADER_NBYTES)
        return 0;
    at = write_header(at, nbytes);
    while (nbytes) {
        size_t block_nbytes = nbytes < MAX_BLOCK_NBYTES ? nbytes : MAX_BLOCK_NBYTES;
        if (block_nbytes < MIN_BLOCK_NBYTES || room - (size_t)(at - out) < block_room(block_nbytes))
            return 0;
        at = write_block(at, data, block_nbytes, block_nbytes == nbytes, &table);
        if (at == NULL)
            return 0;
        data += block_nbytes;
        nbytes -= block_nbytes;
    }
    return at == out + HEADER_NBYTES ? 0 : (size_t)(at - out);
}

static PyObject *encode_literals(PyObject *module, PyObject *args) {
    Py_buffer data, out;
    size_t nbytes;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*", &data, &out))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    nbytes = encode(data.buf, (size_t)data.len, out.buf, (size_t)out.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return PyLong_FromSize_t(nbytes);
}

static PyMethodDef functions[] = {
    {"encode_literals", encode_literals, METH_VARARGS,
     "encode_literals(data, out): a frame of `data` into `out`; its length, or 0 where libzstd has to do it."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_literals", "Zstandard frames of literals alone.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__literals(void) { return PyModuleDef_Init(&definition); }
