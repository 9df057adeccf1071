// Kernels of the CUDA engine. device.py compiles this text at run time (NVRTC through CuPy) with -DTHREADS and
// -DTILE_NBYTES and launches it; tests/engines/emulation makes plain C++ of it, so that a CPU can check it.
//
// A launch covers many blocks (or runs of bytes) of any size: each is a row of a table, and each row is cut into tiles of
// TILE_NBYTES. One thread block works on one tile; `tiles` names the row that it belongs to.
//
// All arithmetic on addresses is in bytes. A row is at most 2^31 bytes long.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// As numpy builds them in batches.py: columns of u64.
struct BlockRow {
    u64 data;       // address of the block: read by inspect and split, written by merge; any alignment
    u64 nbytes;     // length of the block
    u64 width;      // bytes of one float: 2, 4 or 8; 1 where the elements are not split
    u64 flags;      // split: PACKED_REST where the rest plane may be packed. merge: the block's flags
    u64 first_tile; // number of the row's first tile
    u64 low;        // addresses of the planes, each a multiple of 16; low is unused where width is 2
    u64 rest;
    u64 exponent;
};

struct CopyRow {
    u64 source;     // address, any alignment
    u64 target;     // address, any alignment
    u64 nbytes;     // how many bytes to copy
    u64 zeros;      // how many zero bytes to write after them
    u64 first_tile;
};

const u32 PACKED_REST = 1;
const u32 NEGATIVE = 2;
const u32 SEEN_POSITIVE = 1;
const u32 SEEN_NEGATIVE = 2;

struct alignas(16) Words { u32 word[4]; };

struct Tile { u32 begin, end; };

template <class Row>
__device__ Tile tile_of(const Row &row, u64 nbytes) {
    u64 begin = (blockIdx.x - row.first_tile) * TILE_NBYTES;
    u64 end = begin + TILE_NBYTES < nbytes ? begin + TILE_NBYTES : nbytes;
    return Tile{(u32)begin, (u32)end};
}

// The largest of 16, 4, 2 and 1 that divides an address. The same for all threads of a tile, so branching on it is free.
__device__ u32 alignment_of(u64 address) {
    return address % 16 == 0 ? 16 : address % 4 == 0 ? 4 : address % 2 == 0 ? 2 : 1;
}

template <int ALIGNMENT>
__device__ u32 load_word(const u8 *at) {
    if (ALIGNMENT >= 4) return *(const u32 *)at;
    if (ALIGNMENT == 2) return ((const u16 *)at)[0] | (u32)((const u16 *)at)[1] << 16;
    return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

// ---- CRC32C and signs ------------------------------------------------------------------------------------------------
//
// The CRC register is a polynomial over GF(2), its highest coefficient in bit 0. Appending k zero bytes multiplies it by
// x^8k modulo the CRC's polynomial, and a message's CRC is the sum (exclusive or) of what each of its words contributes
// alone. So each thread takes every THREADS-th word of the tile, moving its sum on by 4 * THREADS bytes from word to word
// (four table lookups); then each sum is moved on to the tile's end, the tile's to the block's end, and all are added.

const u32 POLYNOMIAL = 0x82F63B78;

__device__ u32 multiply(u32 a, u32 b) {
    u32 product = 0;
    for (int i = 0; i < 32; ++i) {
        product ^= b & (0u - (a >> 31));
        a <<= 1;
        b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1)));
    }
    return product;
}

// `crc` with `nbytes` zero bytes after it; powers[256 * k + d] is x^(8 * d * 256^k).
__device__ u32 append_zeros(u32 crc, u32 nbytes, const u32 *powers) {
    for (int k = 0; k < 4 && nbytes; ++k, nbytes >>= 8)
        if (nbytes & 0xFF) crc = multiply(powers[256 * k + (nbytes & 0xFF)], crc);
    return crc;
}

__device__ u32 signs_of(u32 word, u32 at, u32 width) {
    u32 mask = width == 2 ? 0x80008000u : width == 4 || (width == 8 && at % 8 == 4) ? 0x80000000u : 0;
    return ((word & mask) ? SEEN_NEGATIVE : 0) | ((~word & mask) ? SEEN_POSITIVE : 0);
}

struct Inspected { u32 crc, seen; };

