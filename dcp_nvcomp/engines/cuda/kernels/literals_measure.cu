// measure_slices of literals_encode.cu.

// ---- counting -------------------------------------------------------------------------------------------------------
//
// Each warp has counters of its own, and four for each symbol, which its lanes use in turns: the same few symbols come
// again and again, and lanes that add to the same counter wait for each other.

const u32 COPIES = 4;

struct alignas(16) Counter { u32 copy[COPIES]; };

__device__ void count_run(const Words *groups, Run run, Counter *counters) {
    const u32 copy = lane_number() % COPIES;
    for (u32 group = run.begin / GROUP + lane_number(); group * GROUP < run.end; group += WARP) {
        const Words words = groups[group];
        const u32 mask = members(group, run);
        if (mask == low_bits(GROUP)) {
#pragma unroll
            for (u32 i = 0; i < GROUP; ++i) atomicAdd(&counters[byte_of(words, i)].copy[copy], 1u);
        } else {
            for (u32 i = 0; i < GROUP; ++i)
                if (mask >> i & 1) atomicAdd(&counters[byte_of(words, i)].copy[copy], 1u);
        }
    }
}

// How many symbols below this thread's occur. total: for all threads, how many occur at all. By all threads.
__device__ u32 number_before(bool occurs, u32 *of_warp, u32 &total) {
    const u32 ballot = __ballot_sync(ALL_LANES, occurs);
    if (lane_number() == 0) of_warp[warp_number()] = __popc(ballot);
    __syncthreads();
    u32 before = __popc(ballot & low_bits(lane_number()));
    total = 0;
    for (u32 warp = 0; warp < WARPS; ++warp) {
        if (warp < warp_number()) before += of_warp[warp];
        total += of_warp[warp];
    }
    return before;
}

// ---- lengths of codes -----------------------------------------------------------------------------------------------
//
// Package-merge finds the best lengths under a limit. The first list is the symbols, the rarest first. Ten more lists
// follow: neighbours of the list before are paired, and the pairs merged with the symbols, by weight. Of the last list
// the first 2n - 2 items are taken; a pair that is taken takes its two items in the list before. A symbol's code is as
// long as the number of lists in which it is taken.
//
// A thread has the symbol of its rank and the pair of its number, and finds their places in the merged list with a
// binary search each. As it keeps the places of its symbol, the way back needs no list: only how many symbols each list
// takes.

// How many of the first `count` ascending numbers are less than `limit`.
__device__ u32 count_less(const u32 *numbers, u32 count, u32 limit) {
    u32 begin = 0;
    while (count > 0) {
        const u32 half = count / 2;
        const bool is_less = numbers[begin + half] < limit;
        begin += is_less ? half + 1 : 0;
        count = is_less ? count - half - 1 : half;
    }
    return begin;
}

struct Lists {
    u32 leaves[SYMBOLS]; // how often each symbol occurs, ascending
    u32 merged[2 * SYMBOLS];
    u32 pairs[SYMBOLS];
};

// The length of the code of the symbol whose rank is the thread's number; by all threads, at least 2 symbols.
__device__ u32 find_length(u32 symbols, Lists &lists) {
    const u32 rank = threadIdx.x;
    const bool has_leaf = rank < symbols;
    const u32 leaf = has_leaf ? lists.leaves[rank] : 0;
    u32 place[MAX_LENGTH]; // of the leaf, in each list
    place[0] = rank;
    if (has_leaf) lists.merged[rank] = leaf;
    u32 items = symbols;
    __syncthreads();
#pragma unroll
    for (u32 level = 1; level < MAX_LENGTH; ++level) {
        const u32 pairs = items / 2;
        const bool has_pair = rank < pairs;
        const u32 pair = has_pair ? lists.merged[2 * rank] + lists.merged[2 * rank + 1] : 0;
        if (has_pair) lists.pairs[rank] = pair;
        __syncthreads();
        place[level] = rank + count_less(lists.pairs, pairs, leaf); // equal ones: leaves come first
        if (has_leaf) lists.merged[place[level]] = leaf;
        if (has_pair) lists.merged[rank + count_less(lists.leaves, symbols, pair + 1)] = pair;
        items = symbols + pairs;
        __syncthreads();
    }
    u32 taken = 2 * symbols - 2, length = 0;
#pragma unroll
    for (u32 level = MAX_LENGTH; level-- > 0;) {
        const bool is_taken = has_leaf && place[level] < taken;
        length += is_taken;
        taken = 2 * (taken - (u32)__syncthreads_count(is_taken));
    }
    return length;
}

