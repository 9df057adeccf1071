// Encoding. Each slice becomes a frame of one block, if that is shorter; two launches:
//
//   measure_slices   counts each slice's bytes, makes its codes and the frame's header: so the frame's length is known
//   write_slices     reads the slices again, and writes each frame to where it belongs in the file's bytes; the host,
//                    which needs the lengths for the file's tables anyway, says where
//
// One thread block works on one slice, and each warp on an eighth of it, a run: half of a stream. As it counts its run,
// the bit at which each run begins is known, so that the warps of write_slices need not wait for each other. In memory,
// a stream's later half comes first; runs are numbered as they lie in memory.
//
// Slices must not change between the launches: codes are exact, and frames lie close together.

static_assert(THREADS == SYMBOLS, "a thread for each symbol");

struct SliceRow {
    u64 data;   // address, a multiple of 16; readable up to the next multiple of 16 after its end
    u64 nbytes; // 1 to MAX_BLOCK_NBYTES
};

const u32 RUNS = WARPS;
static_assert(RUNS == 8, "two runs for each of four streams");

const u32 LITERALS_HEADER_NBYTES = 5; // with sizes of 18 bits
const u32 WEIGHTS_AT = FRAME_HEADER_NBYTES + BLOCK_HEADER_NBYTES + LITERALS_HEADER_NBYTES;
const u32 MAX_WEIGHTS_NBYTES = 1 + 127; // where they are compressed; listed, they take half of that
const u32 MAX_HEADER_NBYTES = WEIGHTS_AT + MAX_WEIGHTS_NBYTES + JUMP_TABLE_NBYTES;

const u32 STORED = 0, REPEATED = 1, CODED = 2; // STORED: a frame would not be shorter than the slice, so there is none

// What measure_slices finds out for write_slices.
struct Plan {
    u32 kind;
    u32 header_nbytes;
    u32 run_at[RUNS + 1];   // the bit of the frame at which each run begins, and where the last stream ends
    u32 entries[SYMBOLS];   // the code of each symbol, and its length times 2^16
    u8 header[MAX_HEADER_NBYTES];
};
static_assert(sizeof(Plan) == PLAN_NBYTES, "literals.py makes room for it");

// ---- runs -----------------------------------------------------------------------------------------------------------

struct Run { u32 begin, end; };

const u32 GROUP = 16; // bytes that a lane takes at once

// The halves of a quarter meet at a multiple of GROUP; quarters begin and end where the format wants them.
__device__ Run run_of(u32 number, u32 nbytes) {
    const u32 quarter = (nbytes + 3) / 4;
    const u32 begin = smaller(number / 2 * quarter, nbytes), end = smaller(begin + quarter, nbytes);
    u32 middle = (begin + end) / 2 / GROUP * GROUP;
    if (middle < begin) middle = begin;
    return number % 2 ? Run{begin, middle} : Run{middle, end};
}

// Which bytes of a group belong to a run, a bit for each.
__device__ u32 members(u32 group, Run run) {
    const u32 first = group * GROUP, after = first + GROUP;
    u32 mask = low_bits(GROUP);
    if (first < run.begin) mask &= low_bits(GROUP) << smaller(run.begin - first, GROUP);
    if (after > run.end) mask &= low_bits(GROUP) >> smaller(after - run.end, GROUP);
    return mask;
}

__device__ u32 byte_of(const Words &words, u32 at) { return words.word[at / 4] >> at % 4 * 8 & 0xFF; }