template <int ALIGNMENT>
__device__ Inspected inspect_words(const u8 *data, u32 nbytes, u32 width, const u32 *stride, const u32 *powers) {
    u32 crc = 0, seen = 0, last = 0;
    for (u32 at = 4 * threadIdx.x; at + 4 <= nbytes; at += 4 * THREADS) {
        u32 word = load_word<ALIGNMENT>(data + at);
        crc = stride[crc & 0xFF] ^ stride[256 + (crc >> 8 & 0xFF)] ^ stride[512 + (crc >> 16 & 0xFF)] ^
              stride[768 + (crc >> 24)] ^ word;
        seen |= signs_of(word, at, width);
        last = at;
    }
    return Inspected{append_zeros(crc, nbytes - last, powers), seen};
}

// Adds to crc[row] the CRC32C of each block, and to seen[row] the signs that occur in it. Both must be zero before.
// stride: for each of the four bytes of a register, what its 256 values become after 4 * THREADS zero bytes.
extern "C" __global__ void __launch_bounds__(THREADS) inspect_blocks(
    const BlockRow *rows, const u32 *tiles, const u32 *stride, const u32 *powers, u32 *crc, u32 *seen) {
    __shared__ u32 near_stride[4 * 256];
    __shared__ u32 tile_crc, tile_seen;
    for (u32 i = threadIdx.x; i < 4 * 256; i += THREADS) near_stride[i] = stride[i];
    if (threadIdx.x == 0) tile_crc = tile_seen = 0;
    __syncthreads();

    const u32 number = tiles[blockIdx.x];
    const BlockRow row = rows[number];
    const Tile tile = tile_of(row, row.nbytes);
    const u8 *data = (const u8 *)row.data + tile.begin;
    const u32 nbytes = tile.end - tile.begin, width = (u32)row.width;
    Inspected mine;
    switch (alignment_of(row.data)) {
        case 1: mine = inspect_words<1>(data, nbytes, width, near_stride, powers); break;
        case 2: mine = inspect_words<2>(data, nbytes, width, near_stride, powers); break;
        default: mine = inspect_words<4>(data, nbytes, width, near_stride, powers);
    }
    if (threadIdx.x < nbytes % 4) {  // the bytes after the last whole word
        u32 at = nbytes - nbytes % 4 + threadIdx.x;
        mine.crc ^= append_zeros(data[at], nbytes - at, powers);
        if (width > 1 && at % width == width - 1) mine.seen |= data[at] & 0x80 ? SEEN_NEGATIVE : SEEN_POSITIVE;
    }
    atomicXor(&tile_crc, mine.crc);
    atomicOr(&tile_seen, mine.seen);
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 sum = append_zeros(tile_crc, (u32)row.nbytes - tile.end, powers);
        // the CRC starts from all ones and is inverted at the end: once for the whole block
        if (tile.begin == 0) sum ^= append_zeros(0xFFFFFFFF, (u32)row.nbytes, powers) ^ 0xFFFFFFFF;
        atomicXor(&crc[number], sum);
        atomicOr(&seen[number], tile_seen);
    }
}

// ---- planes ----------------------------------------------------------------------------------------------------------
//
// docs/format.md, `planes`. Each thread moves four neighbouring floats at a time, so that it stores whole words: planes
// begin at multiples of 16, and the planes' bytes of floats 4q to 4q + 3 at multiples of 4 (8 for `low`).

template <int WIDTH> struct Float { typedef u32 Bits; };
template <> struct Float<8> { typedef u64 Bits; };

template <int WIDTH>
__device__ typename Float<WIDTH>::Bits load_float(const u8 *at, u32 alignment) {
    typedef typename Float<WIDTH>::Bits Bits;
    if constexpr (WIDTH == 2) {
        if (alignment >= 2) return *(const u16 *)at;
    } else if constexpr (WIDTH == 4) {
        if (alignment >= 4) return *(const u32 *)at;
    } else {
        if (alignment >= 4) return ((const u32 *)at)[0] | (u64)((const u32 *)at)[1] << 32;
    }
    Bits bits = 0;
    for (int i = 0; i < WIDTH; ++i) bits |= (Bits)at[i] << 8 * i;
    return bits;
}

