/* Blocks of floats whose exponents are coded as literals, in one call without the GIL: checked, split and coded, or
 * checked, decoded and merged. The steps are those of engines/cpu.py, and the bytes too. With `columns`, the blocks are
 * those of `rowcol`: their planes are predicted before they are coded.
 *
 * A call takes neighbouring blocks of a matrix, each some columns wide, row after row across all of them, so that memory
 * is read and written in runs as long as all of them are wide, and each row is summed and split while it is in the
 * cache. One block, contiguous, is the plain case.
 *
 * Whatever is not as expected is declined, and left to the engine, which can do all of it in smaller steps and says what
 * is wrong.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "_crc32c.h"
#include "coders/_literals_decode.h"
#include "coders/_literals_encode.h"
#include "transforms/_planes_kernels.h"
#include "transforms/_rowcol_kernels.h"

enum {
    ALIGNMENT_NBYTES = 16,
    MIN_PACKED = 8,            /* floats */
    PIECE_NBYTES = 2 << 10,    /* of a row: what is summed, and split while it is in the nearest cache; 8 divides it */
    FIRST_LINES_NBYTES = 512,  /* of a row that does not follow the one before: what no processor fetches ahead */
    CACHE_LINE_NBYTES = 64,
};

static size_t padded(size_t nbytes) { return (nbytes + ALIGNMENT_NBYTES - 1) / ALIGNMENT_NBYTES * ALIGNMENT_NBYTES; }

static uint8_t *pad(uint8_t *from, uint8_t *at) {
    size_t nbytes = (size_t)(at - from), gap = padded(nbytes) - nbytes;
    memset(at, 0, gap);
    return at + gap;
}

/* Some rows in memory. */
typedef struct {
    uint8_t *first;
    size_t count, nbytes; /* of each */
    ptrdiff_t step;       /* from one to the next */
} Rows;

/* One of the blocks: its columns of the rows, and its planes. */
typedef struct {
    size_t row_nbytes, floats;
    uint8_t *low, *rest, *exponent; /* where the next row's go, or come from */
    int seen;                       /* signs */
    uint32_t crc;                   /* of what is not encoded */
    /* encoded: */
    const uint8_t *data;
    size_t nbytes, *slices;
    uint32_t encoded_crc;
    uint32_t flags;
} Block;

typedef struct {
    int width; /* of a float in bytes */
    size_t slice_nbytes;
    size_t columns; /* by which blocks are predicted; 0: they are not */
    size_t block_count;
    Block *blocks;
    size_t *slices; /* of all blocks */
    Rows rows;
} Job;

static size_t slice_count(const Job *job, const Block *block) {
    return (block->floats + job->slice_nbytes - 1) / job->slice_nbytes;
}

static size_t low_nbytes(const Job *job, const Block *block) { return block->floats * (size_t)(job->width - 2); }

/* The most that a block takes, as CodecChain.max_encoded_nbytes. */
static size_t room_of(const Job *job, const Block *block) {
    return padded(low_nbytes(job, block)) + 2 * padded(block->floats);
}

/* The first lines of a row are asked for a row ahead, unless it goes on where the last one ended. */
static void fetch_ahead(const Rows *rows, const uint8_t *row, int is_written) {
    if (rows->step == (ptrdiff_t)rows->nbytes)
        return;
    for (size_t at = 0; at < FIRST_LINES_NBYTES && at < rows->nbytes; at += CACHE_LINE_NBYTES) {
        if (is_written)
            __builtin_prefetch(row + at, 1);
        else
            __builtin_prefetch(row + at, 0);
    }
}

static size_t piece_of(size_t left) { return left < PIECE_NBYTES ? left : PIECE_NBYTES; }

static void advance(const Job *job, Block *block, size_t floats) {
    block->low += floats * (size_t)(job->width - 2);
    block->rest += floats;
    block->exponent += floats;
}

/* ---- encode ------------------------------------------------------------------------------------------------------ */

