/* The kernels of the codec `planes`: one pass over the floats for each plane. planes_numpy.py is the same in numpy, for
 * where nothing was compiled, and says what each function does.
 *
 * Floats may lie at any address, so they are read and written with memcpy, which compilers turn into plain loads and
 * stores. Little-endian, as the format is.
 */

#ifndef PLANES_KERNELS_H
#define PLANES_KERNELS_H

#include "_block_kernels.h"

static int signs(uint64_t any, uint64_t all, int top) {
    return (all >> top & 1 ? 0 : SEEN_POSITIVE) | (any >> top & 1 ? SEEN_NEGATIVE : 0);
}

VECTORS
static int split2(const uint8_t *restrict block, uint8_t *restrict rest, uint8_t *restrict exponent, ptrdiff_t count) {
    uint16_t any = 0, all = 0xFFFF;
    for (ptrdiff_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, block + 2 * i, 2);
        exponent[i] = (uint8_t)(bits >> 7);
        rest[i] = (uint8_t)((bits & 0x7F) | (bits >> 8 & 0x80));
        any |= bits;
        all &= bits;
    }
    return signs(any, all, 15);
}

VECTORS
static int split4(const uint8_t *restrict block, uint8_t *restrict low, uint8_t *restrict rest,
                  uint8_t *restrict exponent, ptrdiff_t count) {
    uint32_t any = 0, all = 0xFFFFFFFF;
    for (ptrdiff_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, block + 4 * i, 4);
        uint16_t low_half = (uint16_t)bits;
        memcpy(low + 2 * i, &low_half, 2);
        exponent[i] = (uint8_t)(bits >> 23);
        rest[i] = (uint8_t)((bits >> 16 & 0x7F) | (bits >> 24 & 0x80));
        any |= bits;
        all &= bits;
    }
    return signs(any, all, 31);
}

static int split8(const uint8_t *restrict block, uint8_t *restrict low, uint8_t *restrict rest,
                  uint8_t *restrict exponent, ptrdiff_t count) {
    uint64_t any = 0, all = ~(uint64_t)0;
    for (ptrdiff_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, block + 8 * i, 8);
        memcpy(low + 6 * i, block + 8 * i, 6);
        exponent[i] = (uint8_t)(bits >> 55);
        rest[i] = (uint8_t)((bits >> 48 & 0x7F) | (bits >> 56 & 0x80));
        any |= bits;
        all &= bits;
    }
    return signs(any, all, 63);
}

VECTORS
static void merge2(const uint8_t *restrict rest, const uint8_t *restrict exponent, uint8_t *restrict block,
                   ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        uint16_t bits = (uint16_t)((rest[i] & 0x80) << 8 | exponent[i] << 7 | (rest[i] & 0x7F));
        memcpy(block + 2 * i, &bits, 2);
    }
}

VECTORS
static void merge4(const uint8_t *restrict low, const uint8_t *restrict rest, const uint8_t *restrict exponent,
                   uint8_t *restrict block, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        uint16_t low_half;
        memcpy(&low_half, low + 2 * i, 2);
        uint32_t bits = (uint32_t)(rest[i] & 0x80) << 24 | (uint32_t)exponent[i] << 23 |
                        (uint32_t)(rest[i] & 0x7F) << 16 | low_half;
        memcpy(block + 4 * i, &bits, 4);
    }
}

static void merge8(const uint8_t *restrict low, const uint8_t *restrict rest, const uint8_t *restrict exponent,
                   uint8_t *restrict block, ptrdiff_t count) {
    for (ptrdiff_t i = 0; i < count; i++) {
        uint16_t high = (uint16_t)((rest[i] & 0x80) << 8 | exponent[i] << 7 | (rest[i] & 0x7F));
        memcpy(block + 8 * i, low + 6 * i, 6);
        memcpy(block + 8 * i + 6, &high, 2);
    }
}

VECTORS
static void pack_eighth(uint8_t *restrict part, const uint8_t *restrict last, int bit, ptrdiff_t eighth) {
    for (ptrdiff_t i = 0; i < eighth; i++)
        part[i] = (uint8_t)((part[i] & 0x7F) | (last[i] >> bit & 1) << 7);
}

VECTORS
static void unpack_eighth(const uint8_t *restrict part, uint8_t *restrict seven, uint8_t *restrict last, int bit,
                          uint8_t sign, ptrdiff_t eighth) {
    for (ptrdiff_t i = 0; i < eighth; i++) {
        last[i] |= (uint8_t)(part[i] >> 7 << bit);
        seven[i] = (uint8_t)((part[i] & 0x7F) | sign);
    }
}

/* Splits floats of `width` bytes, 2, 4 or 8; returns which signs were seen. */
static int split_run(const uint8_t *block, int width, uint8_t *low, uint8_t *rest, uint8_t *exponent,
                     ptrdiff_t count) {
    if (width == 2)
        return split2(block, rest, exponent, count);
    return width == 4 ? split4(block, low, rest, exponent, count) : split8(block, low, rest, exponent, count);
}

static void merge_run(const uint8_t *low, const uint8_t *rest, const uint8_t *exponent, int width, uint8_t *block,
                      ptrdiff_t count) {
    if (width == 2)
        merge2(rest, exponent, block, count);
    else if (width == 4)
        merge4(low, rest, exponent, block, count);
    else
        merge8(low, rest, exponent, block, count);
}

/* Packs a plane of `count` bytes in place: the last eighth goes into the signs of the others. */
static void pack_plane(uint8_t *rest, ptrdiff_t count) {
    ptrdiff_t eighth = count / 8;
    for (int k = 0; k < 7; k++)
        pack_eighth(rest + k * eighth, rest + 7 * eighth, k, eighth);
    for (ptrdiff_t i = 8 * eighth; i < count; i++)
        rest[i - eighth] = rest[i] & 0x7F;
}

static void unpack_plane(const uint8_t *packed, uint8_t *rest, int is_negative, ptrdiff_t count) {
    ptrdiff_t eighth = count / 8;
    uint8_t *last = rest + 7 * eighth, sign = is_negative ? 0x80 : 0;
    memset(last, sign, (size_t)eighth);
    for (int k = 0; k < 7; k++)
        unpack_eighth(packed + k * eighth, rest + k * eighth, last, k, sign, eighth);
    for (ptrdiff_t i = 8 * eighth; i < count; i++)
        rest[i] = (packed[i - eighth] & 0x7F) | sign;
}

#endif
