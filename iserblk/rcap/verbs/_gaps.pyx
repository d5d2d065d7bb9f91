# cython: language_level=3
"""Functions that pyverbs 44 lacks, for its objects. Each function names the gap that it fills.

Compiled against the headers of the distribution. The layouts of pyverbs' objects are declared
below. When this module is imported, they are checked against the sizes of pyverbs' types: with
another pyverbs the import fails, and ``engine.PlainEngine`` is used instead. Pointers are taken
from objects that the caller keeps alive; after ``Engine.close`` the engine uses none of them.
Numbers are taken as the C types of the arguments: what does not fit raises OverflowError, and
nothing is posted. Of a peer there are only STags and Tagged Offsets, which are passed on.
"""

from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memset

import os

cdef extern from "<infiniband/verbs.h>" nogil:
    struct ibv_qp_t "ibv_qp":
        uint32_t qp_num
    struct ibv_cq_t "ibv_cq":
        int cqe
    struct ibv_mr_t "ibv_mr":
        uint32_t lkey
        uint32_t rkey
    struct ibv_mw_t "ibv_mw":
        uint32_t rkey
    struct ibv_comp_channel:
        int fd
    struct ibv_sge:
        uint64_t addr
        uint32_t length
        uint32_t lkey
    struct ibv_mw_bind_info:
        ibv_mr_t *mr
        uint64_t addr
        uint64_t length
        unsigned int mw_access_flags
    struct rdma_part:
        uint64_t remote_addr
        uint32_t rkey
    struct bind_part:
        ibv_mw_t *mw
        uint32_t rkey
        ibv_mw_bind_info bind_info
    union wr_part:
        rdma_part rdma
    struct ibv_send_wr:
        uint64_t wr_id
        ibv_send_wr *next
        ibv_sge *sg_list
        int num_sge
        int opcode
        unsigned int send_flags
        uint32_t invalidate_rkey
        wr_part wr
        bind_part bind_mw
    struct ibv_recv_wr:
        uint64_t wr_id
        ibv_recv_wr *next
        ibv_sge *sg_list
        int num_sge
    struct ibv_wc:
        uint64_t wr_id
        int status
        uint32_t vendor_err
        uint32_t byte_len
        uint32_t invalidated_rkey
        unsigned int wc_flags
    int ibv_post_send(ibv_qp_t *qp, ibv_send_wr *wr, ibv_send_wr **bad)
    int ibv_post_recv(ibv_qp_t *qp, ibv_recv_wr *wr, ibv_recv_wr **bad)
    int ibv_poll_cq(ibv_cq_t *cq, int count, ibv_wc *entries)
    int ibv_req_notify_cq(ibv_cq_t *cq, int solicited_only)
    int ibv_get_cq_event(ibv_comp_channel *channel, ibv_cq_t **cq, void **context)
    void ibv_ack_cq_events(ibv_cq_t *cq, unsigned int count)
    uint32_t ibv_inc_rkey(uint32_t rkey)

cdef extern from "<rdma/rdma_cma.h>" nogil:
    struct rdma_event_channel:
        int fd
    struct rdma_cm_id:
        void *verbs  # the device's context
    struct rdma_cm_event:
        int event
        int status
    struct sockaddr:
        pass
    uint16_t rdma_get_src_port(rdma_cm_id *identifier)
    int rdma_bind_addr(rdma_cm_id *identifier, sockaddr *address)
    int rdma_migrate_id(rdma_cm_id *identifier, rdma_event_channel *channel)

cdef extern from "<arpa/inet.h>" nogil:
    uint16_t ntohs(uint16_t value)

cdef extern from *:
    """
    /* Instances of pyverbs' types, as far as they matter here; the sizes are checked. */
    #define PYVERBS_HEAD PyObject_HEAD PyObject *weakrefs; PyObject *logger; void *methods;
    typedef struct { PYVERBS_HEAD struct ibv_qp *qp; void *others[10]; } pyverbs_qp;
    typedef struct { PYVERBS_HEAD struct ibv_cq *cq; void *others[6]; } pyverbs_cq;
    typedef struct { PYVERBS_HEAD struct ibv_comp_channel *cc; void *others[2]; } pyverbs_cc;
    typedef struct { PYVERBS_HEAD void *first[2]; struct ibv_mr *mr; void *others[5]; } pyverbs_mr;
    typedef struct { PYVERBS_HEAD PyObject *pd; struct ibv_mw *mw; } pyverbs_mw;
    typedef struct { PYVERBS_HEAD struct rdma_cm_id *id; void *others[4]; } pyverbs_id;
    typedef struct { PYVERBS_HEAD struct rdma_event_channel *event_channel; } pyverbs_channel;
    typedef struct { PYVERBS_HEAD struct rdma_cm_event *event; } pyverbs_event;
    """
    ctypedef class pyverbs.qp.QP [object pyverbs_qp, check_size error]:
        cdef ibv_qp_t *qp
    ctypedef class pyverbs.cq.CQ [object pyverbs_cq, check_size error]:
        cdef ibv_cq_t *cq
    ctypedef class pyverbs.cq.CompChannel [object pyverbs_cc, check_size error]:
        cdef ibv_comp_channel *cc
    ctypedef class pyverbs.mr.MR [object pyverbs_mr, check_size error]:
        cdef ibv_mr_t *mr
    ctypedef class pyverbs.mr.MW [object pyverbs_mw, check_size error]:
        cdef ibv_mw_t *mw
    ctypedef class pyverbs.cmid.CMID [object pyverbs_id, check_size error]:
        cdef rdma_cm_id *id
    ctypedef class pyverbs.cmid.CMEventChannel [object pyverbs_channel, check_size error]:
        cdef rdma_event_channel *event_channel
    ctypedef class pyverbs.cmid.CMEvent [object pyverbs_event, check_size error]:
        cdef rdma_cm_event *event