// The code of the symbol whose number is the thread's; by all threads.
__device__ u32 find_code(u32 length, u32 longest, u32 (*of_length)[MAX_LENGTH + 1]) {
    u32 before = 0;
    for (u32 i = 1; i <= MAX_LENGTH; ++i) {
        const u32 equal = __ballot_sync(ALL_LANES, length == i);
        if (length == i) before = __popc(equal & low_bits(lane_number()));
        if (lane_number() == 0) of_length[warp_number()][i] = __popc(equal);
    }
    __syncthreads();
    if (length == 0) return 0;
    u32 code = 0;
    for (u32 i = longest; i > length; --i) {
        for (u32 warp = 0; warp < WARPS; ++warp) code += of_length[warp][i];
        code /= 2;
    }
    for (u32 warp = 0; warp < warp_number(); ++warp) before += of_length[warp][length];
    return code + before;
}

// ---- measuring ------------------------------------------------------------------------------------------------------

__device__ void put_number(u8 *out, u64 value, u32 nbytes) {
    for (u32 i = 0; i < nbytes; ++i) out[i] = (u8)(value >> 8 * i);
}

__device__ void put_headers(u8 *out, u32 content_nbytes, u32 block_kind, u32 block_nbytes) {
    put_number(out, MAGIC, 4);
    out[4] = DESCRIPTOR;
    put_number(out + 5, content_nbytes, 4);
    put_number(out + FRAME_HEADER_NBYTES, 1 | block_kind << 1 | block_nbytes << 3, BLOCK_HEADER_NBYTES);
}

// Completes the plan of a slice with codes, of which the weights are there already; returns how long its frame is.
// run_bits: how many bits each run takes.
__device__ u32 plan_coded(Plan &plan, u32 nbytes, u32 weights_nbytes, const u32 *run_bits) {
    const u32 header_nbytes = WEIGHTS_AT + weights_nbytes + JUMP_TABLE_NBYTES;
    u32 stream_at = header_nbytes;
    for (u32 i = 0; i < 4; ++i) {
        const u32 stream_nbytes = (run_bits[2 * i] + run_bits[2 * i + 1]) / 8 + 1; // one more bit marks the end
        plan.run_at[2 * i] = 8 * stream_at;
        plan.run_at[2 * i + 1] = 8 * stream_at + run_bits[2 * i];
        if (i < 3) put_number(plan.header + header_nbytes - JUMP_TABLE_NBYTES + 2 * i, stream_nbytes, 2);
        stream_at += stream_nbytes;
    }
    plan.run_at[RUNS] = 8 * stream_at;
    const u32 coded_nbytes = stream_at - WEIGHTS_AT, block_nbytes = LITERALS_HEADER_NBYTES + coded_nbytes + 1;
    put_headers(plan.header, nbytes, COMPRESSED_BLOCK, block_nbytes);
    put_number(plan.header + FRAME_HEADER_NBYTES + BLOCK_HEADER_NBYTES,
               HUFFMAN_LITERALS | 3 << 2 | (u64)nbytes << 4 | (u64)coded_nbytes << 22, LITERALS_HEADER_NBYTES);
    plan.kind = CODED;
    plan.header_nbytes = header_nbytes;
    return FRAME_HEADER_NBYTES + BLOCK_HEADER_NBYTES + block_nbytes;
}

