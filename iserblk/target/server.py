"""The target's trio shell: it listens on sockets, and runs one set of tasks per connection.

Initiators connect for iSER by TCP (software iWARP, from the start or behind the login) or by
rdma_cm, for Traditional iSCSI by TCP.

Connections share the device server and the budget for data buffers. Only the trio thread touches
a TargetConnection. Commands that may wait for a disk run in threads of the loop, and are answered
in the loop.
"""

from __future__ import annotations

import logging
import resource
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import trio

from iserblk.datamover.iser import HEADER_LENGTH, MINIMUM_LENGTH, ConnectionFlags
from iserblk.datamover.iser_target import IserTarget, ZeroBasedTarget
from iserblk.datamover.seam import TargetDatamover
from iserblk.datamover.stream_target import StreamTarget
from iserblk.errors import Busy, IserblkError, TransportError
from iserblk.iscsi import pdu
from iserblk.iscsi.chap import Accounts
from iserblk.iscsi.login_target import LoginTarget, LoginTargetConfig
from iserblk.limited_log import tell_left_out
from iserblk.loop.clock import monotonic
from iserblk.loop.here import loop_here
from iserblk.loop.seam import Loop
from iserblk.loop.tasks import sleep, task_time, until_writable
from iserblk.loop.work import Limit
from iserblk.metrics.target_reading import TargetLunReading, TargetReading
from iserblk.newcomers import Newcomers, origin_of
from iserblk.rcap.seam import QueuePair
from iserblk.sockets.stream import SocketStream
from iserblk.target.access import Access
from iserblk.target.announcing.announced import Announced
from iserblk.target.attempts import Attempts
from iserblk.target.config import SESSION_CONNECTIONS, TargetConfig
from iserblk.target.figures import Limits, Logins, Parts, read_figures
from iserblk.target.iscsi.accepting import (
    IWARP_RECEIVE_DATA,
    TCP_RECEIVE_DATA,
    accept,
    streaming_pair,
)
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.connection import QUEUE_DEPTH, UNEXPECTED, TargetConnection
from iserblk.target.iscsi.listening import name_of
from iserblk.target.iscsi.session import RECOVERY, TargetSession
from iserblk.target.iscsi.slot import Allegiance, TargetTask
from iserblk.target.keeping import KeptConnections
from iserblk.target.lunlist import LunList, Served, targets_of
from iserblk.target.lunspec import LunSpec
from iserblk.target.open_portals import OpenPortals
from iserblk.target.ports import (
    ISER,
    IWARP,
    ONLY_PORT,
    TCP,
    TargetPort,
    TargetPorts,
)
from iserblk.target.pump import Pump
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.seam import Nexus
from iserblk.target.store.store import OWNER

log = logging.getLogger(__name__)