cdef enum:
    BATCH = 128  # work requests given to the device in one call
    POLL = 64
    LOCAL_INV = 7
    BIND_MW = 8
    SEND_WITH_INV = 9
    SEND = 2


def channel_descriptor(CMEventChannel channel not None):
    """The descriptor of an event channel. Gap: CMEventChannel shows none."""
    if channel.event_channel == NULL:
        raise ValueError("the channel is closed")
    return channel.event_channel.fd


def completion_descriptor(CompChannel channel not None):
    """The descriptor of a completion channel. Gap: CompChannel shows none (before pyverbs 57)."""
    if channel.cc == NULL:
        raise ValueError("the channel is closed")
    return channel.cc.fd


def event_status(CMEvent event not None):
    """The status of an event: the reason of a reject, or a negative errno. Gap: CMEvent does not
    show it."""
    if event.event == NULL:
        raise ValueError("the event was acknowledged")
    return event.event.status


def bind(CMID identifier not None, bytes address not None):
    """Bind to ``address``, a struct sockaddr. Returns whether the address belongs to a device.

    Gap: CMID.bind_addr makes objects of the device at once, and crashes for an address without a
    device: a wildcard, or loopback."""
    if identifier.id == NULL:
        raise ValueError("the identifier is closed")
    if rdma_bind_addr(identifier.id, <sockaddr *><char *>address):
        raise _error(errno)
    return identifier.id.verbs != NULL


def source_port(CMID identifier not None):
    """The port that an identifier is bound to. Gap: CMID does not tell it."""
    if identifier.id == NULL:
        raise ValueError("the identifier is closed")
    return ntohs(rdma_get_src_port(identifier.id))


def migrate(CMID identifier not None, CMEventChannel channel not None):
    """Move an identifier to ``channel``. Gap: an accepted CMID stays on the event channel of its
    listener, and events do not tell which identifier they are about."""
    if identifier.id == NULL or channel.event_channel == NULL:
        raise ValueError("closed")
    if rdma_migrate_id(identifier.id, channel.event_channel):
        raise _error(errno)


def check_region(MR region not None):
    """Check the layout of MR by its values, as sizes alone do not show all. Raises ValueError when
    this pyverbs keeps its regions in another way than is declared here."""
    if region.mr == NULL or region.mr.lkey != (<object>region).lkey:
        raise ValueError("the regions of this pyverbs are laid out in another way")


def check_window(MW window not None):
    """Check the layout of MW, as ``check_region`` does that of MR."""
    if window.mw == NULL or window.mw.rkey != (<object>window).rkey:
        raise ValueError("the windows of this pyverbs are laid out in another way")


def set_window_key(MW window not None, uint32_t key):
    """Set the key of a window after a type 2 bind; without that the next bind would fail. Gap:
    MW.rkey cannot be set, and pyverbs does not set it itself."""
    if window.mw == NULL:
        raise ValueError("the window is closed")
    window.mw.rkey = key


