"""The target's trio shell: it listens on sockets, and runs one set of tasks per connection.

Initiators connect for iSER by TCP (software iWARP, from the start or behind the login) or by
rdma_cm, for Traditional iSCSI by TCP.

Connections share the device server and the budget for data buffers. Only the trio thread touches
a TargetConnection. Commands that may wait for a disk run in threads of the loop, and are answered
in the loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import trio

from iserblk.datamover.iser import HEADER_LENGTH, MINIMUM_LENGTH, ConnectionFlags
from iserblk.datamover.iser_target import IserTarget, ZeroBasedTarget
from iserblk.datamover.seam import TargetDatamover
from iserblk.datamover.stream_target import StreamTarget
from iserblk.errors import IserblkError
from iserblk.iscsi import pdu
from iserblk.iscsi.chap import Accounts
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.limited_log import tell_left_out
from iserblk.loop.tasks import sleep
from iserblk.metrics.target_reading import TargetLunReading, TargetReading
from iserblk.newcomers import Newcomers, origin_of
from iserblk.rcap.seam import QueuePair
from iserblk.sockets.stream import SocketStream
from iserblk.target import places
from iserblk.target.access import Access
from iserblk.target.announcing.announced import Announced
from iserblk.target.attempts import Attempts
from iserblk.target.attending import CLAIM, Attendant, end_of_login
from iserblk.target.config import SESSION_CONNECTIONS, TargetConfig
from iserblk.target.figures import Limits, Logins, Parts, read_figures
from iserblk.target.iscsi.accepting import (
    IWARP_RECEIVE_DATA,
    TCP_RECEIVE_DATA,
    accept,
    streaming_pair,
)
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.connection import TargetConnection
from iserblk.target.iscsi.listening import name_of
from iserblk.target.iscsi.login import UNEXPECTED
from iserblk.target.iscsi.session import RECOVERY, TargetSession
from iserblk.target.iscsi.tasks.slots import QUEUE_DEPTH
from iserblk.target.keeping import KeptConnections
from iserblk.target.lunlist import LunList, Served, targets_of
from iserblk.target.lunspec import LunSpec
from iserblk.target.offloading import Offloading
from iserblk.target.open_portals import OpenPortals
from iserblk.target.ports import (
    ISER,
    IWARP,
    ONLY_PORT,
    TCP,
    TargetPort,
    TargetPorts,
)
from iserblk.target.scsi.device import DeviceServer, LogicalUnit

log = logging.getLogger(__name__)

# Within which a session answers a ping when another user claims its name.
CLAIM_S = 5.0
TELL_S = 60.0  # between two times that the log says what it has left out
TIME2RETAIN_S = 20  # for which the tasks of a lost connection are kept at ErrorRecoveryLevel 2

Announce = Callable[[Announced], Awaitable[None]]
Watch = Callable[[Callable[[], TargetReading]], Awaitable[None]]
MakeDevice = Callable[[Mapping[int, LogicalUnit], str, TargetPorts | None], DeviceServer]


@dataclass(slots=True, frozen=True)
class _SessionName:
    """What identifies a session across connections (RFC 7143 section 4.4.3)."""

    initiator: str
    isid: bytes
    portal_group: int


class _Come(NamedTuple):
    """A connection that has come, before its login.

    ``receive_data``: data bytes of one PDU that we take, ``max_ulpdu``: MaxULPDULength; over iSER.
    ``traditional``: the MaxRecvDataSegmentLength of Traditional iSCSI; 0: there is none.
    ``at_once``: see TargetConnection. ``until``: when its login must have ended."""

    datamover: TargetDatamover
    receive_data: int
    traditional: int
    max_ulpdu: int
    portal: str
    peer: str
    port: TargetPort
    at_once: bool
    until: float


class _SessionOwner:
    """Implements SessionOwner. ``tsih``: was taken for the login that begins the session."""

    def __init__(self, server: TargetServer, session: TargetSession, tsih: int) -> None:
        self._server = server
        self._session = session
        self._tsih = tsih

    def session_over(self) -> None:
        self._server.session_over(self._session, self._tsih)


class _Arrival:
    """LUNs of other targets that are being opened. ``scope``: cancel it to give them up.
    ``ended``: none is being opened any more."""

    __slots__ = ("ended", "scope")

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.ended = trio.Event()


class TargetServer:
    """One target: its LUNs and its connections."""

    def __init__(
        self,
        iqn: str,
        luns: Mapping[int, LogicalUnit],
        busy_poll_us: int = 0,
        accounts: Accounts | None = None,
        ports: TargetPorts | None = None,
        header: int = HEADER_LENGTH,
        max_connections: int = SESSION_CONNECTIONS,
        error_recovery_level: int = RECOVERY,
        make_device: MakeDevice = DeviceServer,
    ) -> None:
        """``header``: bytes of the iSER header of all iSER connections, 28 or 12.
        ``max_connections``: of one session. ``error_recovery_level``: the highest to agree to.
        ``make_device``: tests give one with habits of other targets."""
        self.iqn = iqn
        self._max_connections = max_connections
        self._error_recovery_level = error_recovery_level
        self._iser = IserTarget if header == HEADER_LENGTH else ZeroBasedTarget
        self._accounts = accounts
        self._access: Access | None = None
        self._busy_poll_us = busy_poll_us
        self.device = make_device(luns, iqn, ports)
        self._connections: dict[TargetConnection, None] = {}
        self._sessions: dict[_SessionName, TargetSession] = {}
        # By session name: sessions that have ended, except for tasks that threads still run.
        self._elders: dict[_SessionName, set[TargetSession]] = {}
        self.parts = Parts(DataBudget(), Newcomers(), Attempts(), KeptConnections(), Logins())
        # Places behind the login, and before it; set by the owner where there are fewer.
        self.places = places.Places()
        self.most_logins = places.MAX_LOGINS
        # Whose names other users claim, while their initiators are asked whether they are there.
        self._claimed: set[TargetSession] = set()
        self._next_tsih = 1
        # The TSIHs in use, and the session of each, behind its login.
        self._tsihs: dict[int, TargetSession | None] = {}
        self._forgotten = trio.Event()  # set, and made anew, when a connection has ended
        self._arrival = _Arrival()
        self._arrival.ended.set()
        self._closing: dict[Served, trio.Event] = {}  # of other targets; set when they are closed
        self.offloading = Offloading(self.device, self.places, luns)
        self._served = set(luns)

    def figures(self, url: str) -> TargetReading:
        """What the target counts, now. ``url``: with its first address."""
        return read_figures(
            self.iqn,
            url,
            self.parts,
            Limits(self.places.most, self.most_logins),
            [each for each in self._tsihs.values() if each is not None],
            len(self.places),
            [
                TargetLunReading(lun, limit.busy, limit.waiting)
                for lun in sorted(self._served)
                for limit in [self.offloading.limits[lun]]
            ],
        )

    async def serve_tcp(self, sock: trio.socket.SocketType, port: TargetPort = ONLY_PORT) -> None:
        """Serve one connection by TCP or SCTP from accept to end. Closes ``sock``. Raises only
        Cancelled."""
        with sock:
            try:
                peer, portal = name_of(sock.getpeername()), name_of(sock.getsockname())
            except OSError as error:
                log.info("a peer closed its connection at once: %s", error.strerror)
                return
            accepted = None
            until = end_of_login()
            newcomers = self.parts.newcomers
            with _contained(peer):
                with trio.move_on_at(until) as scope:
                    # If there are too many, one of them is cancelled: peers that connect and do not
                    # log in keep no initiator out.
                    newcomers.add(sock, origin_of(peer), scope.cancel, self.most_logins)
                    try:
                        accepted = await accept(sock, IWARP in port.transports)
                    finally:
                        newcomers.remove(sock)
                if accepted is None:
                    log.info("%s: no login: the peer went away, or may not use iSER here", peer)
                    return
        if isinstance(accepted, SocketStream):
            await self._serve_stream(accepted, portal, peer, port, until)
        elif accepted is not None:
            await self.serve_queue_pair(accepted, portal, peer, port, at_once=False, until=until)

    async def _serve_stream(
        self, stream: SocketStream, portal: str, peer: str, port: TargetPort, until: float
    ) -> None:
        """Serve one connection that begins as a byte stream until its end, as ``serve_queue_pair``:
        login decides between iSER and Traditional iSCSI."""
        with _contained(peer):
            qp = streaming_pair(stream)
            try:
                datamover = StreamTarget(stream, qp, self._iser(qp, True), TCP_RECEIVE_DATA)
                await self._serve(
                    _Come(
                        datamover,
                        IWARP_RECEIVE_DATA,
                        TCP_RECEIVE_DATA,
                        qp.max_ulpdu,
                        portal,
                        peer,
                        port,
                        at_once=False,
                        until=until,
                    )
                )
            finally:
                qp.close()

    async def serve_queue_pair(
        self,
        qp: QueuePair,
        portal: str,
        peer: str,
        port: TargetPort = ONLY_PORT,
        at_once: bool = True,
        until: float | None = None,
    ) -> None:
        """Serve one iSER connection of any provider until its end. Closes ``qp``. Raises only
        Cancelled. ``at_once``: see TargetConnection. ``until``: when the login must have ended;
        None: it begins now."""
        if until is None:
            until = end_of_login()
        with _contained(peer):
            try:
                flags = ConnectionFlags.unpack(qp.peer_private_data)
                datamover = self._iser(qp, flags.send_invalidate)
                receive_data = qp.receive_size - MINIMUM_LENGTH
                ulpdu = qp.max_ulpdu
                await self._serve(
                    _Come(datamover, receive_data, 0, ulpdu, portal, peer, port, at_once, until)
                )
            finally:
                qp.close()

    async def _serve(self, come: _Come) -> None:
        tsih = self._take_tsih()
        try:
            attendant = Attendant(self, self.parts, self.places, self.offloading, come.peer)
            connection = TargetConnection(
                come.datamover,
                self.device,
                self._login(come, tsih, attendant),
                attendant,
                portal=come.portal,
                port=come.port,
                budget=self.parts.budget,
                at_once=come.at_once,
                address=origin_of(come.peer),
            )
        except BaseException:
            # No memory for a login, or a peer that has already left.
            del self._tsihs[tsih]
            raise
        connection.session.owner = _SessionOwner(self, connection.session, tsih)
        self._connections[connection] = None
        await attendant.serve(connection, self._busy_poll_us, come.until)

    def _login(self, come: _Come, tsih: int, attendant: Attendant) -> LoginTarget:
        port = come.port
        return LoginTarget(
            LoginTargetConfig(
                target_name=self.iqn,
                tsih=tsih,
                receive_data_segment_length=come.receive_data,
                max_ulpdu=come.max_ulpdu,
                unexpected_pdus=UNEXPECTED,
                queue_depth=QUEUE_DEPTH,
                find_session=self._tsihs.get,
                max_connections=self._max_connections,
                error_recovery_level=self._error_recovery_level,
                time2retain=TIME2RETAIN_S,
                max_recv_data_segment_length=come.traditional,
                takes_iser=IWARP in port.transports,
                takes_traditional=TCP in port.transports,
                accounts=self._accounts,
                may_log_in=self._may_log_in,
                may_reinstate=lambda initiator, isid, user: self._may_reinstate(
                    _SessionName(initiator.lower(), isid, port.tag), user, attendant.tasks
                ),
                portal_group=port.tag,
                # Running code has neither this beginning nor that header.
                solicited_only=not come.traditional and self._iser is IserTarget,
            )
        )

    async def reconfigure(self, config: TargetConfig, luns: LunList, nursery: trio.Nursery) -> None:
        """Take over another configuration: its LUNs, accounts and access hold from now on, also for
        sessions that there are, except that a session goes on whose account is gone. One ends that
        has the name of an initiator which may log in only as another user now. What only a restart
        can change is not looked at.

        A LUN whose values have changed goes, and comes again. What ``luns`` has served is flushed
        and closed when the commands of each LUN that goes have ended. A LUN that cannot be opened
        is left out, with an error in the log.

        LUNs of other targets come and go in tasks of ``nursery``: such a target may be away, and
        neither other LUNs nor the next call wait for it. The next call gives up what is still being
        opened."""
        self._arrival.scope.cancel()
        gone = luns.withdraw(luns.gone(config.luns))
        files = [each for each in gone if not each.targets]
        others = [each for each in gone if each.targets]
        # At once: no initiator gets to a LUN by the rules for another one of that number.
        files_ended = self._remove(files)
        others_ended = self._remove(others)
        self._accounts = config.accounts
        self._max_connections = config.max_connections
        self._error_recovery_level = config.error_recovery_level
        self._busy_poll_us = config.busy_poll_us
        self.set_access(config.access)
        self._end_impostors()
        self.device.set_access_states(config.states)
        for each in others:
            closed = self._closing[each] = trio.Event()
            nursery.start_soon(self._close_other, each, luns, others_ended, closed)
        await files_ended.wait()
        for each in files:
            await self._close(each, luns)
        new = luns.new(config.luns)
        opened: dict[int, LogicalUnit] = {}
        for lun, spec in new.items():
            if not spec.urls:
                unit = await self._open(lun, spec, luns)
                if unit is not None:
                    luns.add(lun, spec, unit)
                    opened[lun] = unit
        self._serve_luns(opened)
        log.info("LUNs gone: %s; new: %s", sorted(each.lun for each in gone), sorted(opened))
        before, self._arrival = self._arrival, _Arrival()
        far = {lun: spec for lun, spec in new.items() if spec.urls}
        nursery.start_soon(self._open_others, far, luns, self._arrival, before)

    def _remove(self, served: Sequence[Served]) -> trio.Event:
        """Remove LUNs; the event is set when their commands have ended."""
        self._served -= {each.lun for each in served}
        left = 0
        all_ended = trio.Event()

        def one_ended() -> None:
            nonlocal left
            left -= 1
            if not left:
                all_ended.set()

        if served:
            left = self.device.remove_luns([each.lun for each in served], one_ended)
        if not left:
            all_ended.set()
        return all_ended

    def _serve_luns(self, units: Mapping[int, LogicalUnit]) -> None:
        for lun in units:
            self.offloading.add_lun(lun)
            self._served.add(lun)
        if units:
            self.device.add_luns(units)

    async def _open(self, lun: int, spec: LunSpec, luns: LunList) -> LogicalUnit | None:
        try:
            return await trio.to_thread.run_sync(
                luns.open_unit, spec, limiter=trio.CapacityLimiter(1)
            )
        except IserblkError as error:
            log.error("LUN %d is left out: %s", lun, error)
            return None

    async def _close(self, served: Served, luns: LunList) -> None:
        with trio.CancelScope(shield=True):  # the thread may wait for the loop
            words = await trio.to_thread.run_sync(
                luns.close, served, limiter=trio.CapacityLimiter(1)
            )
        if words:
            log.error("LUN %d: %s", served.lun, words)

    async def _close_other(
        self, served: Served, luns: LunList, ended: trio.Event, closed: trio.Event
    ) -> None:
        """Body of a task: close a LUN of another target when its commands have ``ended``."""
        await ended.wait()
        await self._close(served, luns)
        del self._closing[served]
        closed.set()

    async def _open_others(
        self, specs: Mapping[int, LunSpec], luns: LunList, arrival: _Arrival, before: _Arrival
    ) -> None:
        """Body of a task: open LUNs of other targets, each as soon as that is possible. ``before``
        has been given up; until it has ended it may have sessions of the same names."""
        try:
            await before.ended.wait()
            with arrival.scope:
                async with trio.open_nursery() as nursery:
                    for lun, spec in specs.items():
                        nursery.start_soon(self._open_other, lun, spec, luns, arrival.scope)
        finally:
            arrival.ended.set()

    async def _open_other(
        self, lun: int, spec: LunSpec, luns: LunList, scope: trio.CancelScope
    ) -> None:
        """Body of a task: open a LUN of another target, behind LUNs of that target that go."""
        targets = targets_of(spec)
        for each, closed in list(self._closing.items()):
            if each.targets & targets:
                await closed.wait()
        unit = await self._open(lun, spec, luns)
        if unit is None:
            return
        if scope.cancel_called:  # just now, and its number may be another LUN's already
            await _give_up(unit, spec)
            return
        luns.add(lun, spec, unit)
        self._serve_luns({lun: unit})
        log.info("LUN %d is there", lun)

    def set_access(self, access: Access | None) -> None:
        """Take over which initiator has access to what; None: each to all."""
        self._access = access
        self.device.set_access(None if access is None else access.allows)

    def initiators(self) -> list[str] | None:
        """The names of the initiators that have access to any LUN; None: every initiator has."""
        return None if self._access is None else self._access.initiators()

    def _may_log_in(self, initiator: str, user: str) -> bool:
        return self._access is None or self._access.may_log_in(initiator, user)

    def _may_reinstate(self, name: _SessionName, user: str, nursery: trio.Nursery) -> bool:
        """Whether a login as ``user`` may take the place of the session of this name, which, as for
        a connection that joins it, its own user may. The initiator of another user is asked whether
        it is still there, in a task of ``nursery``: else nobody could log in by the name that a
        host with new credentials has left behind."""
        old = self._sessions.get(name)
        if old is None or old.done or old.user == user:
            return True
        if old not in self._claimed:
            self._claimed.add(old)
            for connection in self._connections:
                if connection.session is old:
                    connection.silent |= CLAIM
                    connection.ping()
            nursery.start_soon(self._settle_claim, old)
        return False

    async def _settle_claim(self, session: TargetSession) -> None:
        """Body of a task: end a session none of whose connections answers a ping."""
        try:
            await sleep(CLAIM_S)
        finally:
            self._claimed.remove(session)
        if session.done or any(
            connection.session is session and not connection.silent & CLAIM
            for connection in self._connections
        ):
            return
        log.warning(
            "%s: session ended: another user logs in by its name, and the initiator did not "
            "answer a ping",
            session.initiator_name,
        )
        session.abandon()

    def _end_impostors(self) -> None:
        """End sessions that could not log in by the present rules: they would get what is granted
        to an initiator that has proved who it is."""
        for session in list(self._sessions.values()):
            if not session.done and not self._may_log_in(session.initiator_name, session.user):
                log.warning(
                    "%s: session ended: it may not be logged in as %r any more",
                    session.initiator_name,
                    session.user or "no user",
                )
                session.abandon()

    # -- sessions ---------------------------------------------------------------------------------

    def _take_tsih(self) -> int:
        while self._next_tsih in self._tsihs:
            self._next_tsih = self._next_tsih % 0xFFFF + 1
        tsih = self._next_tsih
        self._next_tsih = tsih % 0xFFFF + 1
        self._tsihs[tsih] = None
        return tsih

    def names_a_session(self, connection: TargetConnection) -> bool:
        """Implements Sessions."""
        login = connection.login
        name = _SessionName(
            login.initiator_name.lower(), login.isid, login.parameters.target_portal_group_tag
        )
        return not login.discovery and name in self._sessions

    def logged_in(self, connection: TargetConnection) -> None:
        """Implements Sessions. Register the session of a login. If a session with the same name
        exists, the login reinstates it: the old session ends first, with all its tasks (RFC 7143
        section 6.3.5). The portal group is part of the name."""
        login = connection.login
        session = connection.session
        if login.discovery or login.joined is not None:
            return
        name = _name_of(session)
        old = self._sessions.get(name)
        if old is not None:
            log.info("%s: session reinstated", login.initiator_name)
            if old.running:
                self._elders.setdefault(name, set()).add(old)
            old.abandon()
        if name in self._elders:
            # Not only ``old``: a session before it may still have tasks in threads.
            session.pause()
        self._sessions[name] = session
        self._tsihs[login.tsih] = session

    def forget(self, connection: TargetConnection) -> None:
        """Implements Sessions."""
        self._connections.pop(connection, None)
        self._forgotten.set()
        self._forgotten = trio.Event()

    def session_over(self, session: TargetSession, tsih: int) -> None:
        """Nothing is left of the session, nor of the login that was to begin it. Let the session
        begin that has reinstated it; not yet if another older one of that name still has tasks."""
        if self._tsihs.pop(tsih) is session:
            self.parts.logins.commands += session.window.received
        name = _name_of(session)
        if self._sessions.get(name) is session:
            del self._sessions[name]
        elders = self._elders.get(name, set())
        if session not in elders:
            return
        elders.remove(session)
        if elders:
            return
        del self._elders[name]
        successor = self._sessions.get(name)
        if successor is not None:
            successor.go_on()

    def end(self) -> None:
        """End all sessions, of which nothing more is answered, before their tasks are cancelled."""
        for connection in list(self._connections):
            connection.abandon()
        self.device.hurry()
        for served in self._closing:  # the device has them no more; their tasks may not be over
            if served.unit.loop is not None:
                served.unit.loop.hurry()

    async def ask_for_logouts(self, patience_s: int) -> None:
        """Ask the initiator of each session to log out, and wait until all have, but no longer than
        ``patience_s`` seconds. The others are told that their session is dropped (RFC 7143 section
        11.9.1)."""
        asked = {
            connection
            for connection in self._connections
            if connection.tell(pdu.ASYNC_LOGOUT_REQUEST, parameter3=patience_s)
        }
        with trio.move_on_after(patience_s):
            while asked & self._connections.keys():
                await self._forgotten.wait()
        for connection in asked & self._connections.keys():
            log.info("%s: did not log out", connection.login.initiator_name)
            connection.tell(pdu.ASYNC_SESSION_DROP)

    def end_others(self, by: TargetConnection) -> None:
        """Implements Sessions."""
        log.info("%s: reset the target (cold)", by.login.initiator_name)
        self.parts.newcomers.give_up_all()
        for session in set(self._sessions.values()) - {by.session}:
            session.abandon()
        for connection in list(self._connections):
            if connection.session is not by.session:
                connection.abandon()
                connection.notify_ended()


async def _give_up(unit: LogicalUnit, spec: LunSpec) -> None:
    """Close a unit that was never served."""
    with trio.CancelScope(shield=True):
        try:
            await trio.to_thread.run_sync(unit.close, limiter=trio.CapacityLimiter(1))
        except OSError as error:
            log.error("%s: %s", spec.path, error.strerror)


def _name_of(session: TargetSession) -> _SessionName:
    """The initiator name is in lower case, as in NexusName: case does not count (RFC 7143 section
    4.2.7.1)."""
    return _SessionName(session.initiator_name.lower(), session.isid, session.portal_group)


@contextmanager
def _contained(peer: str) -> Iterator[None]:
    """Log the error that ends one connection, so that it ends no other."""
    try:
        yield
    except IserblkError as error:
        log.info("%s: %s", peer, error)
    except OSError as error:
        log.info("%s: connection ended: %s", peer, error.strerror or error)
    except Exception:
        # A bug of the target: log the traceback.
        log.exception("%s: internal error, connection closed", peer)


async def serve(
    config: TargetConfig,
    luns: Mapping[int, LogicalUnit],
    ready: Callable[[str], None],
    *,
    logout_s: int = 0,
    announce: Sequence[Announce] = (),
    read: Callable[[], TargetConfig] | None = None,
    lun_list: LunList | None = None,
    hangups: AsyncIterator[int] | None = None,
    make_device: MakeDevice = DeviceServer,
    watch: Watch | None = None,
) -> None:
    """Run one target until cancelled.

    ``luns``: what is open of ``config.luns``. ``ready(url)`` is called once, when the target
    accepts connections; ``url`` has the first address, with the port that was bound. ``logout_s``:
    when it is cancelled, ask initiators to log out, and wait up to so many seconds; 0: do not ask.
    ``announce``: each runs as long as the target accepts connections; what it raises ends the
    target. ``read``: reads the configuration again, after each of ``hangups``, in a thread;
    an error changes nothing. ``lun_list``: with ``read``, owns ``luns``. ``make_device``: see
    TargetServer. ``watch``: runs until the target ends; its argument reads what the target counts,
    in this thread. Raises BadArgument, NotSupported, PermissionDenied or Busy when the target
    cannot listen; nothing stays open then."""
    iqn, listens, transports = config.iqn, config.portals, config.transports
    ports = TargetPorts([each.group for each in listens], transports)
    server = TargetServer(
        iqn,
        luns,
        config.busy_poll_us,
        config.accounts,
        ports,
        config.header,
        config.max_connections,
        config.error_recovery_level,
        make_device,
    )
    server.set_access(config.access)
    server.device.set_access_states(config.states)
    server.places.most, server.most_logins = places.room()
    most = server.places.most + server.most_logins + places.SPARE
    opened = OpenPortals(ports, most, server.serve_tcp, server.serve_queue_pair)
    try:
        portals = await opened.open(listens)
        async with trio.open_nursery() as nursery:
            life = trio.CancelScope(shield=True)
            sessions = await nursery.start(_run_sessions, life)
            nursery.start_soon(_log_all_out, server, opened, logout_s, life)
            nursery.start_soon(_tell_left_out)
            opened.start(nursery, sessions)
            if read is not None and lun_list is not None and hangups is not None:
                nursery.start_soon(_reread, config, read, server, lun_list, hangups)
            for each_announce in announce:
                nursery.start_soon(each_announce, Announced(iqn, portals, server.initiators))
            scheme = "iser" if transports[listens[0].group] & ISER else "iscsi"
            url = f"{scheme}://{name_of(portals[0])}/{iqn}"
            if watch is not None:
                nursery.start_soon(watch, partial(server.figures, url))
            ready(url)
    finally:
        opened.close()


async def _run_sessions(life: trio.CancelScope, task_status: trio.TaskStatus[trio.Nursery]) -> None:
    """Run the tasks of all connections until ``life`` is cancelled."""
    with life:
        async with trio.open_nursery() as sessions:
            task_status.started(sessions)
            await trio.sleep_forever()


async def _log_all_out(
    server: TargetServer, opened: OpenPortals, logout_s: int, life: trio.CancelScope
) -> None:
    """When the target is cancelled, give initiators time to log out, then end ``life``."""
    try:
        await trio.sleep_forever()
    finally:
        if logout_s:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()  # now no task accepts connections any more
                opened.close()
                await server.ask_for_logouts(logout_s)
        server.end()
        life.cancel()


async def _tell_left_out() -> None:
    """Body of a task."""
    while True:
        await sleep(TELL_S)
        tell_left_out()


async def _reread(
    config: TargetConfig,
    read: Callable[[], TargetConfig],
    server: TargetServer,
    luns: LunList,
    hangups: AsyncIterator[int],
) -> None:
    """Read the configuration again after each of ``hangups``. One with an error changes nothing."""
    async with trio.open_nursery() as nursery:
        async for _ in hangups:
            try:
                changed = await trio.to_thread.run_sync(read)
                config.check_successor(changed)
            except IserblkError as error:
                words = " ".join(str(error).split())
                log.error("the configuration is left as it is: %s", words)
            else:
                await server.reconfigure(changed, luns, nursery)
                log.info("the configuration was read again")
