// The list of weights of a frame's codes, which literals_measure.cu writes: plain or compressed.
//
// Weights at even places are coded by one chain of states, those at odd places by another; both write to the same bits,
// the last weight first. The chains are a lane's work each, as every step needs the one before; the rest is the warp's.

struct FseCoder {
    u32 counts[WEIGHTS];
    u32 shares[WEIGHTS];     // of the states
    u32 first_at[WEIGHTS];   // where in `states` those of a weight begin
    u8 weight_of[FSE_STATES];
    u8 states[FSE_STATES];   // ascending for each weight
    u8 values[SYMBOLS], widths[SYMBOLS]; // the bits that each weight adds
    u32 bits[(SYMBOLS + 2) * FSE_LOG / 32 + 2];
};

// Bytes from bits, the lowest first. What does not fit is counted, but not written.
struct BitWriter {
    u8 *out;
    u32 room, nbytes, held, bits;
    __device__ void put(u32 value, u32 width) {
        bits |= value << held;
        for (held += width; held >= 8; held -= 8, bits >>= 8) put_byte();
    }
    __device__ void finish() {
        if (held) put_byte();
    }
    __device__ void put_byte() {
        if (nbytes < room) out[nbytes] = (u8)bits;
        ++nbytes;
    }
};

// The table's description: RFC 8878, 4.1.1. A share is written in as few bits as the states that are left allow.
__device__ u32 put_shares(u8 *out, u32 room, const u32 *shares) {
    BitWriter writer = {out, room, 0, 0, 0};
    writer.put(FSE_LOG - 5, 4);
    u32 left = FSE_STATES;
    for (u32 weight = 0; left > 0;) {
        const u32 share = shares[weight++];
        const u32 width = highest_bit(left + 1) + 1;          // values are 0 to left + 1, as -1 is a share too
        const u32 unused = low_bits(width) - (left + 1);      // so many of them get along with one bit less
        const u32 value = share + 1;
        if (value < unused) writer.put(value, width - 1);
        else writer.put(value < 1u << (width - 1) ? value : value + unused, width);
        left -= share;
        if (share == 0) { // then follows how many more are zero: 3 for each three of them, then what is left
            u32 zeros = 0;
            while (shares[weight] == 0) ++weight, ++zeros;
            for (; zeros >= 3; zeros -= 3) writer.put(3, 2);
            writer.put(zeros, 2);
        }
    }
    writer.finish();
    return writer.nbytes;
}

// Gives each weight its share of the states, and the states their places. False if all weights are equal, which FSE
// can't tell. By one warp.
__device__ bool share_states(const u8 *weights, u32 count, FseCoder &coder) {
    const u32 lane = lane_number();
    if (lane < WEIGHTS) coder.counts[lane] = 0;
    __syncwarp();
    for (u32 i = lane; i < count; i += WARP) atomicAdd(&coder.counts[weights[i]], 1u);
    __syncwarp();
    const u32 own = lane < WEIGHTS ? coder.counts[lane] : 0;
    u32 commonest = 0;
    for (u32 weight = 1; weight < WEIGHTS; ++weight)
        if (coder.counts[weight] > coder.counts[commonest]) commonest = weight;
    if (coder.counts[commonest] == count) return false;
    u32 share = own * FSE_STATES / count;
    if (own && !share) share = 1;
    const u32 given = sum_of_warp(share);
    if (lane == commonest) share += FSE_STATES - given; // or takes some back, as rounding up may have given too many
    const u32 first_at = sum_up_to(share) - share;
    if (lane < WEIGHTS) {
        coder.shares[lane] = share;
        coder.first_at[lane] = first_at;
    }
    __syncwarp();
    for (u32 i = lane; i < FSE_STATES; i += WARP) {
        u32 weight = 0;
        while (i >= coder.first_at[weight] + coder.shares[weight]) ++weight;
        coder.weight_of[i * fse_step(FSE_STATES) % FSE_STATES] = (u8)weight;
    }
    __syncwarp();
    for (u32 state = lane; state < FSE_STATES; state += WARP) {
        const u32 weight = coder.weight_of[state];
        u32 before = 0;
        for (u32 i = 0; i < state; ++i) before += coder.weight_of[i] == weight;
        coder.states[coder.first_at[weight] + before] = (u8)state;
    }
    __syncwarp();
    return true;
}

