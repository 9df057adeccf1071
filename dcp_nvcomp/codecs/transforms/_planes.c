/* The kernels of the codec `planes` for Python: see _planes_kernels.h. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_planes_kernels.h"

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
    seen = split_run(b.block.buf, width, b.low.buf, b.rest.buf, b.exponent.buf, b.exponent.len);
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
    merge_run(b.low.buf, b.rest.buf, b.exponent.buf, width, b.block.buf, b.exponent.len);
    Py_END_ALLOW_THREADS
    release(&b);
    Py_RETURN_NONE;
}

static PyObject *pack_rest(PyObject *module, PyObject *args) {
    Py_buffer rest;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*", &rest))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    pack_plane(rest.buf, rest.len);
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
    if (packed.len != rest.len - rest.len / 8) {
        PyBuffer_Release(&packed);
        PyBuffer_Release(&rest);
        PyErr_SetString(PyExc_ValueError, "The packed plane is not that of this block.");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    unpack_plane(packed.buf, rest.buf, is_negative, rest.len);
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
    PyModuleDef_HEAD_INIT, "_planes", "The kernels of the codec `planes`, compiled.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__planes(void) { return PyModuleDef_Init(&definition); }
