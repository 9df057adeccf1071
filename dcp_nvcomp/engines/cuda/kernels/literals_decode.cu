// decode_slices; literals_parse.cu begins with how it works.

// ---- table ----------------------------------------------------------------------------------------------------------

const u32 LENGTH_AT = 24, COUNT_AT = 28; // in an entry

// Fills the table from the weights, by one warp: first with one symbol for each entry, then with those that follow.
__device__ void make_table(Decoder &decoder) {
    const u32 lane = lane_number(), longest = decoder.longest;
    u32 of_weight = 0; // in lane w: how many symbols have the weight w
    for (u32 first = 0; first < SYMBOLS; first += WARP) {
        const u32 weight = decoder.weights[first + lane];
        for (u32 i = 1; i <= MAX_LENGTH; ++i) {
            const u32 equal = __ballot_sync(ALL_LANES, weight == i);
            if (lane == i) of_weight += __popc(equal);
        }
    }
    const u32 room = lane > 0 && lane <= MAX_LENGTH ? of_weight << (lane - 1) : 0;
    // in lane w: the next code of weight w, filled up with zeros to the length of the longest
    u32 code = sum_up_to(room) - room;
    for (u32 symbol = 0; symbol < SYMBOLS; ++symbol) {
        const u32 weight = decoder.weights[symbol];
        if (weight == 0) continue;
        const u32 own = __shfl_sync(ALL_LANES, code, weight);
        if (lane == weight) code += 1u << (weight - 1);
        const u32 length = longest + 1 - weight;
        if (length <= TABLE_LOG) {
            const u32 first = longest > TABLE_LOG ? own >> 1 : own << (TABLE_LOG - longest);
            for (u32 i = lane; i < 1u << (TABLE_LOG - length); i += WARP)
                decoder.table[first + i] = symbol | length << LENGTH_AT | 1u << COUNT_AT;
        } else if (lane == 0) { // two of them share an entry
            if (own % 2 == 0) decoder.table[own / 2] = symbol;
            else decoder.table[own / 2] |= symbol << 8;
        }
    }
    __syncwarp();
    for (u32 index = lane; index < TABLE_ENTRIES; index += WARP) {
        u32 entry = decoder.table[index], length = entry >> LENGTH_AT & 15;
        for (u32 count = 1; count < 3 && entry >> COUNT_AT == count; ++count) {
            // an entry that has more symbols by now has the same first one
            const u32 next = decoder.table[index << length & low_bits(TABLE_LOG)];
            const u32 symbol = next & 0xFF, more = longest + 1 - decoder.weights[symbol];
            if (next >> COUNT_AT == 0 || length + more > TABLE_LOG) break;
            length += more;
            entry = (entry & low_bits(LENGTH_AT)) | symbol << 8 * count | length << LENGTH_AT | (count + 1) << COUNT_AT;
        }
        __syncwarp();
        decoder.table[index] = entry;
        __syncwarp();
    }
}

// ---- streams --------------------------------------------------------------------------------------------------------
//
// A lane decodes a stream, which takes as many steps as it has codes, each of which needs the one before. What a step
// takes is what decoding takes, so it touches nothing but registers and shared memory: all lanes of the warp bring words
// of the streams there, FETCHED of each at a time, while those that came before are decoded, and take what was decoded
// to the slice. (With a lane that reads its own words a step takes as long as a read: when one lane waits, all do.)

const u32 ROUND_STEPS = 64 / MAX_LENGTH, ROUND_SYMBOLS = 3 * ROUND_STEPS; // what 64 bits are enough for
static_assert(DECODED_NBYTES % 16 == 0 && DECODED_NBYTES >= 16 + 32 * FETCHED + 64 + ROUND_SYMBOLS + 2,
              "what was left, and the symbols of one bit each of a turn, of which a step writes two more");

// What a table tells from the next bits: symbols, how many, and the length of their codes.
struct Step { u32 symbols, count, length; };