static void split_rows(const Job *job) {
    const Rows *rows = &job->rows;
    for (size_t number = 0; number < rows->count; number++) {
        const uint8_t *row = rows->first + (ptrdiff_t)number * rows->step;
        if (number + 1 < rows->count)
            fetch_ahead(rows, row + rows->step, 0);
        for (Block *block = job->blocks; block < job->blocks + job->block_count; block++) {
            for (size_t left = block->row_nbytes, nbytes; left; left -= nbytes, row += nbytes) {
                nbytes = piece_of(left);
                size_t floats = nbytes / (size_t)job->width;
                block->crc = crc32c(block->crc, row, nbytes);
                block->seen |= split_run(row, job->width, block->low, block->rest, block->exponent, (ptrdiff_t)floats);
                advance(job, block, floats);
            }
        }
    }
}

/* Codes a block whose planes are there, `out` with the low one and the rest. */
static void finish_block(const Job *job, Block *block, uint8_t *out, uint8_t *exponent, uint8_t *frame, uint8_t *room,
                         Work *work) {
    size_t floats = block->floats, low = padded(low_nbytes(job, block)), rest_nbytes = floats;
    Matrix matrix = matrix_of(floats, job->columns);
    uint8_t *at = out + low;
    pad(out, out + low_nbytes(job, block));
    block->flags = job->columns ? predict(matrix, at, exponent, block->seen, room) : 0;
    if (block->flags) {
        rest_nbytes = predicted_nbytes(matrix, block->flags);
    } else if (floats >= MIN_PACKED && block->seen != (SEEN_POSITIVE | SEEN_NEGATIVE)) {
        pack_plane(at, (ptrdiff_t)floats);
        rest_nbytes -= floats / 8;
        block->flags = FLAG_PACKED_REST | (block->seen == SEEN_NEGATIVE ? FLAG_NEGATIVE : 0);
    }
    at = pad(out, at + rest_nbytes);
    for (size_t start = 0, number = 0; start < floats; start += job->slice_nbytes, number++) {
        size_t nbytes = floats - start < job->slice_nbytes ? floats - start : job->slice_nbytes;
        size_t coded = encode_frame(exponent + start, nbytes, frame, work);
        /* a frame that is no smaller would be taken for a stored slice: store it */
        size_t stored = coded < nbytes ? coded : nbytes;
        memcpy(at, coded < nbytes ? frame : exponent + start, stored);
        block->slices[number] = stored;
        at = pad(out, at + stored);
    }
    block->data = out;
    block->nbytes = (size_t)(at - out);
    block->encoded_crc = crc32c(0, out, block->nbytes);
}

