/* The kernels of derived.py for Python: a block in one call without the GIL, summed while it is in the cache. Rows are
 * those of a matrix in memory, of which a block is some columns. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../_crc32c.h"
#include "_block_kernels.h"

enum { PIECE_FLOATS = 512, POSITION_NBYTES = 4, HALF_NBYTES = 2 };

typedef uint32_t __attribute__((aligned(1), may_alias)) Word;
typedef uint16_t __attribute__((aligned(1), may_alias)) Half;

typedef struct {
    uint8_t *first;
    size_t count, nbytes; /* of each */
    ptrdiff_t step;       /* from one to the next */
} Rows;

static uint8_t *row_of(const Rows *rows, size_t number) { return rows->first + (ptrdiff_t)number * rows->step; }

static uint16_t expected(uint16_t base, uint16_t low) { return (uint16_t)(base - (low >> 15)); }

/* Returns zero if all upper halves are as expected. */
VECTORS static unsigned split_run(const Word *floats, const Half *base, Half *low, size_t count) {
    unsigned differs = 0;
    for (size_t at = 0; at < count; at++) {
        uint16_t half = (uint16_t)floats[at];
        low[at] = half;
        differs |= (unsigned)(expected(base[at], half) ^ (floats[at] >> 16));
    }
    return differs;
}

VECTORS static void merge_run(const Half *low, const Half *base, Word *floats, size_t count) {
    for (size_t at = 0; at < count; at++)
        floats[at] = (uint32_t)expected(base[at], low[at]) << 16 | low[at];
}

/* Adds the positions of what is not as expected; returns more than `most` if there are so many. */
static size_t list_exceptions(const Word *floats, const Half *base, size_t count, size_t position, Word *positions,
                              size_t found, size_t most) {
    for (size_t at = 0; at < count && found <= most; at++) {
        if (expected(base[at], (uint16_t)floats[at]) == floats[at] >> 16)
            continue;
        if (found < most)
            positions[found] = (uint32_t)(position + at);
        found++;
    }
    return found;
}

/* Returns how many exceptions are in `high`; more than `most`, if it has all upper halves instead. The base is read once,
 * as training may change it meanwhile: what was summed is what was used. */
static size_t split(const Rows *rows, const Rows *base, uint8_t *low, uint8_t *high, size_t most, uint32_t *crc,
                    uint32_t *base_crc) {
    Half rounded[PIECE_FLOATS];
    size_t width = rows->nbytes / sizeof(Word), found = 0;
    Half *halves = (Half *)low;
    for (size_t number = 0; number < rows->count; number++) {
        const Word *floats = (const Word *)row_of(rows, number);
        const Half *halves_of_base = (const Half *)row_of(base, number);
        for (size_t at = 0, count; at < width; at += count) {
            count = width - at < PIECE_FLOATS ? width - at : PIECE_FLOATS;
            size_t position = number * width + at;
            memcpy(rounded, halves_of_base + at, count * sizeof(Half));
            *base_crc = crc32c(*base_crc, (const uint8_t *)rounded, count * sizeof(Half));
            *crc = crc32c(*crc, (const uint8_t *)(floats + at), count * sizeof(Word));
            if (split_run(floats + at, rounded, halves + position, count) && found <= most)
                found = list_exceptions(floats + at, rounded, count, position, (Word *)high, found, most);
        }
    }
    if (found <= most) {
        Half *values = (Half *)(high + found * POSITION_NBYTES);
        for (size_t at = 0; at < found; at++) {
            size_t position = ((const Word *)high)[at];
            values[at] = ((const Half *)row_of(rows, position / width))[2 * (position % width) + 1];
        }
        return found;
    }
    Half *all = (Half *)high;
    for (size_t number = 0; number < rows->count; number++)
        for (size_t at = 0; at < width; at++)
            *all++ = ((const Half *)row_of(rows, number))[2 * at + 1];
    return found;
}

/* Returns 0 if an exception is not in the block. */
static int merge(const uint8_t *low, const uint8_t *exceptions, size_t count, const uint8_t *base, const Rows *rows,
                 uint32_t *crc) {
    size_t width = rows->nbytes / sizeof(Word), floats = rows->count * width;
    const Word *positions = (const Word *)exceptions;
    const Half *values = (const Half *)(exceptions + count * POSITION_NBYTES);
    for (size_t number = 0; number < rows->count; number++)
        merge_run((const Half *)low + number * width, (const Half *)base + number * width,
                  (Word *)row_of(rows, number), width);
    for (size_t at = 0; at < count; at++) {
        if (positions[at] >= floats)
            return 0;
        ((Half *)row_of(rows, positions[at] / width))[2 * (positions[at] % width) + 1] = values[at];
    }
    for (size_t number = 0; number < rows->count; number++)
        *crc = crc32c(*crc, row_of(rows, number), rows->nbytes);
    return 1;
}

