"""Make a new connection a queue pair (iWARP), or the byte stream of a login. Runs in trio.

On TCP the first bytes tell which: an MPA Request, which is answered here, or a Login Request. The
login on a byte stream then decides between iSER, whose MPA start-up follows it, and Traditional
iSCSI. On SCTP a DDP Stream Session begins.
"""

from __future__ import annotations

import socket

import trio

from iserblk.datamover.iser import (
    BHS_LENGTH,
    HEADER_LENGTH,
    SEND_INVALIDATE_NOT_SUPPORTED,
    ZBVA_NOT_SUPPORTED,
    ConnectionFlags,
)
from iserblk.errors import RemoteProtocolError
from iserblk.iscsi.bhs import LOGIN_REQUEST, OPCODE_MASK
from iserblk.loop.tasks import until_readable
from iserblk.rcap.iwarp.mpa import MpaParameters, MpaResponder, looks_like_mpa
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.iwarp.sctp import SessionResponder
from iserblk.rcap.iwarp.sctp_association import Association
from iserblk.rcap.iwarp.streaming import StreamingQueuePair
from iserblk.sockets.plain import plain
from iserblk.sockets.stream import SocketStream

# TargetRecvDataSegmentLength. Software iWARP needs no memory for a posted receive.
IWARP_RECEIVE_DATA = 16384
RECEIVE_DATA = 8192  # of an RDMA device, where each receive has registered memory
TCP_RECEIVE_DATA = 262144  # MaxRecvDataSegmentLength of Traditional iSCSI
RECEIVE_SIZE = HEADER_LENGTH + BHS_LENGTH + RECEIVE_DATA
IWARP_RECEIVE_SIZE = HEADER_LENGTH + BHS_LENGTH + IWARP_RECEIVE_DATA
_PEEK = 16  # bytes that tell an MPA Request from an iSCSI Login


def reply_flags(request: ConnectionFlags) -> ConnectionFlags:
    """The flags of the answer: no zero-based addressing; Send with Invalidate if the initiator
    supports it."""
    flags = ZBVA_NOT_SUPPORTED
    if not request.send_invalidate:
        flags |= SEND_INVALIDATE_NOT_SUPPORTED
    return ConnectionFlags(flags)


async def accept(
    sock: trio.socket.SocketType, takes_iser: bool = True
) -> IwarpQueuePair | SocketStream | None:
    """Detect the protocol, and answer MPA start-up, or over SCTP the start of a DDP Stream Session.
    Takes the socket over: it moves into the result, else it is closed. ``takes_iser`` False: the
    answer to an MPA Request is a rejection. None: the peer went away, or was rejected. Raises
    RemoteProtocolError, ConnectionLost, OSError."""
    if sock.proto == socket.IPPROTO_SCTP:
        return await _start_session(sock)
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        iwarp = await is_iwarp(sock)
        if iwarp is None:
            return None
        if not iwarp:
            return SocketStream(plain(sock))
        parameters = await _start_mpa(sock, takes_iser)
        if parameters is None:
            return None
        taken = plain(sock)
    taken.setblocking(False)
    return IwarpQueuePair(taken, parameters, initiator=False, receive_size=IWARP_RECEIVE_SIZE)


async def _start_session(sock: trio.socket.SocketType) -> IwarpQueuePair:
    """Take the DDP Stream Session on a new association. The socket as in ``accept``."""
    association = Association(plain(sock))
    try:
        while (asked := association.receive_control()) is None:
            await until_readable(association)
        responder = SessionResponder()
        parameters = responder.receive(*asked)
        request = ConnectionFlags.unpack(parameters.private_data)
        association.send_control(*responder.accept(reply_flags(request).pack()))
        return association.queue_pair(parameters, initiator=False, receive_size=IWARP_RECEIVE_SIZE)
    except BaseException:
        association.close()
        raise


def streaming_pair(stream: SocketStream) -> StreamingQueuePair:
    """The queue pair that a connection becomes if its login agrees on iSER. CRCs are used only if
    the initiator asks for them."""
    return StreamingQueuePair(stream, initiator=False, crc=False, receive_size=IWARP_RECEIVE_SIZE)


async def is_iwarp(sock: trio.socket.SocketType) -> bool | None:
    """Whether the peer speaks iWARP, not iSCSI; its first bytes stay in the socket. None: the peer
    went away. Raises RemoteProtocolError if it speaks neither."""
    prefix = b""
    while True:
        known = len(prefix)
        prefix = await sock.recv(_PEEK, socket.MSG_PEEK)
        if len(prefix) == known:  # no more bytes: the peer has closed the connection
            return None
        verdict = looks_like_mpa(prefix)
        if known or verdict is None:
            # The bytes stay in the socket. It must count as readable only when more have come.
            at_least = 1 if verdict is not None else len(prefix) + 1
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_least)
        if verdict is not None:
            break
        await until_readable(sock)
    if not verdict and prefix[0] & OPCODE_MASK != LOGIN_REQUEST:
        raise RemoteProtocolError("iSCSI", "the peer speaks neither iSER over iWARP nor iSCSI")
    return verdict


async def _start_mpa(sock: trio.socket.SocketType, takes_iser: bool) -> MpaParameters | None:
    """Answer the MPA Request. None: the peer went away, or was rejected."""
    responder = MpaResponder(crc=False)  # CRCs only if the initiator asks for them
    while True:
        data = await sock.recv(4096)
        if not data:
            return None
        parameters = responder.receive_data(data)
        if parameters is not None:
            if takes_iser:
                request = ConnectionFlags.unpack(parameters.private_data)
                responder.accept(reply_flags(request).pack())
            else:
                responder.reject()
            answer = responder.data_to_send()
            while answer:
                answer = answer[await sock.send(answer) :]
            return parameters if takes_iser else None
