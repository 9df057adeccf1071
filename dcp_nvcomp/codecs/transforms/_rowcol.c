/* The kernels of rowcol.py for Python: see _rowcol_kernels.h. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "_rowcol_kernels.h"

static PyObject *refuse(void) {
    PyErr_SetString(PyExc_ValueError, "The planes are not those of this block.");
    return NULL;
}

static PyObject *predict_planes(PyObject *module, PyObject *args) {
    Py_buffer rest, exponent;
    Py_ssize_t columns;
    int seen;
    uint32_t flags = 0;
    uint8_t *room = NULL;
    PyObject *found = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "w*w*ni", &rest, &exponent, &columns, &seen))
        return NULL;
    if (rest.len != exponent.len || columns < 1 || columns > MAX_COLUMNS) {
        refuse();
    } else if (!(room = malloc(predict_room((size_t)rest.len, (size_t)columns)))) {
        PyErr_NoMemory();
    } else {
        Py_BEGIN_ALLOW_THREADS
        flags = predict(matrix_of((size_t)rest.len, (size_t)columns), rest.buf, exponent.buf, seen, room);
        Py_END_ALLOW_THREADS
        found = PyLong_FromUnsignedLong(flags);
    }
    free(room);
    PyBuffer_Release(&rest);
    PyBuffer_Release(&exponent);
    return found;
}

static PyObject *restore_planes(PyObject *module, PyObject *args) {
    Py_buffer packed, symbols, rest, exponent;
    Py_ssize_t columns;
    unsigned int flags;
    int is_possible = 0;
    PyObject *found = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*y*w*w*nI", &packed, &symbols, &rest, &exponent, &columns, &flags))
        return NULL;
    Matrix matrix = matrix_of((size_t)symbols.len, columns > 0 ? (size_t)columns : 0);
    if (columns < 1 || columns > MAX_COLUMNS || rest.len != symbols.len || exponent.len != symbols.len ||
        (uint64_t)packed.len != predicted_nbytes(matrix, flags)) {
        refuse();
    } else {
        Py_BEGIN_ALLOW_THREADS
        is_possible = restore(matrix, flags, packed.buf, symbols.buf, rest.buf, exponent.buf);
        Py_END_ALLOW_THREADS
        found = PyBool_FromLong(is_possible);
    }
    PyBuffer_Release(&packed);
    PyBuffer_Release(&symbols);
    PyBuffer_Release(&rest);
    PyBuffer_Release(&exponent);
    return found;
}

static PyMethodDef functions[] = {
    {"predict_planes", predict_planes, METH_VARARGS, "See rowcol_numpy.py."},
    {"restore_planes", restore_planes, METH_VARARGS, "See rowcol_numpy.py."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_rowcol", "The kernels of rowcol.py, compiled.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__rowcol(void) { return PyModuleDef_Init(&definition); }
