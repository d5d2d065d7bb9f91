# cython: language_level=3
"""What each FPDU takes, in one call: ``iserblk.rcap.iwarp.frames`` uses it where it was compiled.

Each buffer is taken through the buffer protocol and released before return. Every position is
compared with the length of its buffer before a byte is read or written, and one that lies outside
raises IndexError. A number that is wider than its field raises OverflowError.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

cdef extern from "isa-l/crc.h" nogil:
    # Neither value is inverted. ``length`` is an int.
    unsigned int crc32_iscsi(unsigned char *data, int length, unsigned int initial)

cdef extern from "endian.h" nogil:
    uint16_t htobe16(uint16_t number)
    uint32_t htobe32(uint32_t number)
    uint64_t htobe64(uint64_t number)
    uint16_t be16toh(uint16_t number)
    uint32_t be32toh(uint32_t number)
    uint64_t be64toh(uint64_t number)
    uint32_t htole32(uint32_t number)

cdef enum:
    TAGGED_SIZE = 16
    UNTAGGED_SIZE = 20
    CRC_SIZE = 4
    LENGTH_SIZE = 2
    MAX_ULPDU = 65535
    MAX_FPDU = 65544
    GOOD_CRC = 0x48674BC7


cdef inline uint32_t crc_of(const unsigned char *data, Py_ssize_t length, uint32_t value):
    """The CRC of ``data``, which is MAX_FPDU bytes at most, continued from ``value``."""
    return ~crc32_iscsi(<unsigned char *>data, <int>length, ~value)


cdef inline void store2(unsigned char *at, uint16_t number):
    number = htobe16(number)
    memcpy(at, &number, 2)


cdef inline void store4(unsigned char *at, uint32_t number):
    number = htobe32(number)
    memcpy(at, &number, 4)


def look(buffer, Py_ssize_t at, Py_ssize_t stop, bint crc):
    cdef Py_buffer view
    cdef uint16_t length, control
    cdef uint32_t stag, mo
    cdef uint64_t to
    cdef Py_ssize_t size
    cdef bint good
    cdef const unsigned char *start
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    if at < 0 or stop < UNTAGGED_SIZE or stop > view.len or stop - UNTAGGED_SIZE < at:
        PyBuffer_Release(&view)
        raise IndexError("a header that is not in the buffer")
    start = <const unsigned char *>view.buf + at
    memcpy(&length, start, 2)
    memcpy(&control, start + 2, 2)
    memcpy(&stag, start + 4, 4)
    memcpy(&to, start + 8, 8)
    memcpy(&mo, start + 16, 4)
    length = be16toh(length)
    size = ((length + LENGTH_SIZE + 3) & ~3) + CRC_SIZE
    good = length >= TAGGED_SIZE - LENGTH_SIZE and size <= stop - at
    if good and crc:
        good = crc_of(start, size, 0) == GOOD_CRC
    PyBuffer_Release(&view)
    return length, be16toh(control), be32toh(stag), be64toh(to), be32toh(mo), good


def place(target, Py_ssize_t to, source, Py_ssize_t start, Py_ssize_t size):
    cdef Py_buffer into, outof
    PyObject_GetBuffer(target, &into, PyBUF_WRITABLE)
    try:
        PyObject_GetBuffer(source, &outof, PyBUF_SIMPLE)
        try:
            if (
                size < 0
                or to < 0
                or into.len - size < to
                or start < 0
                or outof.len - size < start
            ):
                raise IndexError("a place that is not in its buffer")
            memcpy(<char *>into.buf + to, <const char *>outof.buf + start, size)
        finally:
            PyBuffer_Release(&outof)
    finally:
        PyBuffer_Release(&into)


def fill_send(
    frame, uint16_t ulpdu, uint16_t control, uint32_t invalidate, uint32_t msn, bint crc
):
    cdef Py_buffer view
    cdef unsigned char *start
    cdef Py_ssize_t covered
    cdef uint32_t value
    PyObject_GetBuffer(frame, &view, PyBUF_WRITABLE)
    covered = view.len - CRC_SIZE
    if covered < UNTAGGED_SIZE or view.len > MAX_FPDU:
        PyBuffer_Release(&view)
        raise IndexError("a frame of another length")
    start = <unsigned char *>view.buf
    store2(start, ulpdu)
    store2(start + 2, control)
    store4(start + 4, invalidate)
    store4(start + 8, 0)
    store4(start + 12, msn)
    store4(start + 16, 0)
    if crc:
        value = htole32(crc_of(start, covered, 0))
        memcpy(start + covered, &value, CRC_SIZE)
    PyBuffer_Release(&view)


def around_tagged(data, uint16_t control, uint32_t stag, uint64_t to, bint crc):
    cdef Py_buffer view
    cdef unsigned char header[TAGGED_SIZE]
    cdef unsigned char trailer[3 + CRC_SIZE]
    cdef uint32_t value
    cdef Py_ssize_t size, pad
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    size = view.len
    if size > MAX_ULPDU - TAGGED_SIZE + LENGTH_SIZE:
        PyBuffer_Release(&view)
        raise IndexError("more data than a frame has")
    pad = -size & 3
    store2(header, <uint16_t>(size + TAGGED_SIZE - LENGTH_SIZE))
    store2(header + 2, control)
    store4(header + 4, stag)
    to = htobe64(to)
    memcpy(header + 8, &to, 8)
    memset(trailer, 0, sizeof(trailer))
    if crc:
        value = crc_of(header, TAGGED_SIZE, 0)
        value = crc_of(<const unsigned char *>view.buf, size, value)
        value = htole32(crc_of(trailer, pad, value))
        memcpy(trailer + pad, &value, CRC_SIZE)
    PyBuffer_Release(&view)
    return (
        PyBytes_FromStringAndSize(<const char *>header, TAGGED_SIZE),
        PyBytes_FromStringAndSize(<const char *>trailer, pad + CRC_SIZE),
    )
