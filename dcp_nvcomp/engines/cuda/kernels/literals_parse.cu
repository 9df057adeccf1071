// Decoding of frames that literals_encode.cu or _literals_encode.h wrote: one or more blocks, four streams each. Any other
// frame and any that is corrupt is reported; what its slice then contains is undefined. Nothing outside of frames is
// read, and nothing outside of slices written, whatever the frames contain: all lengths are checked before they are
// used.
//
// A thread block takes SLICES slices, a warp each, which have nothing to do with each other. A warp reads the headers of
// the slice's next block (this file), makes a table, which tells up to three symbols from ten bits, and decodes the
// streams, one in each of its first lanes (literals_decode.cu).

const u32 SLICES = WARPS / 2, STREAMS = 4;
// Of each stream, see literals_decode.cu: words that are fetched together and that are kept, and room for symbols.
const u32 FETCHED = WARP, KEPT = 2 * FETCHED, DECODED_NBYTES = 1136;

struct FrameRow {
    u64 frame;        // address, any alignment; readable from the multiple of 4 before it to that after its end
    u64 frame_nbytes;
    u64 data;         // address of the slice, a multiple of 16
    u64 nbytes;       // of the slice, below 2^31
};

const u32 MAX_FRAME_NBYTES = 1 << 27; // positions of bits are ints

const u32 TABLE_LOG = 10, TABLE_ENTRIES = 1 << TABLE_LOG;
const u32 MAX_BEGINNING = BLOCK_HEADER_NBYTES + 5 + 1 + 127 + JUMP_TABLE_NBYTES; // of a block, up to its streams

// Of the table an entry has up to three symbols, from the lowest byte, then 4 bits: how long their codes are together,
// then 2 bits: how many there are. None means that one more bit decides between two codes of 11 bits: the lowest byte
// is the symbol if it is 0, the next one if it is 1.
struct Decoder {
    u32 table[TABLE_ENTRIES]; // before it is made, its room is that of Preparation
    alignas(16) u8 decoded[STREAMS][DECODED_NBYTES]; // symbols that are not in the slice yet
    u32 kept[STREAMS][KEPT];  // words that are decoded next, by their number modulo KEPT
    u8 weights[SYMBOLS];
    u32 longest;              // length of a code
    u32 stream_at[5];         // in the frame: where each stream begins, and where the last one ends
    u32 block_at, block_nbytes; // in the slice
    u32 ready;                // for decoding
};

struct Preparation {
    u8 beginning[(MAX_BEGINNING + 15) / 16 * 16]; // of a block; zeros after the frame's end
    u8 weight_of[FSE_STATES], width_of[FSE_STATES], next_of[FSE_STATES]; // by state: next_of without the bits it reads
    u8 shares[WEIGHTS], left[WEIGHTS];            // of the states; left: those to be spread
};
static_assert(sizeof(Preparation) <= sizeof(u32) * TABLE_ENTRIES, "they share their memory");

__device__ u32 get_number(const u8 *at, u32 nbytes) {
    u32 value = 0;
    for (u32 i = 0; i < nbytes; ++i) value |= (u32)at[i] << 8 * i;
    return value;
}

// ---- weights --------------------------------------------------------------------------------------------------------

// Up to 8 bits from a bit on, of `nbytes` bytes; zeros after their end.
__device__ u32 get_bits(const u8 *in, u32 nbytes, u32 bit, u32 width) {
    u32 value = 0;
    for (u32 i = 0; i < 2; ++i)
        if (bit / 8 + i < nbytes) value |= (u32)in[bit / 8 + i] << 8 * i;
    return value >> bit % 8 & low_bits(width);
}

