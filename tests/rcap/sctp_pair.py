"""Queue pairs over SCTP, on the kernel's SCTP or on its stand-in."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from typing import TypeVar

from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.rcap.iwarp.sctp import SessionInitiator, SessionResponder
from iserblk.rcap.iwarp.sctp_association import Association, open_socket
from tests.rcap.sctp import fake_association
from tests.rcap.wire import PATIENCE_S

T = TypeVar("T")


def when(association: Association, step: Callable[[], T | None]) -> T:
    """The result of a step, when what it waits for has come."""
    while (result := step()) is None:
        readable, _, _ = select.select([association], [], [], PATIENCE_S)
        assert readable, "nothing came"
    return result


def over(
    first: socket.socket,
    second: socket.socket,
    *,
    ird: int = 64,
    ord: int = 64,
    receive_size: int = 8268,
    private_data: tuple[bytes, bytes] = (b"", b""),
) -> tuple[IwarpQueuePair, IwarpQueuePair]:
    """Initiator and responder over two ends of an association."""
    ours, theirs = Association(first), Association(second)
    when(ours, lambda: ours.is_adapted() or None)
    initiator = SessionInitiator(private_data=private_data[0], ird=ird, ord=ord)
    responder = SessionResponder(ird=ird, ord=ord)
    ours.send_control(*initiator.request)
    asked = responder.receive(*when(theirs, theirs.receive_control))
    theirs.send_control(*responder.accept(private_data[1]))
    agreed = initiator.receive(*when(ours, ours.receive_control))
    return (
        ours.queue_pair(agreed, initiator=True, receive_size=receive_size),
        theirs.queue_pair(asked, initiator=False, receive_size=receive_size),
    )


def fake_pair(
    *, fragmentation_point: int = 65484, small_buffers: bool = False, **options: object
) -> tuple[IwarpQueuePair, IwarpQueuePair]:
    ends = fake_association(fragmentation_point=fragmentation_point, small_buffers=small_buffers)
    return over(*ends, **options)  # type: ignore[arg-type]


def kernel_association(address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Two connected ends, of the kernel. Raises NotSupported."""
    with open_socket(socket.AF_INET) as listener:
        listener.bind((address, 0))
        listener.listen()
        first = open_socket(socket.AF_INET)
        first.settimeout(PATIENCE_S)
        first.connect(listener.getsockname())
        listener.settimeout(PATIENCE_S)
        second, _ = listener.accept()
    for end in (first, second):
        end.setblocking(False)
    return first, second


def kernel_pair(
    *, small_buffers: bool = False, **options: object
) -> tuple[IwarpQueuePair, IwarpQueuePair]:
    ends = kernel_association()
    if small_buffers:
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    return over(*ends, **options)  # type: ignore[arg-type]
