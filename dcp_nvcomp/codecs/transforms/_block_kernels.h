/* What the kernels of the codecs `planes` and `rowcol` have in common. */

#ifndef BLOCK_KERNELS_H
#define BLOCK_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The compiled kernels are for little-endian machines; those in numpy are used elsewhere."
#endif

/* Wider vectors where the processor has them: without, x86-64 means SSE2. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

enum { SEEN_POSITIVE = 1, SEEN_NEGATIVE = 2 };    /* signs */
enum { FLAG_PACKED_REST = 1, FLAG_NEGATIVE = 2 }; /* of a block in which only one was seen */

#endif