// Reads the description of an FSE table (RFC 8878, 4.1.1) and makes the table. Returns how many bytes it takes, or 0 if
// it is corrupt. log: becomes the logarithm of the number of states. By one lane.
__device__ u32 read_states(const u8 *in, u32 nbytes, Preparation &own, u32 &log) {
    log = 5 + get_bits(in, nbytes, 0, 4);
    if (log > FSE_LOG) return 0;
    const u32 states = 1 << log;
    u32 bit = 4, left = states, weights = 0;
    u32 common = states; // how many are not of weights whose share is less than one
    while (left > 0) {
        if (weights == WEIGHTS) return 0;
        const u32 width = highest_bit(left + 1) + 1, unused = low_bits(width) - (left + 1);
        u32 value = get_bits(in, nbytes, bit, width - 1);
        bit += width - 1;
        if (value >= unused) {
            const u32 high = get_bits(in, nbytes, bit++, 1);
            value = high ? value + (1u << (width - 1)) - unused : value;
        }
        if (value == 0) own.weight_of[--common] = (u8)weights; // less than one: a state at the end
        const u32 share = value ? value - 1 : 1;
        own.shares[weights] = own.left[weights] = (u8)share;
        if (value == 0) own.left[weights] = 0;
        ++weights;
        left -= share;
        for (u32 zeros = value == 1 ? 3 : 0; zeros == 3;) {
            zeros = get_bits(in, nbytes, bit, 2);
            bit += 2;
            if (weights + zeros > WEIGHTS) return 0;
            for (u32 i = 0; i < zeros; ++i) own.shares[weights] = own.left[weights] = 0, ++weights;
        }
    }
    for (u32 weight = 0, at = 0; weight < weights; ++weight)
        for (u32 i = 0; i < own.left[weight]; ++i) {
            own.weight_of[at] = (u8)weight;
            do at = (at + fse_step(states)) % states;
            while (at >= common);
        }
    for (u32 state = 0; state < states; ++state) {
        const u32 next = own.shares[own.weight_of[state]]++, width = log - highest_bit(next);
        own.width_of[state] = (u8)width;
        own.next_of[state] = (u8)((next << width) - states);
    }
    return (bit + 7) / 8;
}

// Weights that are compressed: how many, or 0 if they are corrupt. By one lane.
__device__ u32 expand_weights(const u8 *in, u32 nbytes, u8 *weights, Preparation &own) {
    u32 log;
    const u32 begin = read_states(in, nbytes, own, log);
    if (begin == 0 || begin >= nbytes || in[nbytes - 1] == 0) return 0;
    u32 left = 8 * (nbytes - 1 - begin) + highest_bit(in[nbytes - 1]); // bits, of which the last ones come first
    in += begin;
    nbytes -= begin;
    if (left < 2 * log) return 0;
    u32 state = get_bits(in, nbytes, left -= log, log), other = get_bits(in, nbytes, left -= log, log);
    for (u32 count = 0; count + 2 < SYMBOLS;) {
        weights[count++] = own.weight_of[state];
        const u32 width = own.width_of[state];
        if (width > left) { // the end: the other state is the last weight's
            weights[count++] = own.weight_of[other];
            return count;
        }
        const u32 next = own.next_of[state] + get_bits(in, nbytes, left -= width, width);
        state = other;
        other = next;
    }
    return 0;
}

// The weights of a block, the last symbol's too, and zeros for symbols beyond it; returns how many bytes they take, or
// 0 if they are corrupt. longest: becomes the longest code's length. By one warp, whose lanes do not wait for the last
// ones.
__device__ u32 read_weights(const u8 *in, u32 room, u8 *weights, Preparation &own, u32 &longest) {
    const u32 lane = lane_number();
    const bool is_list = in[0] > 127;
    const u32 nbytes = 1 + (is_list ? (in[0] - 127u + 1) / 2 : in[0]);
    if (nbytes >= room) return 0;
    u32 listed = in[0] - 127u;
    if (is_list) {
        for (u32 i = lane; i < listed; i += WARP) weights[i] = in[1 + i / 2] >> (i % 2 ? 0 : 4) & 15;
    } else {
        if (lane == 0) listed = expand_weights(in + 1, nbytes - 1, weights, own);
        listed = __shfl_sync(ALL_LANES, listed, 0);
        if (listed == 0) return 0;
    }
    __syncwarp();
    u32 sum = 0, ones = 0, too_high = 0;
    for (u32 i = lane; i < listed; i += WARP) {
        const u32 weight = weights[i];
        too_high += weight > MAX_LENGTH;
        sum += weight <= MAX_LENGTH ? 1u << weight >> 1 : 0;
        ones += weight == 1;
    }
    sum = sum_of_warp(sum);
    ones = sum_of_warp(ones);
    if (sum_of_warp(too_high) || sum == 0) return 0;
    longest = highest_bit(sum) + 1;
    const u32 rest = (1u << longest) - sum; // what the last symbol has to fill
    if (longest > MAX_LENGTH || (rest & (rest - 1))) return 0;
    ones += rest == 1;
    if (ones < 2) return 0; // libzstd refuses it too
    for (u32 i = listed + lane; i < SYMBOLS; i += WARP) weights[i] = (u8)(i == listed ? highest_bit(rest) + 1 : 0);
    return nbytes;
}

// ---- blocks ---------------------------------------------------------------------------------------------------------

// Copies a raw block, or repeats a byte. target: a multiple of 16. By one warp.
__device__ void fill(u8 *target, const u8 *source, u32 nbytes, bool repeat) {
    const u32 lane = lane_number();
    u32 begin = 0;
    if (repeat) {
        const u32 word = source[0] * 0x01010101u;
        begin = nbytes / 16 * 16;
        for (u32 i = lane; i < begin / 16; i += WARP) ((Words *)target)[i] = Words{{word, word, word, word}};
    }
    for (u32 i = begin + lane; i < nbytes; i += WARP) target[i] = source[repeat ? 0 : i];
}

