# cython: language_level=3
"""Numbers into memory and out of it, and what a buffer is: ``iserblk.octets`` uses it where it was compiled.

Each buffer is taken through the buffer protocol and released before return. Before a byte is
written or read, all of the layout is known to lie in the buffer. A number that is wider than its field is
refused.
"""

from cpython.buffer cimport (
    PyBUF_FULL_RO,
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import re
import struct

cdef extern from "Python.h":
    # Arguments as they are: each reference that Cython counts costs as much as a field.
    ctypedef struct PyObject
    ctypedef PyObject *(*PyCFunction)(PyObject *, PyObject *)
    ctypedef struct PyMethodDef:
        const char *ml_name
        PyCFunction ml_meth
        int ml_flags
        const char *ml_doc
    int METH_FASTCALL
    object PyCFunction_NewEx(PyMethodDef *method, object self, object module)
    Py_ssize_t PyLong_AsSsize_t(PyObject *number) except? -1
    # Declared without the error that they may return: ``store`` looks itself.
    unsigned long long PyLong_AsUnsignedLongLong(PyObject *number)
    unsigned long PyLong_AsUnsignedLong(PyObject *number)
    PyObject *PyErr_Occurred()
    void PyErr_Clear()
    # Declared without the error, too: ``load`` looks for what was not made.
    PyObject *PyLong_FromLong(long number)
    PyObject *PyLong_FromUnsignedLongLong(unsigned long long number)
    PyObject *PyBytes_FromStringAndSize(const char *start, Py_ssize_t size)
    object PyTuple_New(Py_ssize_t size)
    void PyTuple_SET_ITEM(object items, Py_ssize_t index, PyObject *item)  # takes the reference
    bint PyMemoryView_Check(object value)
    int PyBytes_Check(PyObject *value)
    char *PyBytes_AS_STRING(PyObject *value)
    Py_ssize_t PyBytes_GET_SIZE(PyObject *value)
    int PyByteArray_Check(PyObject *value)
    char *PyByteArray_AS_STRING(PyObject *value)
    Py_ssize_t PyByteArray_GET_SIZE(PyObject *value)

cdef extern from "endian.h" nogil:
    uint16_t htobe16(uint16_t number)
    uint32_t htobe32(uint32_t number)
    uint64_t htobe64(uint64_t number)
    uint16_t be16toh(uint16_t number)
    uint32_t be32toh(uint32_t number)
    uint64_t be64toh(uint64_t number)

cdef enum:
    MOST_FIELDS = 16

_SIZES = {"B": 1, "H": 2, "I": 4, "Q": 8}
_FORMAT = re.compile(r">(?:\d*[BHIQsx])+")
_PART = re.compile(r"(\d*)([BHIQsx])")
cdef object error = struct.error

cdef struct Field:
    bint is_number
    Py_ssize_t size  # bytes
    Py_ssize_t at  # where it begins
    unsigned long long most  # of a number


cdef class Layout:
    """A layout of big-endian numbers, bytes and pads, as ``struct.Struct`` has it. ``pack_into`` and
    ``unpack_from`` are functions of C: a method of this class would make a tuple of its arguments.
    """

    cdef readonly object pack_into
    cdef readonly object unpack_from
    cdef Field fields[MOST_FIELDS]
    cdef Py_ssize_t count
    cdef Py_ssize_t size

    def __init__(self, str format):
        """Raises struct.error where the format has anything else, or too many fields."""
        self.count = 0
        self.size = 0
        if _FORMAT.fullmatch(format) is None:
            raise error(f"not a layout of this kind: {format!r}")
        for times, kind in _PART.findall(format):
            many = int(times or "1")
            if kind == "s":
                self.add(False, many)
            elif kind == "x":
                self.size += many
            else:
                for _ in range(many):
                    self.add(True, _SIZES[kind])
        self.pack_into = PyCFunction_NewEx(&_pack_into_method, self, None)
        self.unpack_from = PyCFunction_NewEx(&_unpack_from_method, self, None)

    cdef int add(self, bint is_number, Py_ssize_t size) except -1:
        cdef Field *field
        if self.count == MOST_FIELDS:
            raise error(f"more than {MOST_FIELDS} fields")
        field = &self.fields[self.count]
        field.is_number = is_number
        field.size = size
        field.at = self.size
        field.most = (<unsigned long long>-1) >> (64 - 8 * size) if is_number else 0
        self.count += 1
        self.size += size
        return 0

    cdef int check(self, Py_ssize_t length, Py_ssize_t offset) except -1:
        if offset < 0 or length - self.size < offset:
            raise error(f"{self.size} bytes at {offset}, of a buffer of {length}")
        return 0

    cdef int store(self, unsigned char *memory, PyObject **values, Py_ssize_t count) except -1:
        """Write all of the layout: ``memory`` has ``size`` bytes."""
        cdef Py_ssize_t index
        cdef Field *field
        cdef unsigned long long number
        cdef uint16_t two
        cdef uint32_t four
        cdef uint64_t eight
        if count != self.count:
            raise error(f"{count} values for {self.count} fields")
        memset(memory, 0, self.size)
        for index in range(count):
            field = &self.fields[index]
            if not field.is_number:
                _store_bytes(memory + field.at, field.size, values[index])
                continue
            if sizeof(long) == 8:  # the quicker function, where it takes all numbers
                number = PyLong_AsUnsignedLong(values[index])
            else:
                number = PyLong_AsUnsignedLongLong(values[index])
            if number >= field.most and (number > field.most or PyErr_Occurred() != NULL):
                PyErr_Clear()
                raise error(f"{<object>values[index]!r} is no number of {field.size} bytes")
            if field.size == 4:
                four = htobe32(<uint32_t>number)
                memcpy(memory + field.at, &four, 4)
            elif field.size == 1:
                memory[field.at] = <unsigned char>number
            elif field.size == 8:
                eight = htobe64(number)
                memcpy(memory + field.at, &eight, 8)
            else:
                two = htobe16(<uint16_t>number)
                memcpy(memory + field.at, &two, 2)
        return 0

    cdef tuple load(self, const unsigned char *memory):
        """The fields: ``memory`` has ``size`` bytes."""
        cdef Py_ssize_t index
        cdef Field *field
        cdef const unsigned char *at
        cdef PyObject *value
        cdef uint16_t two
        cdef uint32_t four
        cdef uint64_t eight
        values = PyTuple_New(self.count)
        for index in range(self.count):
            field = &self.fields[index]
            at = memory + field.at
            if not field.is_number:
                value = PyBytes_FromStringAndSize(<const char *>at, field.size)
            elif field.size == 4:
                memcpy(&four, at, 4)
                four = be32toh(four)
                if sizeof(long) == 8:
                    value = PyLong_FromLong(<long>four)
                else:
                    value = PyLong_FromUnsignedLongLong(four)
            elif field.size == 1:
                value = PyLong_FromLong(at[0])
            elif field.size == 8:
                memcpy(&eight, at, 8)
                value = PyLong_FromUnsignedLongLong(be64toh(eight))
            else:
                memcpy(&two, at, 2)
                value = PyLong_FromLong(be16toh(two))
            if value == NULL:
                raise MemoryError
            PyTuple_SET_ITEM(values, index, value)
        return <tuple>values


cdef int _store_bytes(unsigned char *memory, Py_ssize_t size, PyObject *value) except -1:
    """Write what ``size`` has room for; the rest of it stays zero."""
    if PyBytes_Check(value):
        memcpy(memory, PyBytes_AS_STRING(value), min(PyBytes_GET_SIZE(value), size))
    elif PyByteArray_Check(value):
        memcpy(memory, PyByteArray_AS_STRING(value), min(PyByteArray_GET_SIZE(value), size))
    else:
        raise error("a field of bytes takes bytes or a bytearray")
    return 0


cdef object _pack_into(object self, PyObject **values, Py_ssize_t count):
    cdef Layout layout = <Layout>self
    cdef Py_buffer view
    cdef Py_ssize_t offset
    if count < 2:
        raise TypeError("pack_into takes a buffer and an offset")
    offset = PyLong_AsSsize_t(values[1])
    PyObject_GetBuffer(<object>values[0], &view, PyBUF_WRITABLE)
    try:
        layout.check(view.len, offset)
        layout.store(<unsigned char *>view.buf + offset, values + 2, count - 2)
    finally:
        PyBuffer_Release(&view)
    return None


cdef PyMethodDef _pack_into_method
_pack_into_method = PyMethodDef("pack_into", <PyCFunction><void *>_pack_into, METH_FASTCALL, NULL)


cdef object _unpack_from(object self, PyObject **values, Py_ssize_t count):
    cdef Layout layout = <Layout>self
    cdef Py_buffer view
    cdef Py_ssize_t offset
    if count != 2:
        raise TypeError("unpack_from takes a buffer and an offset")
    offset = PyLong_AsSsize_t(values[1])
    PyObject_GetBuffer(<object>values[0], &view, PyBUF_SIMPLE)
    try:
        layout.check(view.len, offset)
        return layout.load(<const unsigned char *>view.buf + offset)
    finally:
        PyBuffer_Release(&view)


cdef PyMethodDef _unpack_from_method
_unpack_from_method = PyMethodDef(
    "unpack_from", <PyCFunction><void *>_unpack_from, METH_FASTCALL, NULL
)


def is_flat(buffer, bint writable):
    cdef Py_buffer view
    cdef bint flat
    if not PyMemoryView_Check(buffer):
        return False
    PyObject_GetBuffer(buffer, &view, PyBUF_FULL_RO)
    flat = (
        view.ndim == 1
        and view.itemsize == 1
        and (view.format == NULL or (view.format[0] == c"B" and view.format[1] == 0))
        and not (writable and view.readonly)
        and PyBuffer_IsContiguous(&view, c"C")
    )
    PyBuffer_Release(&view)
    return flat
