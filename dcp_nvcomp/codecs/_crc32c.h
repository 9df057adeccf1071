/* CRC32C (Castagnoli; RFC 3720, appendix B.4) for use inside another pass: a call from Python per row would cost more
 * than the sum.
 *
 * The processor's instruction takes 8 bytes and has a latency of three, so three lanes are summed at the same time, and
 * joined: appending a lane of zeros to a sum is linear, and so a look-up for each of its bytes. What long lanes leave is
 * summed in short ones: rows of a block may be as short as 1 KiB.
 */

#ifndef CRC32C_H
#define CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__x86_64__) || !defined(__GNUC__)
#error "Without the instruction of x86-64, blocks are coded in steps, with the crc32c package."
#endif

#include <nmmintrin.h>

enum { LANE_NBYTES = 512, SHORT_LANE_NBYTES = 64 };

/* By byte of a sum: what it becomes when a lane of zeros is appended. */
typedef uint32_t LaneTable[4][256];

static LaneTable long_lane, short_lane;

static void make_lane_table(LaneTable table, size_t lane_nbytes) {
    uint32_t one_byte[256];
    for (uint32_t byte = 0; byte < 256; byte++) {
        one_byte[byte] = byte;
        for (int bit = 0; bit < 8; bit++)
            one_byte[byte] = one_byte[byte] >> 1 ^ (one_byte[byte] & 1 ? 0x82F63B78u : 0);
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        for (int at = 0; at < 4; at++) {
            uint32_t sum = byte << 8 * at;
            for (size_t zeros = 0; zeros < lane_nbytes; zeros++)
                sum = sum >> 8 ^ one_byte[sum & 0xFF];
            table[at][byte] = sum;
        }
    }
}

/* Called once, before anything else; returns 0 if this processor does not have the instruction. */
static int prepare_crc32c(void) {
    make_lane_table(long_lane, LANE_NBYTES);
    make_lane_table(short_lane, SHORT_LANE_NBYTES);
    return __builtin_cpu_supports("sse4.2");
}

static inline uint32_t append_lane(const LaneTable table, uint32_t sum) {
    return table[0][sum & 0xFF] ^ table[1][sum >> 8 & 0xFF] ^ table[2][sum >> 16 & 0xFF] ^ table[3][sum >> 24];
}

/* Sums three lanes of `lane_nbytes`, whose table is `table`. */
__attribute__((target("sse4.2"), always_inline)) static inline uint32_t
sum_lanes(uint32_t sum, const uint8_t *data, size_t lane_nbytes, const LaneTable table) {
    uint64_t a = sum, b = 0, c = 0, words[3];
    for (size_t at = 0; at < lane_nbytes; at += 8) {
        memcpy(&words[0], data + at, 8);
        memcpy(&words[1], data + lane_nbytes + at, 8);
        memcpy(&words[2], data + 2 * lane_nbytes + at, 8);
        a = _mm_crc32_u64(a, words[0]);
        b = _mm_crc32_u64(b, words[1]);
        c = _mm_crc32_u64(c, words[2]);
    }
    return append_lane(table, append_lane(table, (uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
}

/* The CRC of some bytes; `value` is that of the bytes before them, 0 if there are none. */
__attribute__((target("sse4.2"))) static uint32_t crc32c(uint32_t value, const uint8_t *data, size_t nbytes) {
    uint32_t sum = ~value;
    for (; nbytes >= 3 * LANE_NBYTES; data += 3 * LANE_NBYTES, nbytes -= 3 * LANE_NBYTES)
        sum = sum_lanes(sum, data, LANE_NBYTES, long_lane);
    for (; nbytes >= 3 * SHORT_LANE_NBYTES; data += 3 * SHORT_LANE_NBYTES, nbytes -= 3 * SHORT_LANE_NBYTES)
        sum = sum_lanes(sum, data, SHORT_LANE_NBYTES, short_lane);
    uint64_t wide = sum, word;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        memcpy(&word, data, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    for (; nbytes; nbytes--)
        wide = _mm_crc32_u8((uint32_t)wide, *data++);
    return ~(uint32_t)wide;
}

#endif
