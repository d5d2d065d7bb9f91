"""Connects by TCP, for Traditional iSCSI and for software iWARP; the latter with MPA start-up and
private data. Runs in trio.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import trio

from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    HostNotFound,
    NoMpaReply,
    OtherProtocol,
    RemoteProtocolError,
)
from iserblk.initiator.connecting.login import RECEIVE_SIZE, at_portal
from iserblk.initiator.connecting.protocols import ISCSI, is_stranger, who_untrusted
from iserblk.iscsi.send_targets import needs_interface
from iserblk.loop.patience import Patience, fail_after
from iserblk.loop.tasks import sleep
from iserblk.rcap.iwarp.mpa import MpaInitiator, MpaParameters
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.sockets.pacing import unpace
from iserblk.sockets.plain import plain
from iserblk.sockets.stream import SocketStream

# Seconds between the MPA Reply and the first FPDU. Linux siw gives its socket to the queue pair
# only after the reply has been sent: it overlooks what comes in between until more follows, and its
# kernel may even crash.
SETTLE_S = 0.02

# After how many seconds of silence a portal is asked whether it speaks another protocol. A right
# portal answers an MPA Request at once, unless it is in trouble.
DOUBT_S = 0.7

IS_IT_ISER = "; is it an iSER portal?"  # behind what a peer answers that is no MPA Reply

T = TypeVar("T")


class Address(NamedTuple):
    """One address of a portal: ``sockaddr`` as the system has it for ``family``."""

    family: int
    sockaddr: tuple[Any, ...]


async def resolve(host: str, port: int) -> list[Address]:
    """All addresses of a portal, in the order in which to try them. Raises HostNotFound."""
    try:
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        words = getattr(error, "strerror", None) or error
        remedy = "check the host name"
        if ":" in host and "%" in host:
            remedy = f"is there an interface {host.partition('%')[2]} on this machine?"
        raise HostNotFound(f"cannot resolve {host}: {words}; {remedy}") from None
    addresses = [Address(family, sockaddr) for family, _, _, _, sockaddr in found]
    addresses = [each for each in addresses if not _lacks_interface(each)]
    if not addresses:
        raise HostNotFound(
            f"{host}: a link-local address, which means a portal only together with an interface"
            f" of this machine: write [{found[0][4][0]}%INTERFACE]"
        )
    return addresses


def _lacks_interface(address: Address) -> bool:
    """The kernel refuses it."""
    if address.family != socket.AF_INET6:
        return False
    host, _, _, interface = address.sockaddr
    return not interface and needs_interface(host)


async def connect_iwarp(
    addresses: Sequence[Address],
    portal: str,
    patience: float,
    mpa_patience: float,
    *,
    private_data: bytes,
    crc: bool,
    segments: int,
    ird: int,
    doubt: Callable[[Address], Awaitable[str]] | None = None,
) -> IwarpQueuePair:
    """A queue pair with the first address that answers. Raises TransportError and related errors;
    then nothing is left open. ``patience``: seconds, for TCP; ``mpa_patience``: for MPA start-up.
    ``segments``: see IwarpQueuePair. ``doubt``: finds out who answers at an address, when MPA has
    been silent for DOUBT_S; where it names a protocol, OtherProtocol is raised, else MPA has its
    full time."""
    sock = await connect_tcp(addresses, portal, patience)
    try:
        mpa = MpaInitiator(private_data=private_data, crc=crc, ird=ird)
        with fail_after(mpa_patience):
            if doubt is None:
                parameters = await start_mpa(sock, mpa, portal)
            else:
                here = Address(sock.family, sock.getpeername())
                ask = doubt
                found = await doubting(start_mpa(sock, mpa, portal), lambda: ask(here))
                if isinstance(found, str):
                    raise OtherProtocol(f"{portal} sent no MPA Reply; {found} answers there", found)
                parameters = found
        await sleep(SETTLE_S)
        taken = plain(sock)
    except trio.TooSlowError:
        raise NoMpaReply(
            f"{portal} took the connection, but sent no MPA Reply within {mpa_patience:g} s: "
            "is it an iSER portal? (a Traditional iSCSI portal waits for ever)"
        ) from None
    except OSError as error:
        raise ConnectionLost(
            f"{portal} closed the connection during MPA start-up ({error.strerror}): "
            "is it an iSER portal?"
        ) from None
    finally:
        sock.close()  # does nothing, once detached
    taken.setblocking(False)
    try:  # it sends at once where the connection is opened by a message (RFC 6581 section 9.2)
        return IwarpQueuePair(
            taken, parameters, initiator=True, receive_size=RECEIVE_SIZE, segments=segments
        )
    except BaseException:
        taken.close()
        raise


async def doubting(running: Awaitable[T], doubt: Callable[[], Awaitable[str]]) -> T | str:
    """The result of ``running``. Where it takes longer than DOUBT_S, ``doubt`` runs beside it; if
    that returns some text first, ``running`` is cancelled, and the text is the result. What
    ``running`` has returned is returned also where the caller is cancelled meanwhile: it has a
    connection, which nobody else would close."""
    result: T | None = None
    problem: Exception | None = None
    words = ""
    try:
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                nonlocal words
                await sleep(DOUBT_S)
                words = await doubt()
                if words:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(ask)
            try:
                result = await running
            except Exception as error:  # told without the group that a nursery makes of it
                problem = error
            nursery.cancel_scope.cancel()
    except BaseException as error:
        others = BaseExceptionGroup("", [error]).split(trio.Cancelled)[1]
        if result is None or others is not None:
            raise
    if problem is not None:
        raise problem
    return words if result is None else result


async def connect_stream(
    addresses: Sequence[Address], portal: str, patience: float
) -> SocketStream:
    """The stream of Traditional iSCSI to the first address that answers; errors as connect_tcp."""
    sock = await connect_tcp(addresses, portal, patience)
    return SocketStream(plain(sock))


async def connect_tcp(
    addresses: Sequence[Address],
    portal: str,
    patience: float,
    hint: str = "is the target listening there?",
) -> trio.socket.SocketType:
    """A socket that is connected to the first address that answers. ``hint``: behind the reason why
    there is none."""
    reason = "no address"
    left = Patience(patience)
    for family, sockaddr in addresses:
        try:
            sock = trio.socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # a name may have addresses of a family that is switched off here
            reason = error.strerror or str(error)
            continue
        try:
            unpace(sock, sockaddr)
            with left.required():
                await sock.connect(sockaddr)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except trio.TooSlowError:
            sock.close()
            raise ConnectTimeout(
                f"{portal} did not answer within {patience:g} s; "
                "check the address, and firewalls on the way"
            ) from None
        except OSError as error:
            sock.close()
            # Not the strerror of trio's error: it repeats the address, in Python's words.
            reason = os.strerror(error.errno) if error.errno else str(error)
        except BaseException:
            sock.close()
            raise
    raise ConnectFailed(f"cannot connect to {portal}: {reason}; {hint}")


async def start_mpa(sock: trio.socket.SocketType, mpa: MpaInitiator, portal: str) -> MpaParameters:
    """Do MPA start-up. Raises RemoteProtocolError, OtherProtocol, ConnectionLost, OSError; the
    socket stays open."""
    request = mpa.data_to_send()
    while request:
        request = request[await sock.send(request) :]
    while True:
        data = await sock.recv(4096)
        if not data:
            raise ConnectionLost(
                f"{portal} closed the connection during MPA start-up: is it an iSER portal?"
            )
        try:
            parameters = mpa.receive_data(data)
        except RemoteProtocolError as error:
            last_words = mpa.data_to_send()
            if last_words:
                await sock.send(last_words)
            who = who_untrusted(data)
            if who == ISCSI or is_stranger(who):
                raise OtherProtocol(f"{portal}: {who} answers there", who) from None
            raise at_portal(portal, error, IS_IT_ISER) from None
        if parameters is not None:
            return parameters