LOGIN_TIMEOUT_S = 15.0  # from the connection to the end of the login
MAX_CONNECTIONS = 1024  # behind their login, those that are kept included
MAX_LOGINS = 512  # connections that have not logged in yet, beside these
# Places beside both: the sockets that listen take one each for the connection that they wait for,
# a login that reinstates a session takes its place when that has ended, and some have only last
# words to say.
SPARE = 64
OF_ONE = 7 / 8  # of the places behind the login that one address may take
# Descriptors beside those of connections: LUNs, their state files, and what Python needs.
OTHER_DESCRIPTORS = 512
LAST_WORDS_S = 5.0
DISK_THREADS = 16  # for each LUN
PING_S = 30.0  # after so much silence the target sends a ping; the answer may take as long
# Within which a session answers a ping when another user claims its name.
CLAIM_S = 5.0
# Who waits to hear an initiator, in ``TargetConnection.silent``.
_WATCH = 1
_CLAIM = 2
TELL_S = 60.0  # between two times that the log says what it has left out
TICK_S = 1.0  # at ErrorRecoveryLevel 1 and 2 over TCP
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
        self._newcomers = Newcomers()
        self._attempts = Attempts()
        # Places behind the login, and before it; set by the owner where there are fewer.
        self.most_connections = MAX_CONNECTIONS
        self.most_logins = MAX_LOGINS
        # Connections behind their login, lost ones that are kept included, and their addresses.
        self._seats: dict[TargetConnection, str] = {}
        self._seats_of: Counter[str] = Counter()
        # Whose names other users claim, while their initiators are asked whether they are there.
        self._claimed: set[TargetSession] = set()
        self._next_tsih = 1
        # The TSIHs in use, and the session of each, behind its login.
        self._tsihs: dict[int, TargetSession | None] = {}
        self._budget = DataBudget()
        self._kept = KeptConnections()
        self._logins = Logins()
        self._forgotten = trio.Event()  # set, and made anew, when a connection has ended
        self._touched: dict[Allegiance, None] = {}  # since the last ``_batch_ended``
        self._batch_ends = False  # soon
        self._tasks_ended = trio.Event()  # set, and made anew, when some have
        self.device.on_batch = self._batch_ended
        self._arrival = _Arrival()
        self._arrival.ended.set()
        self._closing: dict[Served, trio.Event] = {}  # of other targets; set when they are closed
        # One for each LUN: a disk that does not answer takes no threads from the other LUNs.
        self.limits = {lun: Limit(DISK_THREADS) for lun in luns}
        self._served = set(luns)  # ``limits`` has those that are gone, too: their threads may run

    def figures(self, url: str) -> TargetReading:
        """What the target counts, now. ``url``: with its first address."""
        return read_figures(
            self.iqn,
            url,
            Parts(self._budget, self._newcomers, self._attempts, self._kept, self._logins),
            Limits(self.most_connections, self.most_logins),
            [each for each in self._tsihs.values() if each is not None],
            len(self._seats),
            [
                TargetLunReading(lun, limit.busy, limit.waiting)
                for lun in sorted(self._served)
                for limit in [self.limits[lun]]
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
            until = task_time() + LOGIN_TIMEOUT_S
            with _contained(peer):
                with trio.move_on_at(until) as scope:
                    self._login_begins(sock, peer, scope)
                    try:
                        accepted = await accept(sock, IWARP in port.transports)
                    finally:
                        self._newcomers.remove(sock)
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
            until = task_time() + LOGIN_TIMEOUT_S
        with _contained(peer):
            try:
                flags = ConnectionFlags.unpack(qp.peer_private_data)
                datamover = self._iser(qp, flags.send_invalidate)
                receive_data = qp.receive_size - MINIMUM_LENGTH
                await self._serve(
                    datamover, receive_data, 0, qp.max_ulpdu, portal, peer, port, at_once, until
                )
            finally:
                qp.close()

    async def _serve(
        self,
        datamover: TargetDatamover,
        receive_data: int,
        traditional: int,
        max_ulpdu: int,
        portal: str,
        peer: str,
        port: TargetPort,
        at_once: bool,
        until: float,
    ) -> None:
        """``traditional``: the MaxRecvDataSegmentLength of Traditional iSCSI; 0: there is none."""
        tsih = self._take_tsih()
        login = LoginTarget(
            LoginTargetConfig(
                target_name=self.iqn,
                tsih=tsih,
                receive_data_segment_length=receive_data,
                max_ulpdu=max_ulpdu,
                unexpected_pdus=UNEXPECTED,
                queue_depth=QUEUE_DEPTH,
                find_session=self._tsihs.get,
                max_connections=self._max_connections,
                error_recovery_level=self._error_recovery_level,
                time2retain=TIME2RETAIN_S,
                max_recv_data_segment_length=traditional,
                takes_iser=IWARP in port.transports,
                takes_traditional=TCP in port.transports,
                accounts=self._accounts,
                may_log_in=self._may_log_in,
                may_reinstate=lambda initiator, isid, user: self._may_reinstate(
                    _SessionName(initiator.lower(), isid, port.tag), user, threads
                ),
                portal_group=port.tag,
                # Running code has neither this beginning nor that header.
                solicited_only=not traditional and self._iser is IserTarget,
            )
        )
        try:
            connection = TargetConnection(
                datamover,
                self.device,
                login,
                on_login=self._logged_in,
                on_reset=self._reset,
                on_cold_reset=self._end_others,
                portal=portal,
                port=port,
                budget=self._budget,
                at_once=at_once,
                address=origin_of(peer),
            )
        except BaseException:
            # No memory for a login, or a peer that has already left.
            del self._tsihs[tsih]
            raise
        connection.session.on_over = partial(self._session_over, connection.session, tsih)
        self._connections[connection] = None
        under_way: set[TargetTask] = set()  # offloaded tasks that have not ended
        loop = loop_here()

        def offload(slot: TargetTask) -> None:
            self._offload(slot, connection.session.nexus, loop, under_way)

        error: IserblkError | None = None
        try:
            async with trio.open_nursery() as threads:
                connection.offload = offload
                try:
                    async with trio.open_nursery() as nursery:
                        self._login_begins(connection, peer, nursery.cancel_scope)
                        connection.on_begun = partial(self._newcomers.begins, connection)
                        connection.take_place = partial(self._take_place, connection, peer)
                        self._watch_attempts(connection, peer, nursery)
                        try:
                            await _pump(connection, self._busy_poll_us, nursery, peer, until)
                            if login.problem:
                                self._logins.refused += 1
                                log.warning("%s: login refused: %s", peer, login.problem)
                            log.info("%s: session ended", peer)
                        except IserblkError as problem:
                            error = problem
                        connection.abandon()
                        nursery.cancel_scope.cancel()
                finally:
                    # Not earlier: now no task waits for the descriptor.
                    self._forget(connection)
                    self._newcomers.remove(connection)
                    connection.close()
                if error is not None:
                    log.info("%s: %s", peer, error)
                await self._keep(connection, peer)
        finally:
            with trio.CancelScope(shield=True):  # they use buffers of the session, and the LUNs
                while under_way:
                    await self._tasks_ended.wait()
            self._leave_place(connection)

    def _offload(
        self, slot: TargetTask, nexus: Nexus, loop: Loop, under_way: set[TargetTask]
    ) -> None:
        """Execute a task of ``nexus`` that may wait, in the loop or else in a thread.
        ``under_way``: those that began on the same connection."""
        device = self.device

        def ended() -> None:
            under_way.discard(slot)
            self._touched[slot.connection] = None
            self._finish(slot)

        def work() -> None:
            owned = OWNER.set(nexus)
            try:
                device.run(slot.task, slot.buffer)
            finally:
                OWNER.reset(owned)  # the thread refers to no session that may have ended

        def returned(problem: BaseException | None) -> None:
            if problem is not None:
                slot.end_unknown()
                self._end_broken(slot.connection, problem)
            if slot.task.cancelled and slot.task.in_loop:
                device.settle(slot.task, settled)
            else:
                settled()

        def settled() -> None:
            ended()
            self._end_batch_soon(loop)

        under_way.add(slot)
        if not slot.task.in_loop or not device.start(slot.task, slot.buffer, ended):
            loop.offload(work, returned, self.limits[slot.lun])

    def _end_batch_soon(self, loop: Loop) -> None:
        """With what else threads have done by then: a send for each would cost more than all else
        of such a command."""
        if not self._batch_ends:
            self._batch_ends = True
            loop.call_soon(self._batch_ended)

    def _batch_ended(self) -> None:
        """Send the answers of tasks that have ended."""
        self._batch_ends = False
        touched, self._touched = self._touched, {}
        for connection in touched:
            try:
                connection.wake()
            except Exception as problem:
                self._end_broken(connection, problem)
        self._tasks_ended.set()
        self._tasks_ended = trio.Event()

    def _finish(self, slot: TargetTask) -> None:
        """Answer a task that has been carried out, on the connection to which it is allegiant
        now."""
        connection = slot.connection
        try:
            connection.finish(slot)
        except TransportError as error:
            log.info("connection ended while a command ran: %s", error)
            connection.abandon()
        except Exception as problem:
            self._end_broken(connection, problem)

    def _end_broken(self, connection: Allegiance, problem: BaseException) -> None:
        """End a connection that has met a bug outside of its own task: no other one ends."""
        peers = [peer for each, peer in self._seats.items() if each is connection]
        peer = peers[0] if peers else "an initiator that is gone"
        log.error("%s: internal error, connection closed", peer, exc_info=problem)
        try:
            connection.abandon()
            connection.on_done()
        except Exception:
            log.exception("%s: internal error", peer)

    async def _keep(self, connection: TargetConnection, peer: str) -> None:
        """Wait as long as the session keeps tasks of a lost connection, or itself for its sake.
        Meanwhile it counts as a connection, and as one of few that are kept, so that peers that
        never come back cannot use up memory and places."""
        session = connection.session
        if not connection.kept:
            return
        try:
            with trio.move_on_after(session.retention_s) as scope:

                def begin_anew() -> None:
                    scope.deadline = task_time() + session.retention_s

                connection.on_recovery = begin_anew
                connection.on_released = scope.cancel
                self._kept.add(connection, origin_of(peer), connection.kept_data, scope.cancel)
                await trio.sleep_forever()
        finally:
            self._kept.remove(connection)
            session.expire(connection)

    def _login_begins(self, who: object, peer: str, scope: trio.CancelScope) -> None:
        """Note a connection before its login. If there are too many, one of them is cancelled:
        peers that connect and do not log in keep no initiator out."""
        self._newcomers.add(who, origin_of(peer), scope.cancel, self.most_logins)

    def _take_place(self, connection: TargetConnection, peer: str) -> None:
        """A login is about to end. One address leaves places to the others. A session that is
        reinstated makes room. Raises Busy if there is no place."""
        origin = origin_of(peer)
        most = self.most_connections
        total = len(self._seats)
        if total >= most or self._seats_of[origin] >= max(1, int(most * OF_ONE)):
            login = connection.login
            name = _SessionName(
                login.initiator_name.lower(), login.isid, login.parameters.target_portal_group_tag
            )
            if login.discovery or name not in self._sessions or total >= most + SPARE // 2:
                raise Busy(f"there are {total} connections, {self._seats_of[origin]} of {origin}")
        self._seats[connection] = origin
        self._seats_of[origin] += 1

    def _leave_place(self, connection: TargetConnection) -> None:
        """Does nothing if it has none."""
        origin = self._seats.pop(connection, None)
        if origin is None:
            return
        self._seats_of[origin] -= 1
        if not self._seats_of[origin]:
            del self._seats_of[origin]

    def _watch_attempts(
        self, connection: TargetConnection, peer: str, nursery: trio.Nursery
    ) -> None:
        """Have attempts to prove a user (CHAP) wait behind failed ones. ``nursery``: ends with the
        connection."""
        origin = origin_of(peer)

        async def resume_later(seconds: float, resume: Callable[[], None]) -> None:
            await sleep(seconds)
            resume()

        def hold(user: str, resume: Callable[[], None]) -> bool:
            seconds = self._attempts.wait(origin, user, task_time())
            if seconds > 0:
                log.info("%s: CHAP waits for %.0f s behind failed attempts", peer, seconds)
                nursery.start_soon(resume_later, seconds, resume)
            return seconds > 0

        def judged(user: str, right: bool) -> None:
            if right:
                self._attempts.succeeded(origin, user)
            else:
                self._attempts.failed(origin, user, task_time())

        connection.hold_attempt = hold
        connection.on_attempt = judged

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
            # Not that of a LUN before it: its threads may wait for a target that is away.
            self.limits[lun] = Limit(DISK_THREADS)
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
                    connection.silent |= _CLAIM
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
            connection.session is session and not connection.silent & _CLAIM
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

    def _logged_in(self, connection: TargetConnection) -> None:
        """Register the session of a login. If a session with the same name exists, the login
        reinstates it: the old session ends first, with all its tasks (RFC 7143 section 6.3.5). The
        portal group is part of the name."""
        login = connection.login
        session = connection.session
        self._newcomers.remove(connection)
        self._logins.succeeded += 1
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
            session.hold()
        self._sessions[name] = session
        self._tsihs[login.tsih] = session

    def _forget(self, connection: TargetConnection) -> None:
        self._connections.pop(connection, None)
        self._forgotten.set()
        self._forgotten = trio.Event()

    def _session_over(self, session: TargetSession, tsih: int) -> None:
        """Nothing is left of the session, nor of the login that was to begin it. Let the session
        begin that has reinstated it; not yet if another older one of that name still has tasks."""
        if self._tsihs.pop(tsih) is session:
            self._logins.commands += session.window.received
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
            successor.unhold()

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

    def _reset(self, lun: int, by: TargetConnection, ended: Callable[[], None]) -> int:
        """End the LUN's tasks of all sessions but ``by``, also of old sessions that were reinstated
        and whose last tasks still run. Arguments and result as for ``Nexus.end_tasks``."""
        return self.device.end_tasks_of_others(lun, by.session.nexus, ended)

    def _end_others(self, by: TargetConnection) -> None:
        """End all sessions and logins but ``by``."""
        log.info("%s: reset the target (cold)", by.login.initiator_name)
        self._newcomers.give_up_all()
        for session in set(self._sessions.values()) - {by.session}:
            session.abandon()
        for connection in list(self._connections):
            if connection.session is not by.session:
                connection.abandon()
                connection.on_done()


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


async def _pump(
    connection: TargetConnection, busy_poll_us: int, nursery: trio.Nursery, peer: str, until: float
) -> None:
    """Serve a connection until its session has ended. ``nursery``: for another task of it.
    ``until``: when its login must have ended."""
    fd = connection.fileno()
    login, scope = trio.Event(), trio.CancelScope()
    pump = Pump(connection, busy_poll_us, login.set, scope.cancel)
    pump.begin()
    try:
        with scope:
            with trio.move_on_at(until) as limit:
                await login.wait()
            if limit.cancelled_caught:
                raise TransportError(f"no login within {LOGIN_TIMEOUT_S:g} s")
            if connection.recovers:
                nursery.start_soon(_tick, connection)
            await _look_after(connection, peer)
    finally:
        pump.end()
    if pump.problem is not None:
        raise pump.problem
    # The last answer (to a logout, or to a login that failed) still has to leave.
    with trio.move_on_after(LAST_WORDS_S), suppress(TransportError):
        while connection.wants_write() and not connection.cut:
            await until_writable(fd)
            connection.progress(monotonic())


async def _look_after(connection: TargetConnection, peer: str) -> None:
    """End a session whose initiator has vanished without closing the connection. Neither TCP nor
    the network reports that, and the session would keep its memory and its name for ever. And end
    one whose initiator is there, and owes what others wait for."""
    asked = False
    while not connection.done:
        connection.silent |= _WATCH
        await sleep(PING_S)
        connection.trim()
        owed = connection.overdue(task_time())
        if owed:
            log.warning("%s: session ended: %s", peer, owed)
            connection.give_up()
        elif not connection.silent & _WATCH:
            asked = False
        elif not connection.greeted:
            log.warning("%s: session ended: the initiator sent no Hello", peer)
            connection.give_up()
        elif asked:
            log.warning("%s: session ended: the initiator did not answer a ping", peer)
            connection.give_up()
        else:
            connection.ping()
            asked = True


async def _tick(connection: TargetConnection) -> None:
    """Have the connection ask for what was lost."""
    while not connection.done:
        await sleep(TICK_S)
        try:
            connection.tick()
        except TransportError as error:
            log.info("a connection ended: %s", error)
            connection.abandon()


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


def room() -> tuple[int, int]:
    """Places for connections behind and before their login. The process may have as many
    descriptors, if the system allows it; else there are fewer, and the log says so: without
    descriptors nobody could be accepted, no matter who has them, and no state file be written."""
    beside = SPARE + OTHER_DESCRIPTORS
    wanted = MAX_CONNECTIONS + MAX_LOGINS + beside
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:
        soft = wanted if hard < 0 else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if not 0 <= soft < wanted:
        return MAX_CONNECTIONS, MAX_LOGINS
    share = max(0, soft - beside) / (wanted - beside)
    most, logins = max(8, int(MAX_CONNECTIONS * share)), max(4, int(MAX_LOGINS * share))
    log.warning(
        "room for %d connections, not %d: the limit of descriptors is %d; raise it to %d"
        " (LimitNOFILE=, ulimit -n)",
        most,
        MAX_CONNECTIONS,
        soft,
        wanted,
    )
    return most, logins


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
    iqn, places, transports = config.iqn, config.portals, config.transports
    ports = TargetPorts([each.group for each in places], transports)
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
    server.most_connections, server.most_logins = room()
    most = server.most_connections + server.most_logins + SPARE
    opened = OpenPortals(ports, most, server.serve_tcp, server.serve_queue_pair)
    try:
        portals = await opened.open(places)
        async with trio.open_nursery() as nursery:
            life = trio.CancelScope(shield=True)
            sessions = await nursery.start(_run_sessions, life)
            nursery.start_soon(_say_goodbye, server, opened, logout_s, life)
            nursery.start_soon(_tell_left_out)
            opened.start(nursery, sessions)
            if read is not None and lun_list is not None and hangups is not None:
                nursery.start_soon(_reread, config, read, server, lun_list, hangups)
            for each_announce in announce:
                nursery.start_soon(each_announce, Announced(iqn, portals, server.initiators))
            scheme = "iser" if transports[places[0].group] & ISER else "iscsi"
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


async def _say_goodbye(
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
