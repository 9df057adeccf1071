// The XXH3 128-bit hash of pieces of memory, one warp for each piece; compiled and launched by hashing.py.
//
// As in xxHash's specification (https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md), for inputs of more than
// 240 bytes with the default secret and no seed. Within 1024 bytes the eight accumulators only add, in any order: so four
// lanes work on each, on 16 stripes of 64 bytes in four steps, and each step reads 256 bytes that lie together. Between
// two such runs the accumulators are scrambled.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

const u32 PRIME32_1 = 0x9E3779B1u;
const u64 PRIME64_1 = 0x9E3779B185EBCA87ull;
const u64 PRIME64_2 = 0xC2B2AE3D27D4EB4Full;
const u32 STRIPE_NBYTES = 64, STRIPES = 16, RUN_NBYTES = 1024;
const u32 SECRET_NBYTES = 192;
const u32 ALL_LANES = 0xFFFFFFFFu;

__device__ const u64 SECRET[24] = {
    0xBE4BA423396CFEB8ull, 0x1CAD21F72C81017Cull, 0xDB979083E96DD4DEull, 0x1F67B3B7A4A44072ull,
    0x78E5C0CC4EE679CBull, 0x2172FFCC7DD05A82ull, 0x8E2443F7744608B8ull, 0x4C263A81E69035E0ull,
    0xCB00C391BB52283Cull, 0xA32E531B8B65D088ull, 0x4EF90DA297486471ull, 0xD8ACDEA946EF1938ull,
    0x3F349CE33F76FAA8ull, 0x1D4F0BC7C7BBDCF9ull, 0x3159B4CD4BE0518Aull, 0x647378D9C97E9FC8ull,
    0xC3EBD33483ACC5EAull, 0xEB6313FAFFA081C5ull, 0x49DAF0B751DD0D17ull, 0x9E68D429265516D3ull,
    0xFCA1477D58BE162Bull, 0xCE31D07AD1B8F88Full, 0x280416958F3ACB45ull, 0x7E404BBBCAFBD7AFull,
};

__device__ const u64 INITIAL[8] = {
    0xC2B2AE3Dull, PRIME64_1, PRIME64_2, 0x165667B19E3779F9ull, 0x85EBCA77C2B2AE63ull, 0x85EBCA77ull,
    0x27D4EB2F165667C5ull, PRIME32_1,
};

__device__ u64 secret_at(u32 at) {
    u32 word = at / 8, bits = at % 8 * 8;
    return bits ? SECRET[word] >> bits | SECRET[word + 1] << (64 - bits) : SECRET[word];
}

// At any address.
__device__ u64 load_bytes(const u8 *at) {
    u64 value = 0;
    for (u32 i = 0; i < 8; ++i) value |= (u64)at[i] << 8 * i;
    return value;
}

// What a word adds to its own accumulator, without the word itself, which the neighbour gets.
__device__ u64 product_of(u64 word, u64 secret) {
    u64 key = word ^ secret;
    return (key & 0xFFFFFFFFu) * (key >> 32);
}

// The sum over the lanes that work on one accumulator; `words` are for the neighbour's.
__device__ u64 gathered(u64 products, u64 words) {
    u64 sum = products + __shfl_xor_sync(ALL_LANES, words, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 8);
    return sum + __shfl_xor_sync(ALL_LANES, sum, 16);
}

__device__ u64 folded_product(u64 a, u64 b) {
    u64 a_low = a & 0xFFFFFFFFu, a_high = a >> 32, b_low = b & 0xFFFFFFFFu, b_high = b >> 32;
    u64 middle = a_high * b_low + (a_low * b_low >> 32);
    u64 other = a_low * b_high + (middle & 0xFFFFFFFFu);
    return a * b ^ (a_high * b_high + (middle >> 32) + (other >> 32));
}

__device__ u64 merged(u64 accumulator, u32 lane, u32 secret, u64 start) {
    u64 mixed = accumulator ^ secret_at(secret + 8 * (lane % 8));
    u64 sum = folded_product(mixed, __shfl_xor_sync(ALL_LANES, mixed, 1));
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    sum += __shfl_xor_sync(ALL_LANES, sum, 4);
    u64 hash = start + sum;
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    return hash ^ hash >> 32;
}

// Hashes `nbytes` bytes from `data` on, a multiple of 8, in pieces of `piece_nbytes`, a multiple of 8, the last one of
// what is left; each has more than 240 bytes. digests[2 * piece] and the next are the low and the high half.
extern "C" __global__ void __launch_bounds__(THREADS) hash_pieces(
    const u8 *data, u64 nbytes, u64 piece_nbytes, u64 *digests) {
    const u64 piece = (u64)blockIdx.x * (THREADS / 32) + threadIdx.x / 32;
    if (piece * piece_nbytes >= nbytes) return;  // the whole warp
    const u32 lane = threadIdx.x % 32, own = lane % 8, group = lane / 8;
    const u8 *begin = data + piece * piece_nbytes;
    const u64 left = nbytes - piece * piece_nbytes;
    const u32 length = (u32)(left < piece_nbytes ? left : piece_nbytes);

    u64 accumulator = INITIAL[own];
    const u32 runs = (length - 1) / RUN_NBYTES;
    for (u32 run = 0; run < runs; ++run) {
        const u8 *at = begin + run * RUN_NBYTES + group * STRIPE_NBYTES + 8 * own;
        u64 products = 0, words = 0;
        for (u32 stripe = group; stripe < STRIPES; stripe += 4, at += 4 * STRIPE_NBYTES) {
            u64 word = *(const u64 *)at;
            products += product_of(word, SECRET[stripe + own]);
            words += word;
        }
        accumulator += gathered(products, words);
        accumulator = (accumulator ^ accumulator >> 47 ^ SECRET[16 + own]) * PRIME32_1;
    }
    const u8 *last_run = begin + runs * RUN_NBYTES;
    const u32 stripes = (length - 1 - runs * RUN_NBYTES) / STRIPE_NBYTES;
    u64 products = 0, words = 0;
    for (u32 stripe = group; stripe < stripes; stripe += 4) {
        u64 word = *(const u64 *)(last_run + stripe * STRIPE_NBYTES + 8 * own);
        products += product_of(word, SECRET[stripe + own]);
        words += word;
    }
    if (group == 0) {  // the last 64 bytes, wherever they begin
        u64 word = load_bytes(begin + length - STRIPE_NBYTES + 8 * own);
        products += product_of(word, secret_at(SECRET_NBYTES - STRIPE_NBYTES - 7 + 8 * own));
        words += word;
    }
    accumulator += gathered(products, words);
    const u64 low = merged(accumulator, lane, 11, length * PRIME64_1);
    const u64 high = merged(accumulator, lane, SECRET_NBYTES - STRIPE_NBYTES - 11, ~(length * PRIME64_2));
    if (lane == 0) {
        digests[2 * piece] = low;
        digests[2 * piece + 1] = high;
    }
}