__device__ u32 plan_repeated(Plan &plan, u32 nbytes, u32 symbol) {
    put_headers(plan.header, nbytes, REPEATED_BLOCK, nbytes);
    plan.header[FRAME_HEADER_NBYTES + BLOCK_HEADER_NBYTES] = (u8)symbol;
    plan.kind = REPEATED;
    return plan.header_nbytes = FRAME_HEADER_NBYTES + BLOCK_HEADER_NBYTES + 1;
}

// Makes the plan of each slice. frame_nbytes: how long each frame is; the slice's own length if there is none.
extern "C" __global__ void __launch_bounds__(THREADS) measure_slices(
    const SliceRow *rows, Plan *plans, u32 *frame_nbytes) {
    __shared__ Counter counters[RUNS][SYMBOLS];
    __shared__ Lists lists;
    __shared__ FseCoder coder;
    __shared__ u32 keys[SYMBOLS], of_warp[WARPS], of_length[WARPS][MAX_LENGTH + 1], run_bits[RUNS];
    __shared__ u32 last, longest, weights_nbytes;
    __shared__ u8 lengths[SYMBOLS], weights[SYMBOLS];

    const u32 symbol = threadIdx.x;
    const SliceRow row = rows[blockIdx.x];
    const u32 nbytes = (u32)row.nbytes;
    Plan &plan = plans[blockIdx.x];
    for (u32 i = 0; i < RUNS; ++i) counters[i][symbol] = Counter{};
    __syncthreads();
    count_run((const Words *)row.data, run_of(warp_number(), nbytes), counters[warp_number()]);
    __syncthreads();

    u32 count = 0, symbols;
    for (u32 i = 0; i < RUNS; ++i)
        for (u32 copy = 0; copy < COPIES; ++copy) count += counters[i][symbol].copy[copy];
    const u32 at = number_before(count > 0, of_warp, symbols);
    if (count) keys[at] = count << 8 | symbol; // all different, so that their order is a ranking
    if (count && at == symbols - 1) last = symbol;
    lengths[symbol] = 0;
    __syncthreads();

    u32 own_nbytes = nbytes;
    if (symbols > 1) {
        const bool has_rank = threadIdx.x < symbols;
        const u32 key = has_rank ? keys[threadIdx.x] : 0;
        u32 rank = 0;
        for (u32 i = 0; i < symbols; ++i) rank += keys[i] < key;
        if (has_rank) {
            lists.leaves[rank] = key >> 8;
            lists.pairs[rank] = key & 0xFF; // the symbols by rank, until there are pairs
        }
        __syncthreads();
        const u32 ranked = has_rank ? lists.pairs[threadIdx.x] : 0;
        const u32 found = find_length(symbols, lists);
        if (has_rank) lengths[ranked] = (u8)found;
        if (threadIdx.x == 0) longest = found; // the rarest symbol's
        __syncthreads();
        const u32 length = lengths[symbol];
        weights[symbol] = (u8)(length ? longest + 1 - length : 0);
        plan.entries[symbol] = find_code(length, longest, of_length) | length << 16;
        u32 bits = 0;
        for (u32 i = lane_number(); i < SYMBOLS; i += WARP)
            for (u32 copy = 0; copy < COPIES; ++copy) bits += counters[warp_number()][i].copy[copy] * lengths[i];
        bits = sum_of_warp(bits);
        if (lane_number() == 0) run_bits[warp_number()] = bits;
        if (warp_number() == 0) { // find_code had all threads meet, so the weights are there
            const u32 written = write_weights(plan.header + WEIGHTS_AT, weights, last, coder);
            if (lane_number() == 0) weights_nbytes = written;
        }
        __syncthreads();
        if (threadIdx.x == 0 && weights_nbytes) own_nbytes = plan_coded(plan, nbytes, weights_nbytes, run_bits);
    } else if (threadIdx.x == 0) {
        own_nbytes = plan_repeated(plan, nbytes, last);
    }
    if (threadIdx.x == 0) {
        if (own_nbytes >= nbytes) plan.kind = STORED;
        frame_nbytes[blockIdx.x] = smaller(own_nbytes, nbytes);
    }
}