cdef class Engine:
    """Implements ``engine.Engine``. Gap: pyverbs makes several objects for each work request and
    completion, and posts one request at a time."""

    cdef QP _qp
    cdef CQ _cq
    cdef CompChannel _channel
    cdef bint _open
    cdef int _count
    cdef int _receive_count
    cdef ibv_send_wr _sends[BATCH]
    cdef ibv_sge _pieces[2 * BATCH]
    cdef ibv_recv_wr _receives[BATCH]
    cdef ibv_sge _receive_pieces[BATCH]
    cdef ibv_wc _entries[POLL]

    def __cinit__(self, QP qp not None, CQ cq not None, CompChannel channel not None):
        if qp.qp == NULL or cq.cq == NULL or channel.cc == NULL:
            raise ValueError("closed")
        # The declared layouts once more, by values that pyverbs itself shows.
        if qp.qp.qp_num != (<object>qp).qp_num or cq.cq.cqe != (<object>cq).cqe:
            raise ValueError("the objects of this pyverbs are laid out in another way")
        self._qp = qp
        self._cq = cq
        self._channel = channel
        self._open = True

    cdef int _check(self) except -1:
        if not self._open or self._qp.qp == NULL or self._cq.cq == NULL:
            raise _error(9)
        return 0

    cdef ibv_send_wr *_next(self, uint64_t number, int opcode, int flags) except NULL:
        cdef ibv_send_wr *request
        self._check()
        if self._count == BATCH:
            self.post()
        request = &self._sends[self._count]
        memset(request, 0, sizeof(ibv_send_wr))
        request.wr_id = number
        request.opcode = opcode
        request.send_flags = flags
        self._count += 1
        return request

    def send(
        self, uint64_t number, int opcode, int flags, uint32_t stag, uint64_t to,
        uint64_t address1, uint32_t length1, uint32_t key1,
        uint64_t address2, uint32_t length2, uint32_t key2,
    ):
        cdef ibv_send_wr *request = self._next(number, opcode, flags)
        cdef ibv_sge *piece = &self._pieces[2 * (self._count - 1)]
        request.sg_list = piece
        if length1:
            piece.addr = address1
            piece.length = length1
            piece.lkey = key1
            piece += 1
            request.num_sge += 1
        if length2:
            piece.addr = address2
            piece.length = length2
            piece.lkey = key2
            request.num_sge += 1
        if opcode == SEND_WITH_INV:
            request.invalidate_rkey = stag
        elif opcode != SEND:
            request.wr.rdma.remote_addr = to
            request.wr.rdma.rkey = stag

    def bind(
        self, uint64_t number, int flags, MW window not None, MR region not None,
        uint64_t address, uint64_t length, unsigned int access,
    ):
        cdef ibv_send_wr *request
        if window.mw == NULL or region.mr == NULL:
            raise ValueError("closed")
        request = self._next(number, BIND_MW, flags)
        request.bind_mw.mw = window.mw
        request.bind_mw.rkey = ibv_inc_rkey(window.mw.rkey)
        request.bind_mw.bind_info.mr = region.mr
        request.bind_mw.bind_info.addr = address
        request.bind_mw.bind_info.length = length
        request.bind_mw.bind_info.mw_access_flags = access
        return request.bind_mw.rkey

    def invalidate(self, uint64_t number, int flags, uint32_t key):
        self._next(number, LOCAL_INV, flags).invalidate_rkey = key

    def post(self):
        cdef ibv_send_wr *bad = NULL
        cdef int index, result
        cdef int count = self._count
        if not count:
            return
        self._check()
        self._count = 0
        for index in range(count - 1):
            self._sends[index].next = &self._sends[index + 1]
        self._sends[count - 1].next = NULL
        result = ibv_post_send(self._qp.qp, self._sends, &bad)
        if result:
            raise _error(result)
        for index in range(count):
            if self._sends[index].opcode == BIND_MW:
                # The library read the old key when the bind was posted; the next starts from this.
                self._sends[index].bind_mw.mw.rkey = self._sends[index].bind_mw.rkey

    def receive(self, uint64_t number, uint64_t address, uint32_t length, uint32_t key):
        cdef ibv_recv_wr *request
        cdef ibv_sge *piece
        self._check()
        if self._receive_count == BATCH:
            self.post_receives()
        request = &self._receives[self._receive_count]
        piece = &self._receive_pieces[self._receive_count]
        piece.addr = address
        piece.length = length
        piece.lkey = key
        request.wr_id = number
        request.next = NULL
        request.sg_list = piece
        request.num_sge = 1
        self._receive_count += 1

    def post_receives(self):
        cdef ibv_recv_wr *bad = NULL
        cdef int index, result
        cdef int count = self._receive_count
        if not count:
            return
        self._check()
        self._receive_count = 0
        for index in range(count - 1):
            self._receives[index].next = &self._receives[index + 1]
        result = ibv_post_recv(self._qp.qp, self._receives, &bad)
        if result:
            raise _error(result)

    def poll(self, int limit):
        cdef int count, index
        cdef ibv_wc *entry
        self._check()
        count = ibv_poll_cq(self._cq.cq, min(limit, POLL), self._entries)
        if count < 0:
            raise _error(errno or 5)
        entries = []
        for index in range(count):
            entry = &self._entries[index]
            entries.append(
                (
                    entry.wr_id,
                    entry.status,
                    entry.byte_len,
                    entry.wc_flags,
                    entry.invalidated_rkey,
                    entry.vendor_err,
                )
            )
        return entries

    def event(self):
        cdef ibv_cq_t *cq
        cdef void *context
        self._check()
        if ibv_get_cq_event(self._channel.cc, &cq, &context):
            if errno in (EAGAIN, EINTR):
                return False
            raise _error(errno)
        ibv_ack_cq_events(cq, 1)
        return True

    def arm(self):
        cdef int result
        self._check()
        result = ibv_req_notify_cq(self._cq.cq, 0)
        if result:
            raise _error(result)

    def close(self):
        """Use no pointer any more. To be called before the queue pair is closed."""
        self._open = False


cdef object _error(int number):
    return OSError(number, os.strerror(number))