template <int WIDTH>
__device__ void store_float(u8 *at, typename Float<WIDTH>::Bits bits, u32 alignment) {
    if (alignment < (WIDTH == 2 ? 2 : 4)) {
        for (int i = 0; i < WIDTH; ++i) at[i] = (u8)(bits >> 8 * i);
    } else if constexpr (WIDTH == 2) {
        *(u16 *)at = (u16)bits;
    } else if constexpr (WIDTH == 4) {
        *(u32 *)at = bits;
    } else {
        ((u32 *)at)[0] = (u32)bits;
        ((u32 *)at)[1] = (u32)(bits >> 32);
    }
}

// Four floats at `at`; where the block is aligned to 16, so is every fourth float of 4 or 8 bytes, and to 8 of 2 bytes.
template <int WIDTH>
__device__ void load_four(const u8 *at, u32 alignment, typename Float<WIDTH>::Bits *bits) {
    typedef typename Float<WIDTH>::Bits Bits;
    if (alignment < 16) {
        for (int i = 0; i < 4; ++i) bits[i] = load_float<WIDTH>(at + i * WIDTH, alignment);
    } else if constexpr (WIDTH == 2) {
        u64 four = *(const u64 *)at;
        for (int i = 0; i < 4; ++i) bits[i] = (Bits)(four >> 16 * i & 0xFFFF);
    } else if constexpr (WIDTH == 4) {
        Words four = *(const Words *)at;
        for (int i = 0; i < 4; ++i) bits[i] = four.word[i];
    } else {
        for (int half = 0; half < 2; ++half) {
            Words two = ((const Words *)at)[half];
            bits[2 * half] = (Bits)((u64)two.word[0] | (u64)two.word[1] << 32);
            bits[2 * half + 1] = (Bits)((u64)two.word[2] | (u64)two.word[3] << 32);
        }
    }
}

template <int WIDTH>
__device__ void store_four(u8 *at, u32 alignment, const typename Float<WIDTH>::Bits *bits) {
    if (alignment < 16) {
        for (int i = 0; i < 4; ++i) store_float<WIDTH>(at + i * WIDTH, bits[i], alignment);
    } else if constexpr (WIDTH == 2) {
        u64 four = 0;
        for (int i = 0; i < 4; ++i) four |= (u64)bits[i] << 16 * i;
        *(u64 *)at = four;
    } else if constexpr (WIDTH == 4) {
        Words four;
        for (int i = 0; i < 4; ++i) four.word[i] = (u32)bits[i];
        *(Words *)at = four;
    } else {
        for (int half = 0; half < 2; ++half) {
            u64 one = bits[2 * half], other = bits[2 * half + 1];
            ((Words *)at)[half] = Words{{(u32)one, (u32)(one >> 32), (u32)other, (u32)(other >> 32)}};
        }
    }
}

