/* CRC32C (Castagnoli; RFC 3720, appendix B.4) of memory that another pass has just read, or will: as part of it, as a
 * call from Python for each row of a block would cost more than the sum.
 *
 * The processor's instruction takes 8 bytes and has a latency of three, so three lanes are summed at the same time, and
 * joined: appending a lane's length of zeros to a sum is linear, and so a look-up for each of its bytes. What long lanes
 * leave is summed in short ones: rows of a block may be as short as 1 KiB.
 */

#ifndef CRC32C_H
#define CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(CRC_BY_TABLES) /* which a test defines */
#include <nmmintrin.h>
#define HAS_CRC_INSTRUCTION 1
#endif

enum { LANE_NBYTES = 512, SHORT_LANE_NBYTES = 64 };

typedef struct {
    uint32_t bytes[8][256]; /* of a byte with 0 to 7 bytes of zeros behind it */
    uint32_t lane[4][256];  /* of a byte of a sum, with a lane of zeros behind it, */
    uint32_t short_lane[4][256]; /* or a short one */
    int has_instruction;
} CrcTables;

static CrcTables crc_tables;

static uint32_t crc_zeros(uint32_t sum, size_t nbytes) {
    while (nbytes--)
        sum = sum >> 8 ^ crc_tables.bytes[0][sum & 0xFF];
    return sum;
}

/* Called once, before anything else. */
static void make_crc_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (sum & 1 ? 0x82F63B78u : 0);
        crc_tables.bytes[0][byte] = sum;
    }
    for (uint32_t byte = 0; byte < 256; byte++) {
        for (size_t behind = 1; behind < 8; behind++)
            crc_tables.bytes[behind][byte] = crc_zeros(crc_tables.bytes[0][byte], behind);
        for (int at = 0; at < 4; at++) {
            crc_tables.lane[at][byte] = crc_zeros(byte << 8 * at, LANE_NBYTES);
            crc_tables.short_lane[at][byte] = crc_zeros(byte << 8 * at, SHORT_LANE_NBYTES);
        }
    }
#ifdef HAS_CRC_INSTRUCTION
    crc_tables.has_instruction = __builtin_cpu_supports("sse4.2");
#endif
}

static uint32_t crc_by_tables(uint32_t sum, const uint8_t *data, size_t nbytes) {
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= sum;
        sum = 0;
        for (int at = 0; at < 8; at++)
            sum ^= crc_tables.bytes[7 - at][word >> 8 * at & 0xFF];
    }
    for (; nbytes; nbytes--)
        sum = sum >> 8 ^ crc_tables.bytes[0][(sum ^ *data++) & 0xFF];
    return sum;
}

#ifdef HAS_CRC_INSTRUCTION
static inline uint32_t behind(const uint32_t lane[4][256], uint32_t sum) {
    return lane[0][sum & 0xFF] ^ lane[1][sum >> 8 & 0xFF] ^ lane[2][sum >> 16 & 0xFF] ^ lane[3][sum >> 24];
}

/* Sums three lanes, whose tables are `lane`. */
__attribute__((target("sse4.2"), always_inline)) static inline uint32_t
three_lanes(uint32_t sum, const uint8_t *data, size_t lane_nbytes, const uint32_t lane[4][256]) {
    uint64_t a = sum, b = 0, c = 0, words[3];
    for (size_t at = 0; at < lane_nbytes; at += 8) {
        memcpy(&words[0], data + at, 8);
        memcpy(&words[1], data + lane_nbytes + at, 8);
        memcpy(&words[2], data + 2 * lane_nbytes + at, 8);
        a = _mm_crc32_u64(a, words[0]);
        b = _mm_crc32_u64(b, words[1]);
        c = _mm_crc32_u64(c, words[2]);
    }
    return behind(lane, behind(lane, (uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
}

__attribute__((target("sse4.2"))) static uint32_t crc_by_instruction(uint32_t sum, const uint8_t *data,
                                                                     size_t nbytes) {
    for (; nbytes >= 3 * LANE_NBYTES; data += 3 * LANE_NBYTES, nbytes -= 3 * LANE_NBYTES)
        sum = three_lanes(sum, data, LANE_NBYTES, crc_tables.lane);
    for (; nbytes >= 3 * SHORT_LANE_NBYTES; data += 3 * SHORT_LANE_NBYTES, nbytes -= 3 * SHORT_LANE_NBYTES)
        sum = three_lanes(sum, data, SHORT_LANE_NBYTES, crc_tables.short_lane);
    uint64_t a = sum, word;
    for (; nbytes >= 8; data += 8, nbytes -= 8) {
        memcpy(&word, data, 8);
        a = _mm_crc32_u64(a, word);
    }
    for (; nbytes; nbytes--)
        a = _mm_crc32_u8((uint32_t)a, *data++);
    return (uint32_t)a;
}
#endif

/* The CRC of some bytes; `value` is that of the bytes before them, 0 if there are none. */
static uint32_t crc32c(uint32_t value, const uint8_t *data, size_t nbytes) {
#ifdef HAS_CRC_INSTRUCTION
    if (crc_tables.has_instruction)
        return ~crc_by_instruction(~value, data, nbytes);
#endif
    return ~crc_by_tables(~value, data, nbytes);
}

#endif
