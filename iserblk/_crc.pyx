# cython: language_level=3
"""``iserblk.crc`` by ISA-L, which has a form for each generation of processors.

A buffer is taken through the buffer protocol and given back before return.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer

cdef extern from "isa-l/crc.h" nogil:
    # Neither value is inverted. ``length`` is an int.
    unsigned int crc32_iscsi(unsigned char *data, int length, unsigned int initial)

cdef enum:
    # Bytes from which on the GIL is given up: 20 to 40 us of work.
    LARGE = 1 << 20


def crc32c(data, unsigned int value=0):
    """See ``iserblk.crc``."""
    cdef Py_buffer view
    cdef unsigned char *rest
    cdef Py_ssize_t left
    cdef unsigned int crc = ~value
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    rest, left = <unsigned char *>view.buf, view.len
    while left >= LARGE:
        with nogil:
            crc = crc32_iscsi(rest, LARGE, crc)
        rest += LARGE
        left -= LARGE
    crc = crc32_iscsi(rest, <int>left, crc)
    PyBuffer_Release(&view)
    return ~crc