// Reads the beginning of a compressed block: sizes, weights and where its streams are. False if the block is corrupt.
// in: what follows the block's header; it is `nbytes` long, and at `at` in the frame. By one warp.
__device__ bool read_literals(const u8 *in, u32 nbytes, u32 at, u32 room_nbytes, Decoder &decoder, Preparation &own) {
    const u32 format = in[0] >> 2 & 3, size_bits = 4 * format + 6, header_nbytes = format + 2;
    if ((in[0] & 3) != HUFFMAN_LITERALS || format == 0) return false; // format 0 has a single stream
    const u64 header = get_number(in, 4) | (u64)in[4] << 32;
    const u32 block_nbytes = (u32)(header >> 4) & low_bits(size_bits);
    const u32 coded_nbytes = (u32)(header >> (4 + size_bits)) & low_bits(size_bits);
    if (header_nbytes + coded_nbytes + 1 != nbytes || block_nbytes > room_nbytes) return false;
    if (3 * ((block_nbytes + 3) / 4) >= block_nbytes) return false; // the last stream would be empty
    u32 longest;
    const u32 weights_nbytes = read_weights(in + header_nbytes, coded_nbytes, decoder.weights, own, longest);
    if (weights_nbytes == 0 || weights_nbytes + JUMP_TABLE_NBYTES >= coded_nbytes) return false;
    const u8 *jumps = in + header_nbytes + weights_nbytes;
    u32 stream_at = at + header_nbytes + weights_nbytes + JUMP_TABLE_NBYTES;
    const u32 end = at + header_nbytes + coded_nbytes;
    for (u32 i = 0; i < 4; ++i) {
        const u32 next = i < 3 ? stream_at + get_number(jumps + 2 * i, 2) : end;
        if (next <= stream_at || next > end) return false;
        if (lane_number() == 0) decoder.stream_at[i] = stream_at;
        stream_at = next;
    }
    if (lane_number() == 0) {
        decoder.stream_at[4] = end;
        decoder.longest = longest;
        decoder.block_nbytes = block_nbytes;
    }
    return true;
}

// How much of a frame is read, and how much of its slice is there. The same in all lanes of a warp.
struct Progress { u32 at, done; };

// Reads one block, and writes what it can write without a table; else there are streams to decode, and decoder.ready
// becomes 1. False if it is corrupt. By one warp.
__device__ bool read_block(const FrameRow &row, Progress &progress, bool &is_last, Decoder &decoder) {
    Preparation &own = *(Preparation *)decoder.table;
    const u8 *frame = (const u8 *)row.frame;
    const u32 rest = (u32)row.frame_nbytes - progress.at, room = (u32)row.nbytes - progress.done;
    for (u32 i = lane_number(); i < sizeof own.beginning; i += WARP)
        own.beginning[i] = i < rest ? frame[progress.at + i] : 0;
    __syncwarp();
    const u32 header = get_number(own.beginning, BLOCK_HEADER_NBYTES), kind = header >> 1 & 3, size = header >> 3;
    const u32 begin = progress.at + BLOCK_HEADER_NBYTES, nbytes = kind == REPEATED_BLOCK ? 1 : size;
    is_last = header & 1;
    if (rest < BLOCK_HEADER_NBYTES || nbytes > rest - BLOCK_HEADER_NBYTES || nbytes == 0) return false;
    if (size > smaller((u32)row.nbytes, MAX_BLOCK_NBYTES)) return false; // longer than the window
    u32 content_nbytes = size;
    if (kind == COMPRESSED_BLOCK) {
        if (nbytes < 5 || frame[begin + nbytes - 1] != 0) return false; // that byte is 0 if there are no sequences
        if (!read_literals(own.beginning + BLOCK_HEADER_NBYTES, nbytes, begin, room, decoder, own)) return false;
        if (lane_number() == 0) {
            decoder.block_at = progress.done;
            decoder.ready = 1;
        }
        __syncwarp();
        content_nbytes = decoder.block_nbytes;
    } else {
        if (kind > REPEATED_BLOCK || size > room) return false;
        fill((u8 *)row.data + progress.done, frame + begin, size, kind == REPEATED_BLOCK);
    }
    progress.at = begin + nbytes;
    progress.done += content_nbytes;
    // blocks but the last are full, so that a frame has no more of them than a slice of its length
    if (!is_last) return content_nbytes == MAX_BLOCK_NBYTES;
    return progress.at == row.frame_nbytes && progress.done == row.nbytes;
}
