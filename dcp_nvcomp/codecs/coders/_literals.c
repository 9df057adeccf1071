/* Zstandard frames of literals alone, for Python: _literals_encode.h writes them, _literals_decode.h reads them. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>

#include "_literals_decode.h"
#include "_literals_encode.h"

static PyObject *encode_literals(PyObject *module, PyObject *args) {
    Py_buffer data, out;
    Work *work = NULL;
    size_t nbytes = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*", &data, &out))
        return NULL;
    size_t data_nbytes = (size_t)data.len;
    if (data_nbytes >= MIN_FRAME_NBYTES && data_nbytes <= UINT32_MAX && (size_t)out.len >= frame_room(data_nbytes))
        work = malloc(sizeof *work);
    if (work) {
        Py_BEGIN_ALLOW_THREADS
        nbytes = encode_frame(data.buf, data_nbytes, out.buf, work);
        Py_END_ALLOW_THREADS
        free(work);
    }
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return PyLong_FromSize_t(nbytes);
}

static PyObject *decode_literals(PyObject *module, PyObject *args) {
    Py_buffer frame, out;
    int decoded = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "y*w*", &frame, &out))
        return NULL;
    Tables *tables = malloc(sizeof *tables);
    if (tables) {
        Py_BEGIN_ALLOW_THREADS
        decoded = decode_frame(frame.buf, (size_t)frame.len, out.buf, (size_t)out.len, tables);
        Py_END_ALLOW_THREADS
        free(tables);
    }
    PyBuffer_Release(&frame);
    PyBuffer_Release(&out);
    return PyBool_FromLong(decoded);
}

static PyMethodDef functions[] = {
    {"encode_literals", encode_literals, METH_VARARGS,
     "encode_literals(data, out): a frame of `data` into `out`; its length, or 0 where libzstd has to do it."},
    {"decode_literals", decode_literals, METH_VARARGS,
     "decode_literals(frame, out): decodes to exactly `out`; False where libzstd has to, or has to say what is wrong."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_literals", "Zstandard frames of literals alone.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__literals(void) { return PyModuleDef_Init(&definition); }