/* ---- Python ------------------------------------------------------------------------------------------------------ */

static int refuse(void) {
    PyErr_SetString(PyExc_ValueError, "The planes are not those of this block.");
    return 0;
}

/* Takes a matrix of bytes, those of a row next to each other. */
static int take_rows(PyObject *given, Py_buffer *view, Rows *rows, int is_written) {
    if (PyObject_GetBuffer(given, view, is_written ? PyBUF_STRIDES | PyBUF_WRITABLE : PyBUF_STRIDES) < 0)
        return 0;
    if (view->ndim != 2 || view->itemsize != 1 || (view->shape[1] > 1 && view->strides[1] != 1))
        return refuse();
    *rows = (Rows){view->buf, (size_t)view->shape[0], (size_t)view->shape[1], view->strides[0]};
    return 1;
}

static PyObject *split_rows(PyObject *module, PyObject *args) {
    Py_buffer floats = {0}, rounded = {0}, low = {0}, high = {0};
    PyObject *given, *given_base, *found = NULL;
    Py_ssize_t most;
    Rows rows, base;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOw*w*n", &given, &given_base, &low, &high, &most))
        return NULL;
    if (take_rows(given, &floats, &rows, 0) && take_rows(given_base, &rounded, &base, 0)) {
        size_t half_nbytes = rows.count * rows.nbytes / 2;
        if (rows.nbytes % sizeof(Word) || base.count != rows.count || base.nbytes * 2 != rows.nbytes ||
            (size_t)low.len != half_nbytes || (size_t)high.len != half_nbytes || half_nbytes / 2 > UINT32_MAX ||
            most < 0 || (size_t)most > half_nbytes / (POSITION_NBYTES + HALF_NBYTES)) {
            refuse();
        } else {
            size_t exceptions;
            uint32_t crc = 0, base_crc = 0;
            Py_BEGIN_ALLOW_THREADS
            exceptions = split(&rows, &base, low.buf, high.buf, (size_t)most, &crc, &base_crc);
            Py_END_ALLOW_THREADS
            found = Py_BuildValue("nII", exceptions > (size_t)most ? -1 : (Py_ssize_t)exceptions, crc, base_crc);
        }
    }
    PyBuffer_Release(&floats);
    PyBuffer_Release(&rounded);
    PyBuffer_Release(&low);
    PyBuffer_Release(&high);
    return found;
}

static PyObject *merge_rows(PyObject *module, PyObject *args) {
    Py_buffer floats = {0}, low = {0}, exceptions = {0}, base = {0};
    PyObject *given, *found = NULL;
    Rows rows;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*y*O", &low, &exceptions, &base, &given))
        return NULL;
    if (take_rows(given, &floats, &rows, 1)) {
        size_t half_nbytes = rows.count * rows.nbytes / 2, each = POSITION_NBYTES + HALF_NBYTES;
        if (rows.nbytes % sizeof(Word) || (size_t)low.len != half_nbytes || (size_t)base.len != half_nbytes ||
            (size_t)exceptions.len % each) {
            refuse();
        } else {
            uint32_t crc = 0;
            int is_possible;
            Py_BEGIN_ALLOW_THREADS
            is_possible = merge(low.buf, exceptions.buf, (size_t)exceptions.len / each, base.buf, &rows, &crc);
            Py_END_ALLOW_THREADS
            found = is_possible ? PyLong_FromUnsignedLong(crc) : Py_NewRef(Py_None);
        }
    }
    PyBuffer_Release(&floats);
    PyBuffer_Release(&low);
    PyBuffer_Release(&exceptions);
    PyBuffer_Release(&base);
    return found;
}

static PyMethodDef functions[] = {
    {"split_rows", split_rows, METH_VARARGS, "See derived_numpy.py."},
    {"merge_rows", merge_rows, METH_VARARGS, "See derived_numpy.py."},
    {NULL, NULL, 0, NULL},
};

static int start_module(PyObject *module) {
    (void)module;
    if (prepare_crc32c())
        return 0;
    PyErr_SetString(PyExc_ImportError, "This processor has no instruction for CRC32C.");
    return -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, start_module},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_derived", "The kernels of derived.py, compiled.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__derived(void) { return PyModuleDef_Init(&definition); }
