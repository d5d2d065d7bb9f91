"""What an initiator has sent when it cuts a connection does not arrive later."""

from __future__ import annotations

import select
import socket
from contextlib import suppress

import pytest

from iserblk.errors import ConnectionLost
from iserblk.rcap import seam
from iserblk.rcap.iwarp import ddp, mpa
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.sockets.stream import SocketStream
from tests.rcap.wire import connected_sockets, fpdu, start_up

MESSAGE = bytes(8192)


def _arrives(peer: socket.socket) -> int:
    """How many bytes arrive when the peer reads at last."""
    peer.settimeout(20)
    count = 0
    with suppress(ConnectionResetError):
        while data := peer.recv(1 << 20):
            count += len(data)
    peer.close()
    return count


@pytest.mark.parametrize("discard", [True, False])
def test_stream(discard: bool) -> None:
    ours, peer = connected_sockets()
    stream = SocketStream(ours)
    sent = 0
    while True:
        left = stream.send([MESSAGE], len(MESSAGE))
        if left < 0:
            break
        sent += left
    stream.disconnect(discard)
    stream.close()
    assert (_arrives(peer) < sent) == discard


@pytest.mark.parametrize("initiator", [True, False])
def test_queue_pair(initiator: bool) -> None:
    """A target's last answers leave in any case."""
    ours, peer = connected_sockets()
    one, two = mpa.MpaInitiator(ird=1, ord=1, rtr=0), mpa.MpaResponder(ird=1, ord=1)
    params = start_up(one, two)[not initiator]
    pair = IwarpQueuePair(ours, params, initiator=initiator)
    if not initiator:  # it sends nothing before the first message has come
        pair.post_receive(1)
        peer.sendall(fpdu(ddp.UntaggedHeader(18, 0x4143, 0, ddp.QN_SEND, 1, 0), b""))
        assert select.select([pair], [], [], 20)[0]
        assert pair.progress(0.0)
    sent = 0
    while not pair.wants_write():
        request = seam.WorkRequest(seam.SEND_SE)
        request.data = memoryview(MESSAGE)
        pair.post([request])
        sent += len(MESSAGE)
    sent -= len(MESSAGE)
    pair.disconnect()
    with suppress(ConnectionLost):
        pair.progress(0.0)
    pair.close()
    assert (_arrives(peer) < sent) == initiator