static void encode_job(const Job *job, uint8_t *out, uint8_t *exponents, uint8_t *frame, uint8_t *room, Work *work) {
    uint8_t *to = out, *exponent = exponents;
    for (Block *block = job->blocks; block < job->blocks + job->block_count; block++) {
        block->low = to;
        block->rest = to + padded(low_nbytes(job, block));
        block->exponent = exponent;
        to += room_of(job, block);
        exponent += block->floats;
    }
    split_rows(job);
    for (Block *block = job->blocks; block < job->blocks + job->block_count; block++) {
        finish_block(job, block, out, exponents, frame, room, work);
        out += room_of(job, block);
        exponents += block->floats;
    }
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

static int is_rest_made(const Block *block) { return (block->flags & (FLAG_PACKED_REST | FLAG_PREDICTED)) != 0; }

/* Finds a block's planes; makes those that are not stored as they are in `exponent` and `rest`, with room for its floats,
 * as `symbols` has. */
static int open_block(const Job *job, Block *block, uint8_t *exponent, uint8_t *rest, uint8_t *symbols,
                      Tables *tables) {
    size_t floats = block->floats, at = padded(low_nbytes(job, block));
    int is_predicted = (block->flags & FLAG_PREDICTED) != 0;
    Matrix matrix = matrix_of(floats, job->columns);
    size_t rest_nbytes = floats - (block->flags & FLAG_PACKED_REST ? floats / 8 : 0);
    if (is_predicted)
        rest_nbytes = predicted_nbytes(matrix, block->flags);
    if (rest_nbytes > floats || block->nbytes < at || block->nbytes - at < padded(rest_nbytes))
        return 0;
    block->low = (uint8_t *)block->data; /* which is read only */
    block->rest = (uint8_t *)block->data + at;
    block->exponent = exponent;
    const uint8_t *packed = block->rest;
    if (is_rest_made(block))
        block->rest = rest;
    if (block->flags & FLAG_PACKED_REST && !is_predicted)
        unpack_plane(packed, rest, block->flags & FLAG_NEGATIVE, (ptrdiff_t)floats);
    at += padded(rest_nbytes);
    uint8_t *coded = is_predicted ? symbols : exponent;
    for (size_t start = 0, number = 0; start < floats; start += job->slice_nbytes, number++) {
        size_t nbytes = floats - start < job->slice_nbytes ? floats - start : job->slice_nbytes;
        size_t stored = block->slices[number];
        if (stored > nbytes || block->nbytes - at < padded(stored))
            return 0;
        if (stored == nbytes)
            memcpy(coded + start, block->data + at, nbytes);
        else if (!decode_frame(block->data + at, stored, coded + start, nbytes, tables))
            return 0;
        at += padded(stored);
    }
    return !is_predicted || restore(matrix, block->flags, packed, symbols, rest, exponent);
}

static void merge_rows(const Job *job, int is_summed) {
    const Rows *rows = &job->rows;
    for (size_t number = 0; number < rows->count; number++) {
        uint8_t *row = rows->first + (ptrdiff_t)number * rows->step;
        if (number + 1 < rows->count)
            fetch_ahead(rows, row + rows->step, 1);
        for (Block *block = job->blocks; block < job->blocks + job->block_count; block++) {
            for (size_t left = block->row_nbytes, nbytes; left; left -= nbytes, row += nbytes) {
                nbytes = piece_of(left);
                size_t floats = nbytes / (size_t)job->width;
                merge_run(block->low, block->rest, block->exponent, job->width, row, (ptrdiff_t)floats);
                advance(job, block, floats);
                if (is_summed)
                    block->crc = crc32c(block->crc, row, nbytes);
            }
        }
    }
}

/* SHORT are blocks with a slice that is libzstd's; FOREIGN, with frames or flags that are not written here. */
enum Outcome { DECODED, SHORT, FOREIGN, STORED_CRC, DECODED_CRC };

static enum Outcome decode_job(const Job *job, const uint32_t *crcs, int check_stored, int check_decoded,
                               uint8_t *exponents, uint8_t *rests, uint8_t *symbols, Tables *tables) {
    for (Block *block = job->blocks; block < job->blocks + job->block_count; block++) {
        if (check_stored && crc32c(0, block->data, block->nbytes) != block->encoded_crc)
            return STORED_CRC;
        if (!open_block(job, block, exponents, rests, symbols, tables))
            return FOREIGN;
        exponents += block->floats;
        rests += is_rest_made(block) ? block->floats : 0;
    }
    merge_rows(job, check_decoded);
    for (size_t number = 0; check_decoded && number < job->block_count; number++)
        if (job->blocks[number].crc != crcs[number])
            return DECODED_CRC;
    return DECODED;
}

/* ---- Python ------------------------------------------------------------------------------------------------------ */

/* Of one call; released as a whole. */
typedef struct {
    Job job;
    Py_buffer rows, out;
    Py_buffer *data; /* of each encoded block, in a decode */
    uint32_t *crcs;
    size_t floats, slices, made_floats;
    size_t longest; /* of the blocks, in floats */
} Call;

static void release(Call *call) {
    for (size_t number = 0; call->data && number < call->job.block_count; number++)
        PyBuffer_Release(call->data + number);
    PyBuffer_Release(&call->rows);
    PyBuffer_Release(&call->out);
    free(call->data);
    free(call->crcs);
    free(call->job.slices);
    free(call->job.blocks);
}

static int refuse(const char *problem) {
    PyErr_SetString(PyExc_ValueError, problem);
    return 0;
}

static int no_memory(void) {
    PyErr_NoMemory();
    return 0;
}

/* Takes the rows, and how many of their bytes are each block's. */
static int take_shape(Call *call, PyObject *rows, PyObject *widths, int is_written) {
    Job *job = &call->job;
    if (job->width != 2 && job->width != 4 && job->width != 8)
        return refuse("Floats have 2, 4 or 8 bytes.");
    if (job->slice_nbytes == 0 || job->slice_nbytes > UINT32_MAX || job->slice_nbytes % ALIGNMENT_NBYTES)
        return refuse("The size of slices is out of range, or no multiple of 16.");
    if (job->columns > MAX_COLUMNS || (job->columns && job->width == 8))
        return refuse("The number of columns is out of range, or floats of 8 bytes can't be predicted.");
    if (PyObject_GetBuffer(rows, &call->rows, is_written ? PyBUF_STRIDES | PyBUF_WRITABLE : PyBUF_STRIDES) < 0)
        return 0;
    const Py_buffer *view = &call->rows;
    if (view->ndim != 2 || view->itemsize != 1 || (view->shape[1] > 1 && view->strides[1] != 1))
        return refuse("Rows must be a matrix of bytes, those of a row next to each other.");
    job->rows = (Rows){view->buf, (size_t)view->shape[0], (size_t)view->shape[1], view->strides[0]};
    if (!PyTuple_Check(widths) || PyTuple_Size(widths) == 0)
        return refuse("The widths of blocks must be a tuple.");
    job->block_count = (size_t)PyTuple_Size(widths);
    job->blocks = calloc(job->block_count, sizeof *job->blocks);
    if (!job->blocks)
        return no_memory();
    size_t left = job->rows.nbytes;
    for (size_t number = 0; number < job->block_count; number++) {
        Block *block = job->blocks + number;
        block->row_nbytes = PyLong_AsSize_t(PyTuple_GetItem(widths, (Py_ssize_t)number));
        if (PyErr_Occurred())
            return 0;
        if (block->row_nbytes > left || block->row_nbytes % (size_t)job->width)
            return refuse("A block is not some whole floats of each row.");
        left -= block->row_nbytes;
        block->floats = job->rows.count * (block->row_nbytes / (size_t)job->width);
        call->floats += block->floats;
        call->longest = block->floats > call->longest ? block->floats : call->longest;
        call->slices += slice_count(job, block);
    }
    if (left)
        return refuse("The blocks are not the rows.");
    job->slices = calloc(call->slices + 1, sizeof *job->slices);
    if (!job->slices)
        return no_memory();
    size_t *slices = job->slices;
    for (Block *block = job->blocks; block < job->blocks + job->block_count; block++) {
        block->slices = slices;
        slices += slice_count(job, block);
    }
    return 1;
}

/* Shorter slices are libzstd's. */
static int has_short_slice(const Job *job) {
    for (const Block *block = job->blocks; block < job->blocks + job->block_count; block++) {
        size_t last = block->floats % job->slice_nbytes;
        if (block->floats == 0 || (last && last < MIN_FRAME_NBYTES) || job->slice_nbytes < MIN_FRAME_NBYTES)
            return 1;
    }
    return 0;
}

static PyObject *slices_of(const Job *job, const Block *block) {
    size_t count = slice_count(job, block);
    PyObject *slices = PyTuple_New((Py_ssize_t)count);
    for (size_t number = 0; slices && number < count; number++) {
        PyObject *nbytes = PyLong_FromSize_t(block->slices[number]);
        if (!nbytes)
            Py_CLEAR(slices);
        else
            PyTuple_SetItem(slices, (Py_ssize_t)number, nbytes);
    }
    return slices;
}

/* (start, stop, flags, slices, encoded_crc, uncompressed_crc) of each block. */
static PyObject *encoded_blocks(const Job *job, const uint8_t *out) {
    PyObject *found = PyList_New((Py_ssize_t)job->block_count);
    for (size_t number = 0; found && number < job->block_count; number++) {
        const Block *block = job->blocks + number;
        PyObject *slices = slices_of(job, block);
        Py_ssize_t start = block->data - out, stop = start + (Py_ssize_t)block->nbytes;
        PyObject *row = slices ? Py_BuildValue("nnINII", start, stop, block->flags, slices, block->encoded_crc,
                                               block->crc)
                               : NULL;
        if (!row)
            Py_CLEAR(found);
        else
            PyList_SetItem(found, (Py_ssize_t)number, row);
    }
    return found;
}

static PyObject *encode_rows(PyObject *module, PyObject *args) {
    Call call = {0};
    PyObject *rows, *widths, *out, *found = NULL;
    Py_ssize_t slice_nbytes, columns;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOinnO", &rows, &widths, &call.job.width, &slice_nbytes, &columns, &out))
        return NULL;
    call.job.slice_nbytes = slice_nbytes > 0 ? (size_t)slice_nbytes : 0;
    call.job.columns = (size_t)columns; /* a negative number is refused, as one that is too large */
    if (!take_shape(&call, rows, widths, 0) || PyObject_GetBuffer(out, &call.out, PyBUF_WRITABLE) < 0) {
        release(&call);
        return NULL;
    }
    size_t room = 0;
    for (size_t number = 0; number < call.job.block_count; number++)
        room += room_of(&call.job, call.job.blocks + number);
    if ((size_t)call.out.len < room) {
        refuse("There is less room than the blocks may take.");
    } else if (has_short_slice(&call.job)) {
        found = Py_NewRef(Py_None);
    } else {
        size_t longest = call.floats < call.job.slice_nbytes ? call.floats : call.job.slice_nbytes;
        Work *work = malloc(sizeof *work);
        uint8_t *exponents = malloc(call.floats + 1), *frame = malloc(frame_room(longest));
        uint8_t *predicting = malloc(call.job.columns ? predict_room(call.longest, call.job.columns) : 1);
        if (work && exponents && frame && predicting) {
            Py_BEGIN_ALLOW_THREADS
            encode_job(&call.job, call.out.buf, exponents, frame, predicting, work);
            Py_END_ALLOW_THREADS
            found = encoded_blocks(&call.job, call.out.buf);
        } else {
            no_memory();
        }
        free(predicting);
        free(frame);
        free(exponents);
        free(work);
    }
    release(&call);
    return found;
}

/* Takes one encoded block; 0 with an exception if it can't be one, 2 if it is only not as the kernels write it. */
static int take_encoded(Call *call, size_t number, PyObject *encoded) {
    PyObject *data, *slices;
    unsigned int flags, encoded_crc, crc;
    Block *block = call->job.blocks + number;
    if (!PyArg_ParseTuple(encoded, "OIO!II", &data, &flags, &PyTuple_Type, &slices, &encoded_crc, &crc))
        return 0;
    if (PyObject_GetBuffer(data, call->data + number, PyBUF_SIMPLE) < 0)
        return 0;
    block->data = call->data[number].buf;
    block->nbytes = (size_t)call->data[number].len;
    block->flags = flags;
    block->encoded_crc = encoded_crc;
    call->crcs[number] = crc;
    uint32_t known = FLAG_PACKED_REST | FLAG_NEGATIVE;
    if (call->job.columns && flags & FLAG_PREDICTED)
        known |= FLAG_PREDICTED | FLAG_NARROW_ROWS | UINT32_MAX << ESCAPES_SHIFT;
    if (flags & ~known || (flags & FLAG_NEGATIVE && !(flags & FLAG_PACKED_REST)))
        return 2;
    call->made_floats += is_rest_made(block) ? block->floats : 0;
    if ((size_t)PyTuple_Size(slices) != slice_count(&call->job, block))
        return 2;
    for (Py_ssize_t at = 0; at < PyTuple_Size(slices); at++) {
        block->slices[at] = PyLong_AsSize_t(PyTuple_GetItem(slices, at));
        if (PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* Takes all encoded blocks; returns as `take_encoded`. */
static int take_all_encoded(Call *call, PyObject *encoded) {
    if (!PyList_Check(encoded) || (size_t)PyList_Size(encoded) != call->job.block_count)
        return refuse("There must be an encoded block for each width.");
    call->data = calloc(call->job.block_count, sizeof *call->data);
    call->crcs = calloc(call->job.block_count, sizeof *call->crcs);
    if (!call->data || !call->crcs)
        return no_memory();
    int all = 1;
    for (size_t number = 0; number < call->job.block_count; number++) {
        int taken = take_encoded(call, number, PyList_GetItem(encoded, (Py_ssize_t)number));
        if (!taken)
            return 0;
        all = taken == 2 ? 2 : all;
    }
    return all;
}

static PyObject *decode_rows(PyObject *module, PyObject *args) {
    Call call = {0};
    PyObject *encoded, *widths, *rows;
    Py_ssize_t slice_nbytes, columns;
    int check_stored, check_decoded;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOinnpp", &encoded, &widths, &rows, &call.job.width, &slice_nbytes, &columns,
                          &check_stored, &check_decoded))
        return NULL;
    call.job.slice_nbytes = slice_nbytes > 0 ? (size_t)slice_nbytes : 0;
    call.job.columns = (size_t)columns; /* a negative number is refused, as one that is too large */
    int taken = take_shape(&call, rows, widths, 1) ? take_all_encoded(&call, encoded) : 0;
    enum Outcome outcome = FOREIGN;
    if (taken && has_short_slice(&call.job)) {
        outcome = SHORT;
    } else if (taken == 1) {
        Tables *tables = malloc(sizeof *tables);
        uint8_t *exponents = malloc(call.floats + 1), *rests = malloc(call.made_floats + 1);
        uint8_t *symbols = malloc(call.job.columns ? call.longest : 1);
        if (tables && exponents && rests && symbols) {
            Py_BEGIN_ALLOW_THREADS
            outcome = decode_job(&call.job, call.crcs, check_stored, check_decoded, exponents, rests, symbols, tables);
            Py_END_ALLOW_THREADS
        } else {
            taken = no_memory();
        }
        free(symbols);
        free(rests);
        free(exponents);
        free(tables);
    }
    release(&call);
    return taken ? PyLong_FromLong(outcome) : NULL;
}

static PyMethodDef functions[] = {
    {"encode_rows", encode_rows, METH_VARARGS,
     "encode_rows(rows, widths, float_nbytes, slice_nbytes, columns, out): (start, stop, flags, slices, encoded_crc, "
     "uncompressed_crc) of each block in `out`; None if the engine has to encode them."},
    {"decode_rows", decode_rows, METH_VARARGS,
     "decode_rows(blocks, widths, rows, float_nbytes, slice_nbytes, columns, check_stored, check_decoded): blocks of "
     "(data, flags, slices, encoded_crc, uncompressed_crc) into `rows`; the outcome."},
    {NULL, NULL, 0, NULL},
};

static int start_module(PyObject *module) {
    if (!prepare_crc32c()) {
        PyErr_SetString(PyExc_ImportError, "This processor has no instruction for CRC32C.");
        return -1;
    }
    if (PyModule_AddIntMacro(module, DECODED) < 0 || PyModule_AddIntMacro(module, SHORT) < 0 ||
        PyModule_AddIntMacro(module, FOREIGN) < 0 || PyModule_AddIntMacro(module, STORED_CRC) < 0 ||
        PyModule_AddIntMacro(module, DECODED_CRC) < 0)
        return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, start_module},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_planes_literals",
    "Whole blocks of planes and literals.",
    0,
    functions,
    slots,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__planes_literals(void) { return PyModuleDef_Init(&definition); }
