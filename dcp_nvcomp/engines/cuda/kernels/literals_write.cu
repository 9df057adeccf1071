// write_slices of literals_encode.cu.
//
// A warp codes 32 groups of 16 bytes at a time, from the end of its run. Each lane finds by a sum over the lanes the
// bit at which its codes begin, and merges them into words in shared memory, its stage. Full words then go to the
// frame, the last one stays.
//
// Words of the frame that hold the first or the last bit of a run may hold bits of another run or of the header, or
// reach beyond the frame: they are put together in shared memory, and written byte by byte at the end. Positions are in
// bits, counted from the frame's first.

const u32 STAGE_WORDS = (31 + WARP * GROUP * MAX_LENGTH + 1 + 31) / 32;

struct Target {
    u32 *words;        // the frame
    const u32 *run_at; // where each run begins, and where the last one ends
    u32 *edges;        // words that hold these bits; if several are in one word, it is that of the first of them

    __device__ u32 edge_of(u32 run) const {
        while (run > 0 && run_at[run - 1] / 32 == run_at[run] / 32) --run;
        return run;
    }
};

// The codes of a group, the last byte's first; 0 for bytes that are not members. Returns how many bits they take.
__device__ u32 look_up(const u32 *entries, const Words &words, u32 mask, u32 *codes) {
    u32 sum = 0; // of the entries: the codes themselves do not reach up to the lengths
#pragma unroll
    for (u32 i = 0; i < GROUP; ++i) {
        const u32 at = GROUP - 1 - i;
        codes[i] = mask >> at & 1 ? entries[byte_of(words, at)] : 0;
        sum += codes[i];
    }
    return sum >> 16;
}
static_assert(GROUP * ((1 << MAX_LENGTH) - 1) < 1 << 16, "the sum of all codes");

// Adds codes to the stage, whose words are zero where they go.
__device__ void merge_codes(u32 *stage, u32 bit, const u32 *codes) {
    u32 *word = stage + bit / 32, used = bit % 32;
    u64 bits = 0;
#pragma unroll
    for (u32 i = 0; i < GROUP; i += 2) {
        const u32 length = codes[i] >> 16, both = (codes[i] & 0xFFFF) | (codes[i + 1] & 0xFFFF) << length;
        bits |= (u64)both << used;
        used += length + (codes[i + 1] >> 16);
        if (used >= 32) {
            atomicOr(word++, (u32)bits);
            bits >>= 32;
            used -= 32;
        }
    }
    if (used) atomicOr(word, (u32)bits);
}

// Writes a warp's run. stage: all zeros.
__device__ void write_run(
    const Words *groups, Run run, u32 number, const u32 *entries, u32 *stage, const Target &target) {
    const u32 lane = lane_number();
    const bool ends_stream = number % 2;
    const u32 first_edge = target.run_at[number] / 32, last_edge = target.run_at[number + 1] / 32;
    auto put = [&](u32 at, u32 word) {
        if (at != first_edge && at != last_edge) target.words[at] = word;
        else atomicOr(&target.edges[target.edge_of(at == first_edge ? number : number + 1)], word);
    };
    const u32 lowest = run.begin / GROUP, end = run.end > run.begin ? (run.end + GROUP - 1) / GROUP : lowest;
    const u32 rounds = (end - lowest + WARP - 1) / WARP;
    auto load = [&](u32 round) {
        const u32 back = round * WARP + lane;
        return back < end - lowest ? groups[end - 1 - back] : Words{};
    };
    u32 at = first_edge, used = target.run_at[number] % 32;
    Words next = load(0);
    for (u32 round = 0; round < rounds || (round == 0 && ends_stream); ++round) {
        const Words words = next;
        next = load(round + 1); // under way while this one is coded
        const u32 back = round * WARP + lane;
        u32 codes[GROUP];
        const u32 nbits = look_up(entries, words, back < end - lowest ? members(end - 1 - back, run) : 0, codes);
        const u32 up_to = sum_up_to(nbits), total = __shfl_sync(ALL_LANES, up_to, WARP - 1);
        merge_codes(stage, used + up_to - nbits, codes);
        used += total;
        if (ends_stream && round + 1 >= rounds) {
            if (lane == 0) atomicOr(&stage[used / 32], 1u << used % 32);
            ++used;
        }
        __syncwarp();
        const u32 full = used / 32, rest = stage[full];
        __syncwarp();
        for (u32 i = lane; i <= full; i += WARP) {
            if (i < full) put(at + i, stage[i]);
            stage[i] = i > 0 ? 0 : rest;
        }
        __syncwarp();
        at += full;
        used %= 32;
    }
    if (lane == 0 && used) put(at, stage[0]);
}

// Writes zeros from a frame's end up to the next multiple of ALIGNMENT_NBYTES: bytes that reach a file are never left to
// chance.
__device__ void write_padding(u8 *frame, u32 nbytes) {
    const u32 at = nbytes + threadIdx.x, padded = (nbytes + ALIGNMENT_NBYTES - 1) / ALIGNMENT_NBYTES * ALIGNMENT_NBYTES;
    if (at < padded) frame[at] = 0;
}

// Where a frame goes.
struct TargetRow {
    u64 address; // a multiple of ALIGNMENT_NBYTES
    u64 nbytes;  // its room, but for the padding
};

// Writes each frame to its place; nothing for a slice without one, and nothing where the room is another than was
// measured: the host was told a wrong length then, and what lies beside may be another's, training's too.
extern "C" __global__ void __launch_bounds__(THREADS) write_slices(
    const SliceRow *rows, const Plan *plans, const TargetRow *frames) {
    __shared__ u32 entries[SYMBOLS], stages[WARPS][STAGE_WORDS], run_at[RUNS + 1], edges[RUNS + 1];
    const Plan &plan = plans[blockIdx.x];
    if (plan.kind == STORED) return;
    if (frames[blockIdx.x].nbytes != (plan.kind == REPEATED ? plan.header_nbytes : plan.run_at[RUNS] / 8 + 1)) return;
    const SliceRow row = rows[blockIdx.x];
    u8 *frame = (u8 *)frames[blockIdx.x].address;
    if (threadIdx.x < plan.header_nbytes) frame[threadIdx.x] = plan.header[threadIdx.x];
    if (plan.kind == REPEATED) {
        write_padding(frame, plan.header_nbytes);
        return;
    }

    entries[threadIdx.x] = plan.entries[threadIdx.x];
    for (u32 i = threadIdx.x; i < WARPS * STAGE_WORDS; i += THREADS) (&stages[0][0])[i] = 0;
    if (threadIdx.x <= RUNS) {
        edges[threadIdx.x] = 0;
        run_at[threadIdx.x] = plan.run_at[threadIdx.x];
    }
    __syncthreads();
    const Target target = {(u32 *)frame, run_at, edges};
    const u32 number = warp_number();
    write_run((const Words *)row.data, run_of(number, (u32)row.nbytes), number, entries, stages[number], target);
    __syncthreads();
    const u32 end = run_at[RUNS] / 8;
    if (threadIdx.x <= RUNS && target.edge_of(threadIdx.x) == threadIdx.x) {
        const u32 at = run_at[threadIdx.x] / 32 * 4;
        for (u32 i = 0; i < 4; ++i)
            if (at + i >= run_at[0] / 8 && at + i < end) frame[at + i] = (u8)(edges[threadIdx.x] >> 8 * i);
    }
    if (threadIdx.x == 0) frame[end] = 0; // no sequences
    write_padding(frame, end + 1);
}
