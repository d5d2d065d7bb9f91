# cython: language_level=3
"""``iserblk.sockets.wire.Wire`` on a descriptor, with system calls that keep the GIL for few bytes.

Every buffer is taken through the buffer protocol and released before return: no pointer outlives a
call. Nor does an array: a connection costs this small object only, and threads that send on several
connections share nothing. All lengths are those of the buffers: none comes from a peer. The
descriptor is non-blocking, and each call also passes MSG_DONTWAIT, so none can wait.
"""

from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.errno cimport EAGAIN, EINTR, errno

import os

cdef extern from "sys/uio.h" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len

cdef extern from "sys/socket.h" nogil:
    struct msghdr:
        iovec *msg_iov
        size_t msg_iovlen
    ssize_t c_sendmsg "sendmsg"(int fd, const msghdr *message, int flags)
    ssize_t c_recvmsg "recvmsg"(int fd, msghdr *message, int flags)
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    int MSG_EOR

cdef extern from "string.h" nogil:
    void *memset(void *destination, int value, size_t size)

cdef enum:
    MAX_BUFFERS = 1024  # IOV_MAX
    # Arrays for so many buffers lie on the stack (12 KiB), of which a call touches what it uses. A
    # send of more takes memory for itself, which such a send does not notice.
    FEW_BUFFERS = 128
    # From so many bytes on, copying takes longer than a switch of threads: the GIL is released.
    LARGE = 65536


cdef class SyscallWire:
    """Implements Wire. One thread at a time may send, and one may receive: the owner ensures it."""

    cdef int fd
    cdef public bint end_of_record
    cdef ssize_t last_received

    def __cinit__(self, int fd, bint end_of_record):
        self.fd = fd
        self.end_of_record = end_of_record
        self.last_received = 0

    def send(self, list buffers, Py_ssize_t size):
        cdef Py_ssize_t count = len(buffers)
        cdef Py_ssize_t taken = 0
        cdef Py_ssize_t index
        cdef ssize_t sent
        cdef int error
        cdef int flags = MSG_DONTWAIT | MSG_NOSIGNAL
        cdef msghdr message
        cdef Py_buffer few_views[FEW_BUFFERS]
        cdef iovec few_vectors[FEW_BUFFERS]
        cdef Py_buffer *views = few_views
        cdef iovec *vectors = few_vectors
        cdef void *memory = NULL
        if self.end_of_record:
            flags |= MSG_EOR
        if count > FEW_BUFFERS:
            if count > MAX_BUFFERS:
                raise ValueError("too many buffers")
            memory = PyMem_Malloc(count * (sizeof(Py_buffer) + sizeof(iovec)))
            if memory == NULL:
                raise MemoryError
            views = <Py_buffer *>memory
            vectors = <iovec *>(views + count)
        memset(&message, 0, sizeof(message))
        message.msg_iov = vectors
        message.msg_iovlen = count
        try:
            while taken < count:
                PyObject_GetBuffer(buffers[taken], &views[taken], PyBUF_SIMPLE)
                vectors[taken].iov_base = views[taken].buf
                vectors[taken].iov_len = views[taken].len
                taken += 1
            if size >= LARGE:
                with nogil:
                    sent = c_sendmsg(self.fd, &message, flags)
            else:
                sent = c_sendmsg(self.fd, &message, flags)
            error = errno
        finally:
            for index in range(taken):
                PyBuffer_Release(&views[index])
            PyMem_Free(memory)
        return result(sent, error)

    def receive(self, list buffers):
        cdef Py_buffer views[2]
        cdef iovec vectors[2]
        cdef Py_ssize_t count = len(buffers)
        cdef Py_ssize_t taken = 0
        cdef Py_ssize_t index
        cdef ssize_t received
        cdef int error
        cdef msghdr message
        if count > 2:
            raise ValueError("too many buffers")
        memset(&message, 0, sizeof(message))
        message.msg_iov = vectors
        message.msg_iovlen = count
        try:
            while taken < count:
                PyObject_GetBuffer(buffers[taken], &views[taken], PyBUF_WRITABLE)
                vectors[taken].iov_base = views[taken].buf
                vectors[taken].iov_len = views[taken].len
                taken += 1
            # After a large receive the next may be large, too.
            if self.last_received >= LARGE:
                with nogil:
                    received = c_recvmsg(self.fd, &message, MSG_DONTWAIT)
            else:
                received = c_recvmsg(self.fd, &message, MSG_DONTWAIT)
            error = errno
        finally:
            for index in range(taken):
                PyBuffer_Release(&views[index])
        self.last_received = received
        return result(received, error)


cdef object result(ssize_t value, int error):
    if value >= 0:
        return value
    if error == EAGAIN or error == EINTR:
        return -1
    raise OSError(error, os.strerror(error))
