"""Connect and log in: from a URL to a Session in full feature phase. Runs in trio.

TCP, MPA start-up with the iSER connection flags as private data, then login PDUs in Sends
(the ``cm`` style of running code).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections import deque
from time import monotonic

import trio

from iserblk.datamover.iser import (
    BHS_LENGTH,
    HEADER_LENGTH,
    ZBVA_NOT_SUPPORTED,
    ConnectionFlags,
)
from iserblk.datamover.iser_initiator import IserInitiator
from iserblk.datamover.seam import INLINE
from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    HostNotFound,
    IserblkError,
    RemoteProtocolError,
)
from iserblk.initiator.session import CONTROL_SLOTS, UNEXPECTED, Session
from iserblk.initiator.task import TaskSlot
from iserblk.iscsi import bhs
from iserblk.iscsi.login_initiator import LoginInitiator, LoginInitiatorConfig
from iserblk.rcap.iwarp.mpa import MpaInitiator, MpaParameters
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.url import Options, Url, initiator_name

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
LOGIN_TIMEOUT_S = 20.0
RECEIVE_DATA = 8192  # InitiatorRecvDataSegmentLength
RECEIVE_SIZE = HEADER_LENGTH + BHS_LENGTH + RECEIVE_DATA
INLINE_SIZE = 8192  # data behind a BHS of ours: login text, immediate data
READ_DEPTH = 64  # RDMA Reads that a target may have outstanding: IRD


async def connect(url: Url, options: Options) -> Session:
    """A session with the target of ``url``. Its driver is the caller's to start.

    Raises TransportError, LoginError and their kin; then nothing is left open.
    """
    portal = f"[{url.host}]:{url.port}" if ":" in url.host else f"{url.host}:{url.port}"
    sock = await _connect_tcp(url.host, url.port, portal)
    try:
        with trio.fail_after(CONNECT_TIMEOUT_S):
            parameters = await _start_mpa(sock, options, portal)
        plain = socket.socket(fileno=sock.detach())
    except trio.TooSlowError:
        raise ConnectTimeout(
            f"{portal} took the connection, but sent no MPA Reply within {CONNECT_TIMEOUT_S:g} s: "
            "is it an iSER portal? (a Traditional iSCSI portal waits for ever)"
        ) from None
    except OSError as error:
        raise ConnectionLost(
            f"{portal} closed the connection during MPA start-up ({error.strerror}): "
            "is it an iSER portal?"
        ) from None
    finally:
        sock.close()  # nothing any more, once detached
    plain.setblocking(False)
    qp = IwarpQueuePair(plain, parameters, initiator=True, receive_size=RECEIVE_SIZE)
    try:
        with trio.fail_after(LOGIN_TIMEOUT_S):
            return await _Login(qp, url, options, portal).run()
    except trio.TooSlowError:
        qp.close()
        raise ConnectTimeout(
            f"{portal}: no login within {LOGIN_TIMEOUT_S:g} s; does the target answer others?"
        ) from None
    except BaseException:
        qp.close()
        raise


async def _connect_tcp(host: str, port: int, portal: str) -> trio.socket.SocketType:
    """The first address that answers, as a connected socket."""
    try:
        addresses = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        words = getattr(error, "strerror", None) or error
        raise HostNotFound(f"cannot resolve {host}: {words}; check the host name") from None
    reason = "no address"
    deadline = trio.current_time() + CONNECT_TIMEOUT_S
    for family, kind, protocol, _, address in addresses:
        sock = trio.socket.socket(family, kind, protocol)
        try:
            with trio.fail_at(deadline):
                await sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except trio.TooSlowError:
            sock.close()
            raise ConnectTimeout(
                f"{portal} did not answer within {CONNECT_TIMEOUT_S:g} s; "
                "check the address, and firewalls on the way"
            ) from None
        except OSError as error:
            sock.close()
            # Not its strerror: that of trio's repeats the address, in Python's words.
            reason = os.strerror(error.errno) if error.errno else str(error)
        except BaseException:
            sock.close()
            raise
    raise ConnectFailed(f"cannot connect to {portal}: {reason}; is the target listening there?")


async def _start_mpa(sock: trio.socket.SocketType, options: Options, portal: str) -> MpaParameters:
    mpa = MpaInitiator(
        private_data=ConnectionFlags(ZBVA_NOT_SUPPORTED).pack(),
        crc=options.mpa_crc,
        ird=READ_DEPTH,
    )
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
            raise _at(portal, error, "; is it an iSER portal?") from None
        if parameters is not None:
            return parameters


def _at(portal: str, error: RemoteProtocolError, remedy: str = "") -> RemoteProtocolError:
    """The same error, with the portal in its text."""
    text = str(error).removeprefix(f"{error.layer}: ")
    return RemoteProtocolError(error.layer, f"{portal}: {text}{remedy}", error.terminate)


class _Login:
    """The login phase of one connection. Implements InitiatorUser while it lasts."""

    def __init__(self, qp: IwarpQueuePair, url: Url, options: Options, portal: str) -> None:
        self._url = url
        self._options = options
        self._portal = portal
        self._dm = IserInitiator(qp, INLINE_SIZE)
        self._dm.user = self
        self._received: deque[tuple[bytes, bytes]] = deque()

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        if invalidated:
            raise RemoteProtocolError("iSER", "a Login Response invalidated an STag")
        self._received.append(
            (
                bytes(message[at : at + bhs.BHS_LENGTH]),
                bytes(bhs.data_segment_untrusted(message, at)),
            )
        )

    def connection_terminate_notify(self, error: Exception) -> None:
        """Nothing is in flight that would have to hear of it."""

    async def run(self) -> Session:
        options = self._options
        slots = [TaskSlot(index) for index in range(options.queue_depth + CONTROL_SLOTS)]
        self._dm.allocate_connection_resources(list(slots), UNEXPECTED)
        login = LoginInitiator(
            LoginInitiatorConfig(
                initiator_name=initiator_name(options),
                target_name=self._url.iqn,
                # Random, and of this session alone: two processes must not reinstate each other.
                isid=bytes((0x80, *secrets.token_bytes(5))),
                immediate_data=options.immediate_data,
                receive_data_segment_length=RECEIVE_DATA,
                send_data_segment_length=INLINE_SIZE,
                unexpected_pdus=UNEXPECTED,
            )
        )
        outgoing = deque([login.start()])
        try:
            while not login.done:
                while outgoing:
                    await self._send(slots[-1], *outgoing.popleft())
                while not self._received:
                    await trio.lowlevel.wait_readable(self._dm.fileno())
                    self._dm.progress(monotonic())
                outgoing.extend(login.receive(*self._received.popleft()))
        except ConnectionLost as error:
            raise ConnectionLost(f"{self._portal}: during login: {error}") from None
        except RemoteProtocolError as error:
            raise _at(self._portal, error) from None
        session = Session(self._dm, slots, login.parameters, self._portal, options.io_timeout)
        session.start(login.cmd_sn, login.exp_cmd_sn, login.max_cmd_sn, login.exp_stat_sn)
        return session

    async def _send(self, slot: TaskSlot, bhs: bytes, data: bytes) -> None:
        """Send one login PDU. The slot of the one before has left: it was answered."""
        if len(data) > len(slot.inline):
            raise IserblkError(f"login text of {len(data)} bytes does not fit into one PDU")
        slot.bhs[:] = bhs
        slot.inline[: len(data)] = data
        slot.inline_length = len(data)
        slot.direction = INLINE
        self._dm.send_control(slot)
        self._dm.flush()
        while self._dm.wants_write():
            await trio.lowlevel.wait_writable(self._dm.fileno())
            self._dm.progress(monotonic())
