"""The login phase of a connection: from a datamover to a Session in full feature phase.

Over iSER that was set up by connection management (``style=cm``), login PDUs travel in Sends, as
existing targets expect. On a TCP stream they travel as bytes; behind the login the same connection
becomes iSER, by MPA start-up, or goes on in Traditional iSCSI. Runs in trio, on any provider.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import trio

from iserblk.datamover.iser import BHS_LENGTH, HEADER_LENGTH
from iserblk.datamover.iser_initiator import IserInitiator, ZeroBasedInitiator
from iserblk.datamover.seam import INLINE, InitiatorDatamover, PduSlot
from iserblk.datamover.stream_initiator import StreamInitiator
from iserblk.datamover.tcp_initiator import TcpInitiator
from iserblk.datamover.tcp_stream import ByteStream
from iserblk.errors import (
    ConnectionLost,
    ConnectTimeout,
    IserblkError,
    LoginError,
    RemoteProtocolError,
)
from iserblk.initiator.session.connection import FIRST_SLOTS, Connection
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import UNEXPECTED, Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.initiator.session.unsolicited import DATA_OUT_SLOTS, FEW
from iserblk.iscsi import bhs
from iserblk.iscsi.chap import Credentials
from iserblk.iscsi.keys import SessionParameters
from iserblk.iscsi.login_initiator import (
    SAFE_SEGMENT_LENGTH,
    LoginInitiator,
    LoginInitiatorConfig,
)
from iserblk.loop.clock import monotonic
from iserblk.loop.patience import fail_after
from iserblk.loop.tasks import until_readable, until_writable
from iserblk.names import initiator_name, random_isid
from iserblk.options import Options
from iserblk.rcap.seam import QueuePair, StreamingPair
from iserblk.url import Url

RECEIVE_DATA = 8192  # InitiatorRecvDataSegmentLength
# MaxRecvDataSegmentLength of Traditional iSCSI: a MiB comes in one Data-In. With 256 KiB it took
# four wake-ups, which cost a tenth of the throughput.
TCP_RECEIVE_DATA = 1 << 20
RECEIVE_SIZE = HEADER_LENGTH + BHS_LENGTH + RECEIVE_DATA
TIME2RETAIN_S = 20  # at level 2: how long a target is to keep the tasks of a lost connection
MPA_TIMEOUT_S = 10.0  # for the MPA Reply behind a login
# The same where the portal has shown that it answers logins, and no MPA Requests: tgtd agrees to
# RDMAExtensions without having it. At least so many seconds, and times what its login took.
DOUBTED_S = 0.8
DOUBTED_TIMES = 20
INLINE_SIZE = 8192  # data behind a BHS of ours over TCP: text


def at_portal(portal: str, error: RemoteProtocolError, remedy: str = "") -> RemoteProtocolError:
    """The same error, with the portal in its text."""
    text = str(error).removeprefix(f"{error.layer}: ")
    return RemoteProtocolError(error.layer, f"{portal}: {text}{remedy}", error.terminate)


def header_hint(options: Options) -> str:
    """What may be wrong where a target closes an iSER connection at its first message: the length
    of the header, of which the other end is not told."""
    if options.header != HEADER_LENGTH:
        return (
            f"; header={options.header} must be told to the target, too (iserblk target --header"
            f" {options.header}); no other kind of target has it"
        )
    return "; if the target was started with --header 12, add header=12 to the URL"


def receives(options: Options) -> int:
    """How many receives a connection has posted at most: one for each answer, and spare ones."""
    return options.queue_depth + CONTROL_SLOTS + UNEXPECTED


@dataclass(slots=True, frozen=True)
class LoginConnection:
    """A connection before its login. ``offer``: the most data bytes of one PDU that we send;
    ``receive_data``: the most that we take. ``max_ulpdu``, ``iwarp``: of the queue pair; 0 and
    False over TCP.

    ``streaming``: the queue pair of a connection that begins as a byte stream (``style=stream``).
    ``traditional``: then the most that we take if it stays one; ``needs_rdma``: it must not.
    ``doubted``: the portal was silent when it was asked by MPA, and answers logins."""

    datamover: InitiatorDatamover
    rdma: bool
    offer: int
    receive_data: int
    max_ulpdu: int
    iwarp: bool = False
    streaming: StreamingPair | None = None
    traditional: int = 0
    needs_rdma: bool = True
    doubted: bool = False

    def offers_data_outs(self, options: Options) -> bool | None:
        """Whether to offer InitialR2T=No; None: the login decides by the kind of connection.

        With ``unsolicited-data=auto``, where it was measured to be faster: over software iWARP, and
        over TCP. At an RDMA device each Data-Out is memory that both ends have registered. On iWARP
        only a peer that declares its MaxULPDULength is known not to be Linux siw."""
        if options.unsolicited_data != "auto":
            return options.unsolicited_data == "yes" and (not self.iwarp or self.max_ulpdu > 0)
        return True if self.max_ulpdu and options.immediate_data else None

    def sends_data_outs(self, agreed: SessionParameters) -> bool:
        """Whether our writes may be sent with Data-Outs after a login that offered it. Never
        towards siw. (Over TCP the datamover makes them.)"""
        return (
            self.rdma
            and (agreed.rdma_extensions or self.streaming is None)
            and not agreed.initial_r2t
            and (not self.iwarp or agreed.max_ulpdu > 0)
        )


def _offer(qp: QueuePair) -> int:
    # Above 8 KiB offer more than we send inline, so that a target's answer shows its own limit,
    # and is no echo of our offer (see LoginInitiatorConfig).
    return qp.inline_size if qp.inline_size <= SAFE_SEGMENT_LENGTH else 2 * qp.inline_size


def _iser(qp: QueuePair, header: int, style: str) -> IserInitiator:
    kind = IserInitiator if header == HEADER_LENGTH else ZeroBasedInitiator
    return kind(qp, qp.inline_size, style)


def over_rdma(qp: QueuePair, header: int = HEADER_LENGTH) -> LoginConnection:
    """iSER. ``header``: bytes of its header, 28 or 12."""
    return LoginConnection(
        _iser(qp, header, "cm"),
        True,
        _offer(qp),
        RECEIVE_DATA,
        max_ulpdu=qp.max_ulpdu,
        iwarp=qp.iwarp,
    )


def over_stream(
    stream: ByteStream,
    qp: StreamingPair,
    needs_rdma: bool,
    header: int = HEADER_LENGTH,
    doubted: bool = False,
) -> LoginConnection:
    """``stream`` and ``qp`` are of one connection; the caller closes ``qp`` on errors."""
    datamover = StreamInitiator(stream, qp, _iser(qp, header, "stream"), TCP_RECEIVE_DATA)
    return LoginConnection(
        datamover,
        True,
        _offer(qp),
        RECEIVE_DATA,
        max_ulpdu=qp.max_ulpdu,
        iwarp=qp.iwarp,
        streaming=qp,
        traditional=TCP_RECEIVE_DATA,
        needs_rdma=needs_rdma,
        doubted=doubted,
    )


def over_tcp(stream: ByteStream) -> LoginConnection:
    """Traditional iSCSI. The caller closes the stream on errors."""
    datamover = TcpInitiator(stream, INLINE_SIZE, TCP_RECEIVE_DATA)
    return LoginConnection(datamover, False, INLINE_SIZE, TCP_RECEIVE_DATA, max_ulpdu=0)


class Login:
    """The login phase of one connection. Implements InitiatorUser while it lasts. A URL without a
    target name makes it a discovery session. Set ``credentials`` and ``isid`` before ``run``, if
    any."""

    credentials: Credentials | None = None
    traditional = False  # a byte stream that might have become iSER goes on as one
    isid = b""  # of the session that this login reinstates; else a random one is used
    agreed = False  # the login phase has ended well; what follows it may still fail
    _seconds = 0.0  # that the login phase has taken

    def __init__(
        self, connection: LoginConnection, url: Url, options: Options, portal: str
    ) -> None:
        self._connection = connection
        self._url = url
        self._options = options
        self._portal = portal
        self._dm = connection.datamover
        self._dm.user = self
        self._received: deque[tuple[bytes, bytes]] = deque()

    def sent_notify(self, slot: PduSlot) -> None:
        """Never called: there are no Data-Outs before full feature phase."""

    def control_notify(self, message: memoryview, at: int, invalidated: int) -> None:
        if invalidated:
            raise RemoteProtocolError("iSER", "a Login Response invalidated an STag")
        self._received.append(
            (
                bytes(message[at : at + bhs.BHS_LENGTH]),
                bytes(bhs.data_segment_untrusted(message, at)),
            )
        )

    async def run(self) -> Session:
        count = self._options.queue_depth + CONTROL_SLOTS
        slots = [TaskSlot(index) for index in range(count)]
        login = await self._negotiate(list(slots))
        agreed = login.parameters
        session = Session(self._dm, slots, agreed, self._portal, self._options.io_timeout)
        session.command_timeout = self._options.command_timeout
        self._allow_data_outs(session.queue.connection)
        session.isid = self.isid
        session.tsih = login.tsih
        session.busy_poll_us = self._options.busy_poll_us
        try:
            session.start(login.cmd_sn, login.exp_cmd_sn, login.max_cmd_sn, login.exp_stat_sn)
            await self._switch(login.parameters, session.queue.connection.datamover)
            if self._connection.streaming is not None:
                # What came behind the login in the same segment makes no descriptor readable.
                session.progress(monotonic())
                self._check(session, "behind the login")
            await self._greet(session)
        except BaseException:
            # One that may have several connections has a descriptor of its own.
            session.fail(ConnectionLost(f"{self._portal}: no login"))
            raise
        return session

    async def join(self, session: Session, cid: int) -> Connection:
        """Log in a further connection of ``session``. It is to be offered to the session."""
        self.isid = session.isid
        queue = session.queue
        memory = [PduSlot(index) for index in range(len(queue.slots))]
        login = await self._negotiate(memory, session, cid)
        agreed = login.parameters
        connection = Connection(self._dm, memory, agreed, self._portal, cid)
        self._allow_data_outs(connection)
        connection.exp_stat_sn = login.exp_stat_sn
        self._dm.notice_key_values(agreed)
        connection.datamover = self._dm.enable_datamover()
        await self._switch(agreed, connection.datamover)
        datamover = self._dm
        datamover.flush()
        while not datamover.greeted:
            if datamover.wants_write():
                await until_writable(datamover.fileno())
            else:
                await until_readable(datamover.fileno())
            datamover.progress(monotonic())
        connection.early = [bhs_ + data for bhs_, data in self._received]
        return connection

    def _allow_data_outs(self, connection: Connection) -> None:
        agreed = connection.parameters
        if self._connection.sends_data_outs(agreed):
            most_busy = FEW if self._options.unsolicited_data == "auto" else len(connection.memory)
            if self._dm.adds_resources:
                connection.allow_data_outs([], most_busy, DATA_OUT_SLOTS)
                return
            size = min(agreed.first_burst_length, agreed.target_recv_data_segment_length)
            connection.allow_data_outs(self._dm.allocate_data_outs(DATA_OUT_SLOTS, size), most_busy)

    async def _greet(self, session: Session) -> None:
        """Send the Hello, if there is one, and wait for its answer: what the target agrees to is
        settled before the first command. Raises TransportError."""
        datamover = self._dm
        if datamover.greeted:
            return
        session.queue.flush()
        while not datamover.greeted and session.error is None:
            if datamover.wants_write():
                await until_writable(datamover.fileno())
            else:
                await until_readable(datamover.fileno())
            session.progress(monotonic())
        self._check(session, "after the Hello")

    def _check(self, session: Session, when: str) -> None:
        """Raise the error that has ended the session, which nobody drives yet."""
        error = session.error
        if isinstance(error, RemoteProtocolError):
            raise at_portal(self._portal, error)
        if error is not None:
            raise ConnectionLost(f"{self._portal}: {when}: {error}")

    async def _switch(self, parameters: SessionParameters, to: InitiatorDatamover) -> None:
        """The datamover has been enabled, and ``to`` takes its place: where the connection leaves
        the byte stream, wait until MPA start-up is complete. What comes behind it stays for the
        session. Raises TransportError."""
        self._dm = to
        connection = self._connection
        self.traditional = connection.traditional > 0 and not parameters.rdma_extensions
        if connection.streaming is None or self.traditional:
            return
        patience = MPA_TIMEOUT_S
        if connection.doubted:
            patience = min(patience, max(DOUBTED_S, DOUBTED_TIMES * self._seconds))
        try:
            with fail_after(patience):
                await _start_rcap(connection.streaming)
        except trio.TooSlowError:
            raise ConnectTimeout(
                f"{self._portal} agreed to iSER, but sent no MPA Reply within {patience:.2g} s"
            ) from None
        except ConnectionLost as error:
            raise ConnectionLost(f"{self._portal}: behind the login: {error}") from None
        except RemoteProtocolError as error:
            raise at_portal(self._portal, error, ", behind a login that agreed to iSER") from None

    async def _negotiate(
        self, slots: list[PduSlot], session: Session | None = None, cid: int = 0
    ) -> LoginInitiator:
        """Run the login phase to its end; the last slot carries its PDUs. ``session``: that the
        connection is to join, with that CID; None: it is the first of a new one."""
        options, connection = self._options, self._connection
        digests = not connection.rdma or connection.traditional > 0
        first = slots
        if self._dm.adds_resources:
            first = slots[:-CONTROL_SLOTS][:FIRST_SLOTS] + slots[-CONTROL_SLOTS:]
        self._dm.allocate_connection_resources(first, UNEXPECTED)
        if not self.isid:
            self.isid = random_isid()
        login = LoginInitiator(
            LoginInitiatorConfig(
                initiator_name=initiator_name(options.initiator_name),
                target_name=self._url.iqn,
                discovery=not self._url.iqn,
                isid=self.isid,
                immediate_data=options.immediate_data,
                unsolicited_data=connection.offers_data_outs(options),
                receive_data_segment_length=connection.receive_data,
                send_data_segment_length=connection.offer,
                unexpected_pdus=UNEXPECTED,
                max_ulpdu=connection.max_ulpdu,
                hello=connection.rdma and options.hello,
                rdma=connection.rdma,
                max_recv_data_segment_length=connection.traditional,
                needs_rdma=connection.needs_rdma,
                header_digest=options.header_digest if digests else "None",
                data_digest=options.data_digest if digests else "None",
                max_connections=options.connections,
                error_recovery_level=options.error_recovery_level,
                time2retain=TIME2RETAIN_S if options.error_recovery_level == 2 else 0,
                leading=None if session is None else session.parameters,
                tsih=0 if session is None else session.tsih,
                cid=cid,
                cmd_sn=1 if session is None else session.queue.cmd_sn,
                credentials=self.credentials,
            )
        )
        outgoing = deque([login.start()])
        begun, heard = monotonic(), False
        try:
            while not login.done:
                while outgoing:
                    await self._send(slots[-1], *outgoing.popleft())
                while not self._received:
                    await until_readable(self._dm.fileno())
                    self._dm.progress(monotonic())
                heard = True
                outgoing.extend(login.receive(*self._received.popleft()))
        except ConnectionLost as error:
            hint = login.hint
            if not hint and connection.rdma and connection.streaming is None and not heard:
                hint = header_hint(options)
            raise ConnectionLost(f"{self._portal}: during login: {error}{hint}") from None
        except LoginError as error:
            error.args = (f"{self._portal}: {error}",)
            raise
        except RemoteProtocolError as error:
            raise at_portal(self._portal, error) from None
        self._seconds, self.agreed = monotonic() - begun, True
        return login

    async def _send(self, slot: PduSlot, bhs: bytes, data: bytes) -> None:
        """Send one login PDU. The slot is free: the PDU before it was answered."""
        if len(data) > len(slot.inline):
            raise IserblkError(f"login text of {len(data)} bytes does not fit into one PDU")
        slot.bhs[:] = bhs
        slot.inline[: len(data)] = data
        slot.inline_length = len(data)
        slot.direction = INLINE
        self._dm.send_control(slot)
        self._dm.flush()
        while self._dm.wants_write():
            await until_writable(self._dm.fileno())
            self._dm.progress(monotonic())


async def _start_rcap(qp: StreamingPair) -> None:
    """Wait until MPA start-up is complete. What comes behind it stays for the session."""
    while True:
        qp.progress(monotonic())
        if qp.established:
            return
        if qp.wants_write():
            await until_writable(qp.fileno())
        else:
            await until_readable(qp.fileno())