template <int WIDTH>
__device__ void split_tile(const BlockRow &row, u32 begin, u32 end, bool packed) {
    typedef typename Float<WIDTH>::Bits Bits;
    const u8 *block = (const u8 *)row.data;
    u8 *low = (u8 *)row.low, *rest = (u8 *)row.rest, *exponent = (u8 *)row.exponent;
    const u32 alignment = alignment_of(row.data);
    const u32 eighth = packed ? (u32)(row.nbytes / WIDTH) / 8 : 0;
    for (u32 first = begin + 4 * threadIdx.x; first < end; first += 4 * THREADS) {
        const u32 count = end - first < 4 ? end - first : 4;
        Bits bits[4] = {0, 0, 0, 0};
        if (count == 4) load_four<WIDTH>(block + (u64)first * WIDTH, alignment, bits);
        else for (u32 i = 0; i < count; ++i) bits[i] = load_float<WIDTH>(block + (u64)(first + i) * WIDTH, alignment);

        u32 exponents = 0, rests = 0;
        for (int i = 0; i < 4; ++i) {
            u32 high = (u32)(bits[i] >> (8 * WIDTH - 16));
            exponents |= (high >> 7 & 0xFF) << 8 * i;
            rests |= ((high & 0x7F) | (packed ? 0 : high >> 8 & 0x80)) << 8 * i;
        }
        if (count == 4) *(u32 *)(exponent + first) = exponents;
        else for (u32 i = 0; i < count; ++i) exponent[first + i] = (u8)(exponents >> 8 * i);

        if (packed && first < 7 * eighth) {  // bit k of the last eighth's seven bits rides on the k-th eighth
            u32 k = first / eighth, j = first % eighth;
            for (u32 i = 0; i < count && first + i < 7 * eighth; ++i) {
                u32 last = block[(u64)(7 * eighth + j) * WIDTH + WIDTH - 2];
                rests |= (last >> k & 1) << (8 * i + 7);
                if (++j == eighth) j = 0, ++k;
            }
        }
        if (count == 4 && (!packed || first + 4 <= 7 * eighth)) {
            *(u32 *)(rest + first) = rests;
        } else {
            for (u32 i = 0; i < count; ++i) {
                u32 at = first + i;
                if (!packed || at < 7 * eighth) rest[at] = (u8)(rests >> 8 * i);
                else if (at >= 8 * eighth) rest[at - eighth] = (u8)(rests >> 8 * i);
            }
        }
        if constexpr (WIDTH == 4) {
            if (count == 4) {
                u64 lows = 0;
                for (int i = 0; i < 4; ++i) lows |= (u64)(bits[i] & 0xFFFF) << 16 * i;
                *(u64 *)(low + 2 * (u64)first) = lows;
            } else {
                for (u32 i = 0; i < count; ++i) ((u16 *)low)[first + i] = (u16)bits[i];
            }
        } else if constexpr (WIDTH == 8) {
            for (u32 i = 0; i < count; ++i)
                for (u32 part = 0; part < 3; ++part)
                    ((u16 *)low)[3 * (u64)(first + i) + part] = (u16)((u64)bits[i] >> 16 * part);
        }
    }
}

// Splits each block into its planes. flags[row] becomes the block's flags, from what inspect_blocks saw.
extern "C" __global__ void __launch_bounds__(THREADS) split_blocks(
    const BlockRow *rows, const u32 *tiles, const u32 *seen, u32 *flags) {
    const u32 number = tiles[blockIdx.x];
    const BlockRow row = rows[number];
    const Tile tile = tile_of(row, row.nbytes);
    const u32 width = (u32)row.width;
    const bool may_pack = (row.flags & PACKED_REST) && row.nbytes / width >= 8;
    const bool packed = may_pack && (seen[number] == SEEN_POSITIVE || seen[number] == SEEN_NEGATIVE);
    if (tile.begin == 0 && threadIdx.x == 0)
        flags[number] = !packed ? 0 : seen[number] == SEEN_NEGATIVE ? PACKED_REST | NEGATIVE : PACKED_REST;
    switch (width) {
        case 2: split_tile<2>(row, tile.begin / 2, tile.end / 2, packed); break;
        case 4: split_tile<4>(row, tile.begin / 4, tile.end / 4, packed); break;
        case 8: split_tile<8>(row, tile.begin / 8, tile.end / 8, packed); break;
    }
}

// The rest of one float of a packed plane: its seven bits.
__device__ u32 unpacked_rest(const u8 *rest, u32 at, u32 eighth) {
    if (at < 7 * eighth) return rest[at] & 0x7F;
    if (at >= 8 * eighth) return rest[at - eighth] & 0x7F;
    u32 seven = 0;
    for (u32 k = 0; k < 7; ++k) seven |= (u32)(rest[k * eighth + at - 7 * eighth] >> 7) << k;
    return seven;
}