// bits: the next ones, from the highest of the 64.
__device__ Step next_step(const Decoder &decoder, u64 bits) {
    const u32 entry = decoder.table[bits >> (64 - TABLE_LOG)];
    const Step found = {entry & low_bits(LENGTH_AT), entry >> COUNT_AT, entry >> LENGTH_AT & 15};
    if (found.count) return found;
    return {found.symbols >> 8 * (bits >> (64 - MAX_LENGTH) & 1) & 0xFF, 1, MAX_LENGTH};
}

// One stream while it is decoded, the last bits first. Positions of bits count from the multiple of 4 at or before the
// frame; a stream that is corrupt may reach beyond it, where zeros are read.
struct Stream {
    const u32 *words;
    int at;           // all bits from here on are read
    u32 left;         // how many symbols are to come
    u8 *decoded;      // those that are not in the slice yet
    u32 filled;       // how many
    u32 skipped;      // the first ones that are not this stream's
    u64 out;          // where they go, a multiple of 16

    __device__ u32 word(int number) const { return number >= 0 ? words[number] : 0; }

    // 64 bits, of which the highest comes next, from words of the numbers at / 32 - 2 to at / 32.
    __device__ u64 joined(u32 low, u32 middle, u32 high) const {
        const u32 shift = at & 31;
        return ((u64)middle << 32 | low) >> shift | (u64)high << 32 << (32 - shift);
    }
    __device__ int lowest() const { return (at - 64) >> 5; } // word of those 64 bits

    // Writes three symbols, of which those that are too many are written over.
    __device__ void put(const Step &step) {
        u8 *to = decoded + filled;
        to[0] = (u8)step.symbols;
        to[1] = (u8)(step.symbols >> 8);
        to[2] = (u8)(step.symbols >> 16);
        filled += step.count;
        left -= step.count;
        at -= (int)step.length;
    }

    // As many steps as there are words from `floor` on, and symbols for whole rounds.
    __device__ void run(const Decoder &decoder, const u32 *kept, int floor) {
        while (left >= ROUND_SYMBOLS && lowest() >= floor) {
            const int low = lowest();
            u64 bits = joined(kept[low & (KEPT - 1)], kept[(low + 1) & (KEPT - 1)], kept[(low + 2) & (KEPT - 1)]);
            for (u32 i = 0; i < ROUND_STEPS; ++i) {
                const Step step = next_step(decoder, bits);
                put(step);
                bits <<= step.length;
            }
        }
    }

    // The symbols that are left, some for which it is not worth while to fetch words ahead.
    __device__ void finish(const Decoder &decoder) {
        while (left > 0) {
            const int low = lowest();
            Step step = next_step(decoder, joined(word(low), word(low + 1), word(low + 2)));
            if (step.count > left) { // what follows the last symbol is not this stream's
                step.count = left;
                step.length = 0;
                for (u32 i = 0; i < left; ++i)
                    step.length += decoder.longest + 1 - decoder.weights[step.symbols >> 8 * i & 0xFF];
            }
            put(step);
        }
    }
};

// Takes what streams decoded to the slice, whole words of 16 bytes, at the end all. By one warp.
__device__ void take_out(Decoder &decoder, Stream &stream, bool is_end) {
    const u32 lane = lane_number();
    __syncwarp();
    for (u32 i = 0; i < STREAMS; ++i) {
        const u32 filled = __shfl_sync(ALL_LANES, stream.filled, i), skipped = __shfl_sync(ALL_LANES, stream.skipped, i);
        u8 *decoded = decoder.decoded[i], *out = (u8 *)__shfl_sync(ALL_LANES, stream.out, i);
        const u32 words = filled / 16, rest = filled % 16;
        const u32 begin = skipped && words ? 1 : 0; // the first word is not all its own
        for (u32 at = begin + lane; at < words; at += WARP) ((Words *)out)[at] = ((const Words *)decoded)[at];
        if (begin && lane >= skipped && lane < 16) out[lane] = decoded[lane];
        const u8 byte = decoded[16 * words + lane % 16];
        if (is_end && lane < rest && (words || lane >= skipped)) out[16 * words + lane] = byte;
        __syncwarp();
        if (lane < rest) decoded[lane] = byte; // to the beginning
    }
    stream.out += stream.filled / 16 * 16;
    if (stream.filled >= 16) stream.skipped = 0;
    stream.filled %= 16;
}

