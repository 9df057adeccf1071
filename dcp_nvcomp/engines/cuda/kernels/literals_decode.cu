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

// The bits of a stream, the last ones first: a window of two words, moved on by one when only one of them is left.
struct BitReader {
    const u32 *words; // from where positions count
    u64 window;       // words `low` and `low` + 1
    int at, low;      // all bits from `at` on are read
    u32 next;         // the word below, asked for long before it is needed

    __device__ BitReader(const u8 *frame, const u8 *end, u8 last) {
        words = (const u32 *)((u64)frame / 4 * 4);
        at = (int)(8 * (u32)(end - 1 - (const u8 *)words) + highest_bit(last));
        low = at / 32 - 1;
        window = (u64)words[low + 1] << 32 | word(low);
        next = word(low - 1);
    }
    __device__ u32 word(int number) const { return number >= 0 ? words[number] : 0; }
    // The bits that come next; zeros before the frame's beginning. count: at most 32.
    __device__ u32 peek(u32 count) const { return (u32)(window >> (at - (int)count - 32 * low)) & low_bits(count); }
    __device__ void skip(u32 count) {
        at -= (int)count;
        if (at <= 32 * low + 32) {
            --low;
            window = window << 32 | next;
            next = word(low - 1);
        }
    }
};

// Bytes to memory, 8 at a time.
struct ByteWriter {
    u64 *words;
    u64 bytes;
    u32 held, skipped; // how many bytes of the word at `words` are there; the first ones that are not ours

    __device__ explicit ByteWriter(u8 *out) {
        held = skipped = (u32)((u64)out % 8);
        words = (u64 *)(out - held);
        bytes = 0;
    }
    __device__ void put(u32 more, u32 count) { // at most 3, and zeros above them
        bytes |= (u64)more << 8 * held;
        held += count;
        if (held < 8) return;
        if (skipped) put_bytes(8);
        else *words = bytes;
        ++words;
        held -= 8;
        skipped = 0;
        bytes = held ? more >> 8 * (count - held) : 0;
    }
    __device__ void put_bytes(u32 end) {
        for (u32 i = skipped; i < end; ++i) ((u8 *)words)[i] = (u8)(bytes >> 8 * i);
    }
};

// Decodes a stream of a frame; false if it does not end where it should.
__device__ bool decode_stream(const Decoder &decoder, const u8 *frame, u32 begin, u32 end, u8 *out, u32 left) {
    const u8 last = frame[end - 1];
    if (last == 0) return false;
    BitReader reader(frame, frame + end, last);
    ByteWriter writer(out);
    while (left > 0) {
        const u32 entry = decoder.table[reader.peek(TABLE_LOG)];
        u32 count = entry >> COUNT_AT, length = entry >> LENGTH_AT & 15, symbols = entry & low_bits(LENGTH_AT);
        if (count == 0) {
            count = 1;
            length = MAX_LENGTH;
            symbols = symbols >> 8 * (reader.peek(MAX_LENGTH) & 1) & 0xFF;
        } else if (count > left) { // what follows the last symbol is not this stream's
            count = left;
            symbols &= low_bits(8 * count);
            length = 0;
            for (u32 i = 0; i < count; ++i) length += decoder.longest + 1 - decoder.weights[symbols >> 8 * i & 0xFF];
        }
        writer.put(symbols, count);
        reader.skip(length);
        left -= count;
    }
    writer.put_bytes(writer.held);
    return reader.at == (int)(8 * (u32)(frame + begin - (const u8 *)reader.words));
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
    Decoder &own = decoders[warp_number()];
    const u32 number = blockIdx.x * SLICES + warp_number();
    Progress progress = {FRAME_HEADER_NBYTES, 0};
    bool is_good = number >= count || has_header(rows[number]), goes_on = number < count && is_good;
    do {
        if (lane_number() == 0) own.ready = 0; // the other lanes read it behind the next __syncwarp
        if (goes_on) {
            bool is_last;
            is_good = read_block(rows[number], progress, is_last, own);
            goes_on = is_good && !is_last;
        }
        __syncwarp();
        if (own.ready) make_table(own);
        __syncthreads();
        const Decoder &decoder = decoders[threadIdx.x / 4 % SLICES];
        if (threadIdx.x < 4 * SLICES && decoder.ready) {
            const u32 place = blockIdx.x * SLICES + threadIdx.x / 4, stream = threadIdx.x % 4;
            const FrameRow row = rows[place];
            const u32 quarter = (decoder.block_nbytes + 3) / 4, first = stream * quarter;
            if (!decode_stream(decoder, (const u8 *)row.frame, decoder.stream_at[stream], decoder.stream_at[stream + 1],
                               (u8 *)row.data + decoder.block_at + first,
                               stream < 3 ? quarter : decoder.block_nbytes - first))
                atomicOr(&corrupt[place], 1u);
        }
    } while (__syncthreads_or(goes_on));
    if (!is_good && lane_number() == 0) corrupt[number] = 1;
}
