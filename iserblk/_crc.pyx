# cython: language_level=3
"""CRC32C by ISA-L, which has an implementation for each generation of processors.

``iserblk.crc`` uses this module where it was compiled. The caller's buffer is taken through the
buffer protocol and released before return.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer

cdef extern from "isa-l/crc.h" nogil:
    # Neither value is inverted. ``length`` is an int.
    unsigned int crc32_iscsi(unsigned char *data, int length, unsigned int initial)

cdef enum:
    # Bytes from which on the GIL is released: 20 to 40 us of work.
    LARGE = 1 << 20


def crc32c(data, unsigned int value=0):
    """CRC32C of ``data``, continued from ``value``: see ``iserblk.crc``."""
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
    crc = crc32_iscsi(rest, <int>left, crc)  # below LARGE: an int holds it
    PyBuffer_Release(&view)
    return ~crc
