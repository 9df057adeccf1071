/* Numbers of Zstandard's format (RFC 8878) that both the encoder and the decoder of literals need. */

#ifndef LITERALS_FRAME_H
#define LITERALS_FRAME_H

#include <stdint.h>

#define FRAME_MAGIC 0xFD2FB528u

enum {
    MAX_BLOCK_NBYTES = 128 << 10,
    STREAMS = 4,
    FRAME_HEADER_NBYTES = 4 + 1 + 4,
    FRAME_DESCRIPTOR = 2 << 6 | 1 << 5, /* a single segment: the window is the content, whose size has 4 bytes */
    BLOCK_HEADER_NBYTES = 3,
    LITERALS_HEADER_NBYTES = 5,
    LITERALS_KIND = 2 | 3 << 2, /* with codes of their own, in four streams, and sizes of 18 bits */
    JUMP_TABLE_NBYTES = 6,
    RAW_BLOCK = 0,
    RUN_BLOCK = 1,
    CODED_BLOCK = 2,
};

/* So that what is constant in a call is constant in its copy. */
#ifdef __GNUC__
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#else
#define ALWAYS_INLINE static inline
#endif

/* The first three streams are equally long. */
static inline size_t stream_length(size_t nbytes, int stream) {
    size_t quarter = (nbytes + 3) / 4;
    return stream < 3 ? quarter : nbytes - 3 * quarter;
}

#endif
