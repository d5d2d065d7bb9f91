# cython: language_level=3
"""A read from a file, in one quick call: ``iserblk.files`` uses it where it was compiled.

The buffer is taken through the buffer protocol and released before return, and its length is the
number of bytes that the system may write. Nothing here comes from a peer.
"""

from cpython.buffer cimport (
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EINTR, errno

import os

cdef extern from "sys/types.h" nogil:
    ctypedef long long off_t

cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t preadv2(int fd, const iovec *vectors, int count, off_t offset, int flags)

cdef enum:
    # From so many bytes on, copying takes longer than a switch of threads: the GIL is released.
    LARGE = 65536


def read_at(int fd, buffer, off_t offset, int flags):
    cdef Py_buffer view
    cdef iovec vector
    cdef ssize_t count
    cdef int error
    PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE)
    try:
        vector.iov_base = view.buf
        vector.iov_len = view.len
        while True:
            if view.len >= LARGE:
                with nogil:
                    count = preadv2(fd, &vector, 1, offset, flags)
                    error = errno
            else:
                count = preadv2(fd, &vector, 1, offset, flags)
                error = errno
            if count >= 0 or error != EINTR:
                break
            PyErr_CheckSignals()
    finally:
        PyBuffer_Release(&view)
    if count < 0:
        raise OSError(error, os.strerror(error))
    return count
