/* CRC32C (Castagnoli; RFC 3720) with the instructions that x86-64 processors have for it. Elsewhere, and in older ones,
 * `crc32c_level` is 0, and the package crc32c does it.
 *
 *   level 1   the crc32 instruction, on three parts of the data side by side, as one can begin in each cycle and takes
 *             three; the parts' CRCs become one by carry-less products
 *             (Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction", Intel 2011)
 *   level 2   carry-less products of 64 bytes at a time, four side by side
 *             (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009)
 *
 * In a CRC the lowest bit is the highest coefficient, and so it is in the constants, which are powers of x modulo the
 * polynomial. A product of two such numbers has a factor x too many, so that exponents are one less.
 */

#ifndef CRC32C_H
#define CRC32C_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

enum {
    CRC_PART_NBYTES = 1024,
    CRC_FOLDED_NBYTES = 256,
};

static uint64_t load_word(const uint8_t *data) {
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

static int crc32c_level(void) {
    if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul"))
        return 0;
    return 1 + (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"));
}

__attribute__((target("sse4.2"))) static uint32_t crc32c_short(uint32_t crc, const uint8_t *data, size_t nbytes) {
    uint64_t wide = crc;
    for (; nbytes >= 8; data += 8, nbytes -= 8)
        wide = _mm_crc32_u64(wide, load_word(data));
    crc = (uint32_t)wide;
    for (; nbytes; data++, nbytes--)
        crc = _mm_crc32_u8(crc, *data);
    return crc;
}

/* The CRC of what a CRC stands for, and zeros behind it: as many as `constant` says. */
__attribute__((target("sse4.2,pclmul"))) static uint32_t crc32c_ahead(uint32_t crc, uint32_t constant) {
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)crc), _mm_cvtsi32_si128((int)constant), 0);
    return (uint32_t)_mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(product));
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t crc32c_three_parts(uint32_t crc, const uint8_t *data,
                                                                           size_t nbytes) {
    /* x^(8n - 33) for n bytes ahead: by 32 more crc32 multiplies */
    const uint32_t one_part = 0x170076FA, two_parts = 0xA51B6135;
    for (; nbytes >= 3 * CRC_PART_NBYTES; data += 3 * CRC_PART_NBYTES, nbytes -= 3 * CRC_PART_NBYTES) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t at = 0; at < CRC_PART_NBYTES; at += 8) {
            a = _mm_crc32_u64(a, load_word(data + at));
            b = _mm_crc32_u64(b, load_word(data + CRC_PART_NBYTES + at));
            c = _mm_crc32_u64(c, load_word(data + 2 * CRC_PART_NBYTES + at));
        }
        crc = crc32c_ahead((uint32_t)a, two_parts) ^ crc32c_ahead((uint32_t)b, one_part) ^ (uint32_t)c;
    }
    return crc32c_short(crc, data, nbytes);
}

/* `sum` moved ahead by CRC_FOLDED_NBYTES, plus the bytes that are there. */
__attribute__((target("avx512f,vpclmulqdq"))) static inline __m512i crc32c_fold(__m512i sum, __m512i constants,
                                                                               const uint8_t *data) {
    __m512i first = _mm512_clmulepi64_epi128(sum, constants, 0x00);
    __m512i second = _mm512_clmulepi64_epi128(sum, constants, 0x11);
    return _mm512_ternarylogic_epi64(first, second, _mm512_loadu_si512(data), 0x96); /* all three, by exclusive or */
}

__attribute__((target("avx512f,vpclmulqdq,sse4.2"))) static uint32_t crc32c_folded(uint32_t crc, const uint8_t *data,
                                                                                  size_t nbytes) {
    if (nbytes < 2 * CRC_FOLDED_NBYTES)
        return crc32c_short(crc, data, nbytes);
    /* in the top half of each 64 bits x^(8n + 63) and x^(8n - 1), for the first and the second 8 bytes of 16 */
    const __m512i constants = _mm512_set4_epi64(0x1426A81500000000, (long long)0xE9A5D8BE00000000, 0x1426A81500000000,
                                                (long long)0xE9A5D8BE00000000);
    uint8_t sums[CRC_FOLDED_NBYTES];
    __m512i a = _mm512_loadu_si512(data), b = _mm512_loadu_si512(data + 64);
    __m512i c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (data += 256, nbytes -= 256; nbytes >= 256; data += 256, nbytes -= 256) {
        a = crc32c_fold(a, constants, data);
        b = crc32c_fold(b, constants, data + 64);
        c = crc32c_fold(c, constants, data + 128);
        d = crc32c_fold(d, constants, data + 192);
    }
    _mm512_storeu_si512(sums, a);
    _mm512_storeu_si512(sums + 64, b);
    _mm512_storeu_si512(sums + 128, c);
    _mm512_storeu_si512(sums + 192, d);
    return crc32c_short(crc32c_short(0, sums, sizeof sums), data, nbytes);
}

/* The CRC32C of data behind what `crc` is that of. Of a level that the processor has. */
static uint32_t crc32c(int level, uint32_t crc, const uint8_t *data, size_t nbytes) {
    return ~(level == 2 ? crc32c_folded : crc32c_three_parts)(~crc, data, nbytes);
}

#else

static int crc32c_level(void) { return 0; }

static uint32_t crc32c(int level, uint32_t crc, const uint8_t *data, size_t nbytes) {
    (void)level, (void)data, (void)nbytes;
    return crc;
}

#endif

#endif
