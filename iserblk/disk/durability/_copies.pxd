# The C types of copies.py, for its compiled form.

cimport cython
from libc.stdint cimport uint64_t


cdef Py_ssize_t CHUNK
cdef Py_ssize_t _RECORD


@cython.final
cdef class Copies:
    cdef public Py_ssize_t size
    cdef Py_ssize_t _block
    cdef object _next_chunk
    cdef object _chunk
    cdef object _data
    cdef uint64_t[::1] _index
    cdef Py_ssize_t _used
    cdef Py_ssize_t _at

    @cython.locals(length=Py_ssize_t)
    cpdef keep(self, change)

    @cython.locals(at=Py_ssize_t, stop=Py_ssize_t, used=Py_ssize_t)
    cdef _append(self, sequence, first, data, Py_ssize_t length)

    @cython.locals(left=Py_ssize_t, part=Py_ssize_t, room=Py_ssize_t)
    cpdef copy(self, sequence, first, data)

    @cython.locals(
        newest=uint64_t, index=uint64_t[::1], used=Py_ssize_t, at=Py_ssize_t,
        first=uint64_t, start=uint64_t, block=uint64_t,
    )
    cpdef newest(self, chunks, block)

    cpdef close(self)