// Decodes the streams of a block; false if one of them does not end where it should. By one warp.
__device__ bool decode_streams(Decoder &decoder, const FrameRow &row) {
    const u32 lane = lane_number(), own = lane % STREAMS;
    const u8 *frame = (const u8 *)row.frame;
    const u32 before = (u32)(row.frame % 4), quarter = (decoder.block_nbytes + 3) / 4;
    const u32 begin = decoder.stream_at[own], end = decoder.stream_at[own + 1];
    const u8 last = frame[end - 1]; // its highest bit marks the stream's end
    const u64 out = row.data + decoder.block_at + own * quarter;
    const bool is_lane_of_stream = lane < STREAMS, is_marked = last != 0;
    Stream stream = {(const u32 *)(frame - before), (int)(8 * (before + end - 1) + highest_bit(last)), 0,
                     decoder.decoded[own], (u32)(out % 16), (u32)(out % 16), out / 16 * 16};
    if (is_marked) stream.left = own < 3 ? quarter : decoder.block_nbytes - 3 * quarter;
    // Words from `floor` on are kept; what is fetched next lies below. A turn ends where a step would need a word from
    // there, when the two words above `floor` are still needed.
    int floor = stream.at / 32 + 1 - (int)FETCHED - 2;
    for (u32 i = 0; i < STREAMS; ++i) {
        const int first = __shfl_sync(ALL_LANES, floor, i);
        for (u32 at = lane; at < FETCHED + 2; at += WARP)
            decoder.kept[i][(first + (int)at) & (KEPT - 1)] = stream.word(first + (int)at);
    }
    __syncwarp();
    while (__ballot_sync(ALL_LANES, is_lane_of_stream && stream.left >= ROUND_SYMBOLS)) {
        u32 fetched[STREAMS];
        for (u32 i = 0; i < STREAMS; ++i)
            fetched[i] = stream.word(__shfl_sync(ALL_LANES, floor, i) - (int)FETCHED + (int)lane);
        if (is_lane_of_stream) stream.run(decoder, decoder.kept[own], floor);
        take_out(decoder, stream, false);
        floor -= FETCHED; // what takes the place of the highest words, which all streams have read
        for (u32 i = 0; i < STREAMS; ++i)
            decoder.kept[i][(__shfl_sync(ALL_LANES, floor, i) + (int)lane) & (KEPT - 1)] = fetched[i];
        __syncwarp();
    }
    if (is_lane_of_stream) stream.finish(decoder);
    take_out(decoder, stream, true);
    const bool ends = is_marked && stream.at == (int)(8 * (before + begin));
    return __ballot_sync(ALL_LANES, is_lane_of_stream && !ends) == 0;
}

// True if a frame begins like one of ours, of a slice of the right length.
__device__ bool has_header(const FrameRow &row) {
    const u8 *frame = (const u8 *)row.frame;
    return row.frame_nbytes > FRAME_HEADER_NBYTES && row.frame_nbytes < MAX_FRAME_NBYTES &&
           get_number(frame, 4) == MAGIC && frame[4] == DESCRIPTOR && get_number(frame + 5, 4) == row.nbytes;
}

// Decodes frames. corrupt: zeros; becomes 1 for each frame that was not decoded.
extern "C" __global__ void __launch_bounds__(THREADS) decode_slices(const FrameRow *rows, u64 count, u32 *corrupt) {
    __shared__ Decoder decoders[SLICES];
    const u32 number = blockIdx.x * SLICES + warp_number();
    if (warp_number() >= SLICES || number >= count) return; // shared memory is for half of the warps
    Decoder &own = decoders[warp_number()];
    const FrameRow row = rows[number];
    Progress progress = {FRAME_HEADER_NBYTES, 0};
    bool is_good = has_header(row), is_last = false;
    while (is_good && !is_last) {
        if (lane_number() == 0) own.ready = 0; // the other lanes read it behind the next __syncwarp
        is_good = read_block(row, progress, is_last, own);
        if (is_good && own.ready) {
            make_table(own);
            is_good = decode_streams(own, row);
        }
        __syncwarp(); // the next block's beginning takes the place of the table
    }
    if (!is_good && lane_number() == 0) corrupt[number] = 1;
}
