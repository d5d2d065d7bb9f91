"""From a TCP connection to a queue pair, or to a stream of Traditional iSCSI. Runs in trio.

The first bytes tell them apart: an MPA Request, whose responder's side is here, or a Login Request.
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
from iserblk.rcap.iwarp.mpa import MpaParameters, MpaResponder, looks_like_mpa
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.sockets.stream import SocketStream

# TargetRecvDataSegmentLength: over software iWARP a receive is but a number, until a message comes.
IWARP_RECEIVE_DATA = 16384
RECEIVE_DATA = 8192  # of a device, which has memory registered for each
TCP_RECEIVE_DATA = 262144  # MaxRecvDataSegmentLength of Traditional iSCSI
RECEIVE_SIZE = HEADER_LENGTH + BHS_LENGTH + RECEIVE_DATA
IWARP_RECEIVE_SIZE = HEADER_LENGTH + BHS_LENGTH + IWARP_RECEIVE_DATA
_PEEK = 16  # bytes that tell an MPA Request from an iSCSI Login


def reply_flags(request: ConnectionFlags) -> ConnectionFlags:
    """What we say back: no zero-based addressing; Send with Invalidate where it is allowed."""
    flags = ZBVA_NOT_SUPPORTED
    if not request.send_invalidate:
        flags |= SEND_INVALIDATE_NOT_SUPPORTED
    return ConnectionFlags(flags)


async def accept(sock: trio.socket.SocketType) -> IwarpQueuePair | SocketStream | None:
    """Takes the socket over; None when the peer went away. Raises RemoteProtocolError, OSError."""
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        iwarp = await is_iwarp(sock)
        if iwarp is None:
            return None
        if not iwarp:
            return SocketStream(socket.socket(fileno=sock.detach()))
        parameters = await _start_mpa(sock)
        if parameters is None:
            return None
        plain = socket.socket(fileno=sock.detach())
    plain.setblocking(False)
    return IwarpQueuePair(plain, parameters, initiator=False, receive_size=IWARP_RECEIVE_SIZE)


async def is_iwarp(sock: trio.socket.SocketType) -> bool | None:
    """Look at the first bytes, and leave them there; None when the peer went away."""
    prefix = b""
    while True:
        known = len(prefix)
        prefix = await sock.recv(_PEEK, socket.MSG_PEEK)
        if len(prefix) == known:  # nothing behind what there was: the end
            return None
        verdict = looks_like_mpa(prefix)
        if known or verdict is None:
            # Part of the key stays in the socket, which is readable only with more than that.
            at_least = 1 if verdict is not None else len(prefix) + 1
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at_least)
        if verdict is not None:
            break
        await trio.lowlevel.wait_readable(sock)
    if not verdict and prefix[0] & OPCODE_MASK != LOGIN_REQUEST:
        raise RemoteProtocolError("iSCSI", "the peer speaks neither iSER over iWARP nor iSCSI")
    return verdict


async def _start_mpa(sock: trio.socket.SocketType) -> MpaParameters | None:
    """Answer the MPA Request; None when the peer went away."""
    responder = MpaResponder(crc=False)  # CRCs if the initiator wants them: it is its data
    while True:
        data = await sock.recv(4096)
        if not data:
            return None
        parameters = responder.receive_data(data)
        if parameters is not None:
            request = ConnectionFlags.unpack(parameters.private_data)
            responder.accept(reply_flags(request).pack())
            answer = responder.data_to_send()
            while answer:
                answer = answer[await sock.send(answer) :]
            return parameters
