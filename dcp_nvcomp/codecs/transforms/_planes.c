/* The kernels of planes.py, compiled: each plane in one pass over the floats. planes_numpy.py is the same in numpy, for
 * where this was not compiled, and says what each function does.
 *
 * Floats may lie at any address, so they are read and written with memcpy, which compilers turn into plain loads and
 * stores. Little-endian, as the format is.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The compiled kernels are for little-endian machines; planes_numpy.py is used elsewhere."
#endif

/* Wider vectors where the processor has them: without, x86-64 means SSE2. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define VECTORS
#endif

enum { SEEN_POSITIVE = 1, SEEN_NEGATIVE = 2 };

static int signs(uint64_t any, uint64_t all, int top) {
    return (all >> top & 1 ? 0 : SEEN_POSITIVE) | (any >> top & 1 ? SEEN_NEGATIVE : 0);
}

VECTORS
static int split2(const uint8_t *restrict block, uint8_t *restrict rest, uint8_t *restrict exponent, Py_ssize_t count) {
    uint16_t any = 0, all = 0xFFFF;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint16_t bits;
        memcpy(&bits, block + 2 * i, 2);
        exponent[i] = (uint8_t)(bits >> 7);
        rest[i] = (uint8_t)((bits & 0x7F) | (bits >> 8 & 0x80));
        any |= bits;
        all &= bits;
    }
    return signs(any, all, 15);
}

VECTORS
static int split4(const uint8_t *restrict block, uint8_t *restrict low, uint8_t *restrict rest,
                  uint8_t *restrict exponent, Py_ssize_t count) {
    uint32_t any = 0, all = 0xFFFFFFFF;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, block + 4 * i, 4);
        uint16_t low_half = (uint16_t)bits;
        memcpy(low + 2 * i, &low_half, 2);
        exponent[i] = (uint8_t)(bits >> 23);
        rest[i] = (uint8_t)((bits >> 16 & 0x7F) | (bits >> 24 & 0x80));
        any |= bits;
        all &= bits;
    }
    return signs(any, all, 31);
}

static int split8(const uint8_t *restrict block, uint8_t *restrict low, uint8_t *restrict rest,
                  uint8_t *restrict exponent, Py_ssize_t count) {
    uint64_t any = 0, all = ~(uint64_t)0;
    for (Py_ssize_t i = 0; i < count; i++) {
        uint64_t bits;
        memcpy(&bits, block + 8 * i, 8);
        memcpy(low + 6 * i, block + 8 * i, 6);
        exponent[i] = (uint8_t)(bits >> 55);
        rest[i] = (uint8_t)((bits >> 48 & 0x7F) | (bits >> 56 & 0x80));
        any |= bits;
        all &= bits;
    }
    return signs(any, all, 63);
}

VECTORS
static void merge2(const uint8_t *restrict rest, const uint8_t *restrict exponent, uint8_t *restrict block,
                   Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint16_t bits = (uint16_t)((rest[i] & 0x80) << 8 | exponent[i] << 7 | (rest[i] & 0x7F));
        memcpy(block + 2 * i, &bits, 2);
    }
}

VECTORS
static void merge4(const uint8_t *restrict low, const uint8_t *restrict rest, const uint8_t *restrict exponent,
                   uint8_t *restrict block, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint16_t low_half;
        memcpy(&low_half, low + 2 * i, 2);
        uint32_t bits = (uint32_t)(rest[i] & 0x80) << 24 | (uint32_t)exponent[i] << 23 |
                        (uint32_t)(rest[i] & 0x7F) << 16 | low_half;
        memcpy(block + 4 * i, &bits, 4);
    }
}

static void merge8(const uint8_t *restrict low, const uint8_t *restrict rest, const uint8_t *restrict exponent,
                   uint8_t *restrict block, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) {
        uint16_t high = (uint16_t)((rest[i] & 0x80) << 8 | exponent[i] << 7 | (rest[i] & 0x7F));
        memcpy(block + 8 * i, low + 6 * i, 6);
        memcpy(block + 8 * i + 6, &high, 2);
    }
}

VECTORS
static void pack_eighth(uint8_t *restrict part, const uint8_t *restrict last, int bit, Py_ssize_t eighth) {
    for (Py_ssize_t i = 0; i < eighth; i++)
        part[i] = (uint8_t)((part[i] & 0x7F) | (last[i] >> bit & 1) << 7);
}

VECTORS
static void unpack_eighth(const uint8_t *restrict part, uint8_t *restrict seven, uint8_t *restrict last, int bit,
                          uint8_t sign, Py_ssize_t eighth) {
    for (Py_ssize_t i = 0; i < eighth; i++) {
        last[i] |= (uint8_t)(part[i] >> 7 << bit);
        seven[i] = (uint8_t)((part[i] & 0x7F) | sign);
    }
}

/* --- Python ------------------------------------------------------------------------------------------------------- */

/* Buffers of one call. A missing low plane is None in Python and has no bytes here. */
typedef struct {
    Py_buffer low, rest, exponent, block;
} Buffers;

