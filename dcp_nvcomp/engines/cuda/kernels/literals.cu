// Zstandard frames (RFC 8878) of literals alone, which hold one slice (docs/format.md) each; codecs/coders/_literals_encode.h
// makes them on a CPU. literals.py compiles all files literals*.cu as one and launches the kernels with THREADS
// threads:
//
//   literals.cu         the format, and what all others use
//   literals_encode.cu  how encoding works: measure_slices of literals_measure.cu, with literals_weights.cu, and
//                       write_slices of literals_write.cu
//   literals_parse.cu   how decoding works: decode_slices of literals_decode.cu
//
// The format:
//
//   frame     magic number, descriptor, size of the content; then its blocks
//   block     3 bytes: is it the last, its kind, its length; then
//             raw: the bytes themselves           repeated: the one byte that it consists of
//             compressed: sizes, weights, the lengths of three streams, four streams, and a zero: no sequences
//
// Symbols have Huffman codes of at most 11 bits. A symbol's weight is 0 if it does not occur, else the longest code's
// length plus one less the length of its own. All weights but that of the last symbol are listed, as half bytes or
// compressed with finite state entropy (FSE); the last one's follows from the others. Of codes in ascending order, the
// longest come first, and symbols of equal length are in their own order.
//
// A quarter of a block's symbols goes into each stream, the last symbol first, each code above the ones before it; one
// more bit marks the end. A decoder so begins at a stream's last byte, and meets the first symbol there.
//
// Beyond plain C++ these kernels use __syncthreads, __syncthreads_count, __syncthreads_or, __syncwarp, __shfl_sync,
// __shfl_up_sync and __ballot_sync with all lanes, atomicAdd and atomicOr, __popc and __clz.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

const u32 WARP = 32, WARPS = THREADS / WARP, ALL_LANES = 0xFFFFFFFF;

const u32 ALIGNMENT_NBYTES = 16;                     // of frames and slices, as in docs/format.md

const u32 SYMBOLS = 256;
const u32 MAX_LENGTH = 11;                           // of a code, in bits
const u32 WEIGHTS = MAX_LENGTH + 1;                  // how many different ones there are
const u32 MAX_LISTED = 128;                          // weights that fit into the plain list
const u32 MAX_BLOCK_NBYTES = 128 << 10;

const u32 MAGIC = 0xFD2FB528;
const u32 DESCRIPTOR = 2 << 6 | 1 << 5;              // the window is the content, whose size takes 4 bytes
const u32 FRAME_HEADER_NBYTES = 4 + 1 + 4, BLOCK_HEADER_NBYTES = 3, JUMP_TABLE_NBYTES = 6;
const u32 RAW_BLOCK = 0, REPEATED_BLOCK = 1, COMPRESSED_BLOCK = 2;
const u32 HUFFMAN_LITERALS = 2;                      // and the table of codes comes with them

// FSE of weights: each weight has a share of 64 states, which are spread over the table in steps of this many.
const u32 FSE_LOG = 6, FSE_STATES = 1 << FSE_LOG;
__device__ u32 fse_step(u32 states) { return states / 2 + states / 8 + 3; }

struct alignas(16) Words { u32 word[4]; };

__device__ u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
__device__ u32 lane_number() { return threadIdx.x % WARP; }
__device__ u32 warp_number() { return threadIdx.x / WARP; }
__device__ u32 highest_bit(u32 value) { return 31 - __clz((int)value); }
__device__ u32 low_bits(u32 count) { return (1u << count) - 1; } // for a count below 32

// The sum of the values of a warp's lanes up to and with this one.
__device__ u32 sum_up_to(u32 value) {
    for (u32 distance = 1; distance < WARP; distance *= 2) {
        const u32 below = __shfl_up_sync(ALL_LANES, value, distance);
        if (lane_number() >= distance) value += below;
    }
    return value;
}

__device__ u32 sum_of_warp(u32 value) { return __shfl_sync(ALL_LANES, sum_up_to(value), WARP - 1); }