template <int WIDTH>
__device__ void merge_tile(const BlockRow &row, u32 begin, u32 end) {
    typedef typename Float<WIDTH>::Bits Bits;
    u8 *block = (u8 *)row.data;
    const u8 *low = (const u8 *)row.low, *rest = (const u8 *)row.rest, *exponent = (const u8 *)row.exponent;
    const u32 alignment = alignment_of(row.data);
    const bool packed = row.flags & PACKED_REST;
    const u32 sign = row.flags & NEGATIVE ? 0x8000 : 0;
    const u32 eighth = (u32)(row.nbytes / WIDTH) / 8;
    for (u32 first = begin + 4 * threadIdx.x; first < end; first += 4 * THREADS) {
        const u32 count = end - first < 4 ? end - first : 4;
        u32 exponents = 0, rests = 0;
        if (count == 4) exponents = *(const u32 *)(exponent + first);
        else for (u32 i = 0; i < count; ++i) exponents |= (u32)exponent[first + i] << 8 * i;
        if (count == 4 && (!packed || first + 4 <= 7 * eighth)) rests = *(const u32 *)(rest + first);
        else for (u32 i = 0; i < count; ++i)
            rests |= (packed ? unpacked_rest(rest, first + i, eighth) : (u32)rest[first + i]) << 8 * i;

        Bits bits[4];
        for (int i = 0; i < 4; ++i) {
            u32 own = rests >> 8 * i & 0xFF;
            u32 high = (exponents >> 8 * i & 0xFF) << 7 | (own & 0x7F) | (packed ? sign : (own & 0x80) << 8);
            bits[i] = (Bits)high << (8 * WIDTH - 16);
        }
        if constexpr (WIDTH == 4) {
            if (count == 4) {
                u64 lows = *(const u64 *)(low + 2 * (u64)first);
                for (int i = 0; i < 4; ++i) bits[i] |= (Bits)(lows >> 16 * i & 0xFFFF);
            } else {
                for (u32 i = 0; i < count; ++i) bits[i] |= ((const u16 *)low)[first + i];
            }
        } else if constexpr (WIDTH == 8) {
            for (u32 i = 0; i < count; ++i)
                for (u32 part = 0; part < 3; ++part)
                    bits[i] |= (Bits)((u64)((const u16 *)low)[3 * (u64)(first + i) + part] << 16 * part);
        }
        if (count == 4) store_four<WIDTH>(block + (u64)first * WIDTH, alignment, bits);
        else for (u32 i = 0; i < count; ++i)
            store_float<WIDTH>(block + (u64)(first + i) * WIDTH, bits[i], alignment);
    }
}

// The inverse of split_blocks.
extern "C" __global__ void __launch_bounds__(THREADS) merge_blocks(const BlockRow *rows, const u32 *tiles) {
    const BlockRow row = rows[tiles[blockIdx.x]];
    const Tile tile = tile_of(row, row.nbytes);
    switch (row.width) {
        case 2: merge_tile<2>(row, tile.begin / 2, tile.end / 2); break;
        case 4: merge_tile<4>(row, tile.begin / 4, tile.end / 4); break;
        case 8: merge_tile<8>(row, tile.begin / 8, tile.end / 8); break;
    }
}

// ---- copies ----------------------------------------------------------------------------------------------------------

template <int ALIGNMENT>
__device__ void copy_tile(const CopyRow &row, u32 begin, u32 end) {
    const u8 *source = (const u8 *)row.source;
    u8 *target = (u8 *)row.target;
    const u32 nbytes = (u32)row.nbytes;
    for (u32 at = begin + 16 * threadIdx.x; at < end; at += 16 * THREADS) {
        if (at + 16 <= nbytes) {
            Words words;
            if constexpr (ALIGNMENT == 16) words = *(const Words *)(source + at);
            else for (int i = 0; i < 4; ++i) words.word[i] = load_word<ALIGNMENT>(source + at + 4 * i);
            *(Words *)(target + at) = words;
        } else {
            for (u32 i = at; i < at + 16 && i < end; ++i) target[i] = i < nbytes ? source[i] : 0;
        }
    }
}

// Gathers pieces into one run, or scatters them from one: each row's bytes, and zero bytes after them.
extern "C" __global__ void __launch_bounds__(THREADS) copy_pieces(const CopyRow *rows, const u32 *tiles) {
    const CopyRow row = rows[tiles[blockIdx.x]];
    const Tile tile = tile_of(row, row.nbytes + row.zeros);
    if (row.target % 16) {
        for (u32 at = tile.begin + threadIdx.x; at < tile.end; at += THREADS)
            ((u8 *)row.target)[at] = at < row.nbytes ? ((const u8 *)row.source)[at] : 0;
        return;
    }
    switch (alignment_of(row.source)) {
        case 1: copy_tile<1>(row, tile.begin, tile.end); break;
        case 2: copy_tile<2>(row, tile.begin, tile.end); break;
        case 4: copy_tile<4>(row, tile.begin, tile.end); break;
        default: copy_tile<16>(row, tile.begin, tile.end);
    }
}
