/* CRC32C where the processor has instructions for it; see _crc32c.h. Where it has none, there is no such module. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_crc32c.h"

static PyObject *compute(PyObject *args, int level) {
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I", &data, &crc))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    crc = crc32c(level, crc, data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

static PyObject *checksum(PyObject *module, PyObject *args) {
    (void)module;
    return compute(args, crc32c_level());
}

/* For tests, on a processor that has more. */
static PyObject *checksum_by_crc32(PyObject *module, PyObject *args) {
    (void)module;
    return compute(args, 1);
}

static PyMethodDef functions[] = {
    {"checksum", checksum, METH_VARARGS, "checksum(data, value=0): the CRC32C of data behind what `value` is that of."},
    {"checksum_by_crc32", checksum_by_crc32, METH_VARARGS, "The same, with the crc32 instruction alone."},
    {NULL, NULL, 0, NULL},
};

static int execute(PyObject *module) {
    (void)module;
    if (crc32c_level())
        return 0;
    PyErr_SetString(PyExc_ImportError, "This processor has no instructions for CRC32C.");
    return -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_checksums", "CRC32C.", 0, functions, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__checksums(void) { return PyModuleDef_Init(&definition); }