static void release(Buffers *buffers) {
    PyBuffer_Release(&buffers->low);
    PyBuffer_Release(&buffers->rest);
    PyBuffer_Release(&buffers->exponent);
    PyBuffer_Release(&buffers->block);
}

static int acquire(PyObject *args, Buffers *buffers, int *width, int is_split) {
    PyObject *low, *rest, *exponent, *block;
    memset(buffers, 0, sizeof *buffers);
    if (!PyArg_ParseTuple(args, "OiOOO", &block, width, &low, &rest, &exponent))
        return 0;
    int planes = is_split ? PyBUF_WRITABLE : PyBUF_SIMPLE, floats = is_split ? PyBUF_SIMPLE : PyBUF_WRITABLE;
    if (PyObject_GetBuffer(block, &buffers->block, floats) < 0 ||
        (low != Py_None && PyObject_GetBuffer(low, &buffers->low, planes) < 0) ||
        PyObject_GetBuffer(rest, &buffers->rest, planes) < 0 ||
        PyObject_GetBuffer(exponent, &buffers->exponent, planes) < 0) {
        release(buffers);
        return 0;
    }
    Py_ssize_t count = buffers->exponent.len;
    if ((*width != 2 && *width != 4 && *width != 8) || buffers->rest.len != count ||
        buffers->block.len / *width != count || buffers->block.len % *width ||
        buffers->low.len != count * (*width - 2)) {
        release(buffers);
        PyErr_SetString(PyExc_ValueError, "The planes are not those of this block.");
        return 0;
    }
    return 1;
}

static PyObject *split_floats(PyObject *module, PyObject *args) {
    Buffers b;
    int width, seen;
    (void)module;
    if (!acquire(args, &b, &width, 1))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (width == 2)
        seen = split2(b.block.buf, b.rest.buf, b.exponent.buf, b.exponent.len);
    else if (width == 4)
        seen = split4(b.block.buf, b.low.buf, b.rest.buf, b.exponent.buf, b.exponent.len);
    else
        seen = split8(b.block.buf, b.low.buf, b.rest.buf, b.exponent.buf, b.exponent.len);
    Py_END_ALLOW_THREADS
    release(&b);
    return PyLong_FromLong(seen);
}

static PyObject *merge_floats(PyObject *module, PyObject *args) {
    Buffers b;
    int width;
    (void)module;
    if (!acquire(args, &b, &width, 0))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (width == 2)
        merge2(b.rest.buf, b.exponent.buf, b.block.buf, b.exponent.len);
    else if (width == 4)
        merge4(b.low.buf, b.rest.buf, b.exponent.buf, b.block.buf, b.exponent.len);
    else
        merge8(b.low.buf, b.rest.buf, b.exponent.buf, b.block.buf, b.exponent.len);
    Py_END_ALLOW_THREADS
    release(&b);
    Py_RETURN_NONE;
}

static PyObject *pack_rest(PyObject *module, PyObject *args) {
    Py_buffer rest;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*", &rest))
        return NULL;
    uint8_t *bytes = rest.buf;
    Py_ssize_t eighth = rest.len / 8;
    Py_BEGIN_ALLOW_THREADS
    for (int k = 0; k < 7; k++)
        pack_eighth(bytes + k * eighth, bytes + 7 * eighth, k, eighth);
    for (Py_ssize_t i = 8 * eighth; i < rest.len; i++)
        bytes[i - eighth] = bytes[i] & 0x7F;
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&rest);
    Py_RETURN_NONE;
}

static PyObject *unpack_rest(PyObject *module, PyObject *args) {
    Py_buffer packed, rest;
    int is_negative;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*p", &packed, &rest, &is_negative))
        return NULL;
    Py_ssize_t eighth = rest.len / 8;
    if (packed.len != rest.len - eighth) {
        PyBuffer_Release(&packed);
        PyBuffer_Release(&rest);
        PyErr_SetString(PyExc_ValueError, "The packed plane is not that of this block.");
        return NULL;
    }
    uint8_t *bytes = rest.buf, *last = bytes + 7 * eighth, sign = is_negative ? 0x80 : 0;
    const uint8_t *parts = packed.buf;
    Py_BEGIN_ALLOW_THREADS
    memset(last, sign, (size_t)eighth);
    for (int k = 0; k < 7; k++)
        unpack_eighth(parts + k * eighth, bytes + k * eighth, last, k, sign, eighth);
    for (Py_ssize_t i = 8 * eighth; i < rest.len; i++)
        bytes[i] = (parts[i - eighth] & 0x7F) | sign;
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&packed);
    PyBuffer_Release(&rest);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"split_floats", split_floats, METH_VARARGS, "See planes_numpy.py."},
    {"merge_floats", merge_floats, METH_VARARGS, "See planes_numpy.py."},
    {"pack_rest", pack_rest, METH_VARARGS, "See planes_numpy.py."},
    {"unpack_rest", unpack_rest, METH_VARARGS, "See planes_numpy.py."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_planes", "The kernels of planes.py, compiled.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__planes(void) { return PyModuleDef_Init(&definition); }