// One chain: what each second weight, from `last` down, adds to the bits. Returns the state in which it ends.
__device__ u32 code_chain(const u8 *weights, u32 last, FseCoder &coder) {
    // No weight is coded before the last: any of its states will do. The first of them takes bits from a decoder when
    // it moves on, and there are none left: so it notices the end.
    u32 state = FSE_STATES + coder.states[coder.first_at[weights[last]]];
    coder.widths[last] = 0;
    for (u32 i = last; i >= 2;) {
        i -= 2;
        const u32 weight = weights[i], share = coder.shares[weight];
        u32 width = FSE_LOG - highest_bit(share); // so that the state without these bits is from `share` to 2 * share
        if (state >> width < share) --width;
        coder.values[i] = (u8)(state & low_bits(width));
        coder.widths[i] = (u8)width;
        state = FSE_STATES + coder.states[coder.first_at[weight] + (state >> width) - share];
    }
    return state - FSE_STATES;
}

__device__ void or_bits(u32 *words, u32 at, u32 value, u32 width) {
    if (width == 0) return;
    atomicOr(&words[at / 32], value << at % 32);
    if (at % 32 + width > 32) atomicOr(&words[at / 32 + 1], value >> (32 - at % 32));
}

// Weights compressed into at most `room` bytes: how many, or 0 if that can't be. By one warp; count: at least 2.
__device__ u32 compress_weights(u8 *out, u32 room, const u8 *weights, u32 count, FseCoder &coder) {
    const u32 lane = lane_number();
    for (u32 i = lane; i < sizeof coder.bits / sizeof *coder.bits; i += WARP) coder.bits[i] = 0;
    if (!share_states(weights, count, coder)) return 0;
    u32 state = 0, header_nbytes = 0;
    if (lane < 2) state = code_chain(weights, count - 1 - (count - 1 - lane) % 2, coder);
    else if (lane == 2) header_nbytes = put_shares(out, room, coder.shares);
    __syncwarp();
    header_nbytes = __shfl_sync(ALL_LANES, header_nbytes, 2);
    const u32 even = __shfl_sync(ALL_LANES, state, 0), odd = __shfl_sync(ALL_LANES, state, 1);
    u32 nbits = 0;
    for (u32 done = 0; done < count; done += WARP) { // the last weight comes first
        const bool has_weight = done + lane < count;
        const u32 i = has_weight ? count - 1 - done - lane : 0;
        const u32 width = has_weight ? coder.widths[i] : 0, up_to = sum_up_to(width);
        or_bits(coder.bits, nbits + up_to - width, coder.values[i], width);
        nbits += __shfl_sync(ALL_LANES, up_to, WARP - 1);
    }
    // a decoder begins here: the end mark, the state of the even weights, that of the odd ones
    if (lane == 0) or_bits(coder.bits, nbits, odd | even << FSE_LOG | 1u << 2 * FSE_LOG, 2 * FSE_LOG + 1);
    __syncwarp();
    const u32 bits_nbytes = (nbits + 2 * FSE_LOG + 1 + 7) / 8;
    if (header_nbytes + bits_nbytes > room) return 0;
    for (u32 i = lane; i < bits_nbytes; i += WARP) out[header_nbytes + i] = (u8)(coder.bits[i / 4] >> i % 4 * 8);
    return header_nbytes + bits_nbytes;
}

// The weights of all symbols before `last`, in the shorter form: how many bytes, or 0 if neither is possible. By one
// warp.
__device__ u32 write_weights(u8 *out, const u8 *weights, u32 last, FseCoder &coder) {
    const u32 listed = last <= MAX_LISTED ? 1 + (last + 1) / 2 : 0;
    const u32 room = listed ? listed - 1 : MAX_WEIGHTS_NBYTES;
    u32 compressed = last >= 2 && room > 1 ? compress_weights(out + 1, room - 1, weights, last, coder) : 0;
    if (compressed) {
        if (lane_number() == 0) out[0] = (u8)compressed;
        return 1 + compressed;
    }
    if (listed) {
        if (lane_number() == 0) out[0] = (u8)(127 + last);
        for (u32 i = lane_number(); i < listed - 1; i += WARP) // beyond the last one there is a zero
            out[1 + i] = (u8)(weights[2 * i] << 4 | (2 * i + 1 < last ? weights[2 * i + 1] : 0));
    }
    return listed;
}
