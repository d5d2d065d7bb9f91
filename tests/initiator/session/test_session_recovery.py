"""A session outlives its connection: what waits, what ends, what is sent again, in which order."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from iserblk.commands.command import QUEUED, SENT, TAKEN, Command, InDoubt
from iserblk.commands.listeners import LunListener
from iserblk.commands.running import command as run_command
from iserblk.commands.running import fill_write
from iserblk.datamover.seam import INLINE
from iserblk.errors import (
    CommandTimeout,
    ConnectionLost,
    LunChanged,
    RemoteProtocolError,
    ScsiError,
)
from iserblk.initiator.session.deadlines import STEP_S, Ladder
from iserblk.initiator.session.logout import MOST_WAIT_S
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.scsi import opcodes
from iserblk.scsi.tasks import WRITE
from tests.initiator.fake import (
    CountingWaiter,
    FakeDatamover,
    cmd_sn_of,
    command,
    driver_of,
    itt_of,
    response,
    session,
)
from tests.support import logs
from tests.support.clocks import Clock

pytestmark = pytest.mark.logs(logs.ASYNC_MESSAGE, logs.DEADLINES, logs.RECONNECTED)

LOST = ConnectionLost("the wire was cut")


class Kept:
    """A session with a reconnector. ``called``: how often the session called the reconnector."""

    def __init__(self, depth: int = 8, window: int = 32, **more: object) -> None:
        self.session, self.dm = session(depth=depth, window=window, **more)  # type: ignore[arg-type]
        self.depth = depth
        self.called = 0
        self.driver = driver_of(self.session)
        self.driver.reconnect = self._call

    def _call(self) -> None:
        self.called += 1

    def lose(self, error: ConnectionLost | RemoteProtocolError = LOST) -> None:
        self.dm.inbox.append(error)
        self.session.progress(1.0)

    def regain(self, window: int = 32, cmd_sn: int = 1, **more: object) -> FakeDatamover:
        """Offer a fresh connection and let the session adopt it; its datamover."""
        fresh, self.dm = session(self.depth, window, cmd_sn, **more)  # type: ignore[arg-type]
        self.session.offer(fresh)
        self.session.progress(2.0)
        return self.dm


def _write(made: Session, waiter: CountingWaiter, data: bytes) -> TaskSlot:
    slot = made.queue.take_now()
    assert slot is not None
    fill_write(slot, bytes(8), memoryview(data))
    slot.cdb[:] = bytes(range(16))
    slot.waiter = waiter
    waiter.pending += 1
    made.queue.submit(slot)
    return slot


@pytest.mark.parametrize("listed", [True, False])
def test_other_threads_may_look_at_the_connections_while_a_lost_one_dies(listed: bool) -> None:
    """The queue may be the last to refer to it, and other threads run while its memory is unmapped.
    This memory looks at the queue itself. At ErrorRecoveryLevel 2 the connection that was lost last
    is not in the list any more."""
    kept = Kept()
    queue = kept.session.queue
    seen: list[list[str]] = []

    class Memory(bytes):
        def __del__(self) -> None:
            portals = [connection.portal for connection in queue.connections]
            seen.append([*portals, queue.connection.portal])

    kept.lose()
    queue.connection.early.append(Memory(b"of the connection"))
    queue.connection.portal = "lost"
    del kept.dm.user  # which refers to the connection, so that only the collector would free it
    if not listed:
        queue.connections.clear()
    kept.regain()
    assert seen == [["portal:3260", "portal:3260"]]


@pytest.mark.parametrize("first", [1, 0xFFFFFFFE])
def test_what_was_in_flight_is_sent_again_in_order(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Commands in flight are sent again by CmdSN, whatever their slots, before commands that were
    never sent."""
    kept = Kept(window=4, cmd_sn=first)
    made = kept.session
    waiter = CountingWaiter()
    early = command(made, waiter)
    slots = [command(made, waiter) for _ in range(3)]
    kept.dm.inbox.append(response(early.itt, max_cmd_sn=(first + 4) & 0xFFFFFFFF))
    made.progress(0.5)
    made.queue.release(early)
    slots.append(command(made, waiter))  # an old slot, a new number
    slots += [command(made, waiter) for _ in range(2)]
    assert [slot.state for slot in slots] == [SENT] * 4 + [QUEUED] * 2
    kept.lose()
    assert made.suspended is not None and made.error is None and kept.called == 1
    assert kept.dm.terminated and kept.driver.closed == [0]
    assert all(slot.state == QUEUED for slot in slots) and waiter.pending == 6
    dm = kept.regain(window=5)
    assert made.suspended is None
    assert [sent[0] for sent in dm.sent] == slots[:5] and slots[5].state == QUEUED
    assert [cmd_sn_of(sent) for sent in dm.sent] == [1, 2, 3, 4, 5]
    for sent in list(dm.sent):
        dm.inbox.append(response(itt_of(sent), max_cmd_sn=6))
    made.progress(3.0)
    dm.inbox.append(response(itt_of(dm.sent[-1]), max_cmd_sn=7))
    made.progress(4.0)
    assert waiter.pending == 0 and all(slot.error is None for slot in slots)
    assert (made.counts.reconnects, made.counts.replayed) == (1, 4)
    texts = [record.getMessage() for record in caplog.records]
    assert texts[0] == "portal:3260: connection lost: the wire was cut; reconnecting"
    assert texts[1].startswith("portal:3260: connected again after ")
    assert texts[1].endswith(" s, 4 commands sent again")


def test_immediate_data_is_what_the_present_connection_takes() -> None:
    kept = Kept(immediate_data=True)
    waiter = CountingWaiter()
    slot = _write(kept.session, waiter, b"w" * 512)
    assert slot.direction == INLINE and bytes(slot.inline[:512]) == b"w" * 512
    kept.lose()
    dm = kept.regain(immediate_data=False)
    assert slot.direction == WRITE and slot.data is not None and bytes(slot.data) == b"w" * 512
    header = pdu.ScsiCommand.unpack_from(dm.sent[0][1])
    assert (header.data_length, header.edtl, header.cdb) == (0, 512, bytes(range(16)))
    kept.lose()
    dm = kept.regain(immediate_data=True)
    assert slot.direction == INLINE and slot.bhs[4:8] == b"\0\0\2\0"  # type: ignore[comparison-overlap]
    assert bytes(slot.inline[:512]) == b"w" * 512
    dm.inbox.append(response(itt_of(dm.sent[0])))
    kept.session.progress(5.0)
    assert waiter.woken == 1 and slot.data is None
    assert kept.session.counts.replayed == 2


def test_what_was_in_flight_to_a_lun_that_is_doubted_is_held_back() -> None:
    """Its number may have gone to another LUN during the outage."""
    kept = Kept()
    made, waiter = kept.session, CountingWaiter()
    held = _write(made, waiter, bytes(512))
    held.cdb[0] = opcodes.WRITE_16
    assert not made.queue.doubt(held.lun) and held.state == SENT
    kept.lose()
    dm = kept.regain()
    assert isinstance(held.error, InDoubt) and not waiter.pending and not dm.sent


def test_commands_of_the_outage_follow_in_order() -> None:
    kept = Kept()
    waiter = CountingWaiter()
    slots = [command(kept.session, waiter) for _ in range(2)]
    kept.lose()
    slots += [command(kept.session, waiter) for _ in range(3)]
    assert kept.called == 4  # each new command calls the reconnector: it need not pause
    assert all(slot.state == QUEUED for slot in slots) and not kept.dm.queued
    dm = kept.regain()
    assert [sent[0] for sent in dm.sent] == slots
    assert kept.session.counts.replayed == 2


def test_deadline_while_there_is_no_connection(clock: Clock) -> None:
    """The late command ends with a CommandTimeout, which says why; others go on waiting."""
    kept = Kept()
    made = kept.session
    late, other = CountingWaiter(), CountingWaiter()
    ladder = Ladder(made)
    slot, patient = command(made, late), command(made, other)
    kept.lose()
    slot.deadline = clock() - 1
    patient.deadline = slot.deadline + 100
    made.still_absent(ConnectionLost("connection refused"))
    ladder.tick(clock())
    assert late.woken == 1 and isinstance(slot.error, CommandTimeout)
    assert "not connected for" in str(slot.error) and "connection refused" in str(slot.error)
    dm = kept.regain()
    assert [sent[0] for sent in dm.sent] == [patient]
    assert other.pending == 1 and made.counts.replayed == 1


def test_late_while_there_is_no_connection(clock: Clock) -> None:
    """A command waits its whole io-timeout, unless the target has been away for longer than
    io-timeout: then it waits about a second."""
    kept = Kept()
    made = kept.session
    waiter = CountingWaiter()
    ladder = Ladder(made)
    kept.lose()
    slot = command(made, waiter)
    now = clock()
    ladder.tick(now + made.io_timeout - 1)
    assert waiter.woken == 0
    made.suspended_at = now - made.io_timeout - 5
    ladder.tick(now)
    assert waiter.woken == 0  # a connection may be there in a moment
    ladder.tick(now + 1.5)
    assert waiter.woken == 1 and isinstance(slot.error, CommandTimeout)
    assert "is given up: not connected for" in str(slot.error)


def test_cancelled_while_there_is_no_connection() -> None:
    kept = Kept()
    made = kept.session
    sent, queued = CountingWaiter(), CountingWaiter()
    slots = [command(made, sent)]
    kept.lose()
    slots.append(command(made, queued))
    ladder = Ladder(made)
    for slot in slots:
        ladder.cancel(slot, 1.0)
    assert sent.woken == queued.woken == 1
    assert not kept.regain().sent


def test_one_that_was_being_aborted_is_not_sent_again() -> None:
    """A command past its deadline ends once, with the connection. Task management requests for it
    end without an error."""
    kept = Kept()
    made = kept.session
    late, other = CountingWaiter(), CountingWaiter()
    slot, patient = command(made, late), command(made, other)
    patient.deadline = slot.deadline + 100
    made.queue.connection.last_heard = slot.deadline
    ladder = Ladder(made)
    ladder.tick(slot.deadline)
    ladder.tick(slot.deadline + STEP_S)
    ladder.tick(slot.deadline + 2 * STEP_S)
    assert kept.dm.disconnected
    kept.lose()
    assert late.woken == 1 and isinstance(slot.error, CommandTimeout)
    assert made.queue.free_controls == CONTROL_SLOTS
    ladder.tick(slot.deadline + 3 * STEP_S)
    dm = kept.regain()
    made.queue.connection.last_heard = slot.deadline + 4 * STEP_S
    ladder.tick(slot.deadline + 4 * STEP_S)
    assert [sent[0] for sent in dm.sent] == [patient] and other.pending == 1
    assert not dm.disconnected


def test_nothing_is_asked_of_a_target_that_is_away() -> None:
    """Without a connection there is no ping and no abort, and no control slot is given."""
    kept = Kept()
    kept.lose()
    Ladder(kept.session).tick(kept.session.last_heard + 1000)
    assert kept.session.queue.take_control() is None
    assert not kept.dm.queued and not kept.dm.sent
    assert kept.session.progress(5.0) == 0


def test_slots_run_out_while_there_is_no_connection() -> None:
    kept = Kept(depth=1)
    made = kept.session
    waiter, taker = CountingWaiter(), CountingWaiter()
    slot = command(made, waiter)
    kept.lose()
    assert made.queue.take(taker) is None and taker.pending == 1
    made.queue.forget(taker)
    assert taker.pending == 0 and made.queue.take(taker) is None
    kept.regain().inbox.append(response(itt_of(kept.dm.sent[0])))
    made.progress(3.0)
    made.queue.release(slot)
    assert taker.woken == 1 and made.queue.take(taker) is slot


def test_deadline_of_one_that_waits_for_a_slot(clock: Clock) -> None:
    """An operation that waits for a slot ends at its deadline, though others hold all slots."""
    kept = Kept(depth=1)
    made = kept.session
    kept.lose()
    slot = command(made, CountingWaiter())
    one_more = run_command(made, bytes(8), bytes(6), "lun0", deadline=clock() + 1)
    waiter = next(one_more)
    assert isinstance(waiter, CountingWaiter) and waiter.pending == 1
    ladder = Ladder(made)
    clock.now += 1
    ladder.tick(clock())
    with pytest.raises(CommandTimeout, match="not connected: the wire was cut"):
        next(one_more)
    made.queue.release(slot)  # no operation waits any more
    assert made.queue.take_now() is slot and not waiter.pending


@pytest.mark.parametrize("stopped", [100.0, 0.0])
def test_an_operation_has_as_much_time_as_its_commands(clock: Clock, stopped: float) -> None:
    """Where this process did not run for a while, an answer that asks for a retry comes in time,
    and so does a connection."""
    kept = Kept(depth=1)
    made = kept.session
    ladder = Ladder(made)
    operation = run_command(made, bytes(8), bytes(6), "lun0", deadline=clock() + 30)
    next(operation)
    clock.now += 120
    if stopped:
        ladder.stalled(stopped, clock())
    kept.dm.inbox.append(response(itt_of(kept.dm.sent[0]), max_cmd_sn=40, status=0x08))
    made.progress(clock())
    if not stopped:
        with pytest.raises(ScsiError, match="BUSY"):
            next(operation)
        return
    assert isinstance(next(operation), float)
    next(operation)
    (slot,) = [slot for slot in made.queue.tasks if slot.state == SENT]
    assert slot.deadline == 1.0 + 30 + stopped
    assert made.extended(clock() + 30) == clock() + 30  # what begins now has no more
    with pytest.raises(CommandTimeout):
        clock.now += 20
        ladder.tick(clock())
        kept.dm.inbox.append(
            pdu.TaskManagementResponse(
                response=pdu.TMF_COMPLETE,
                itt=itt_of(kept.dm.sent[-1]),
                stat_sn=101,
                exp_cmd_sn=3,
                max_cmd_sn=40,
            ).pack()
        )
        made.progress(clock())
        next(operation)


def test_a_stop_is_no_absence_of_the_target(clock: Clock) -> None:
    """What is submitted behind it waits for a connection as long as it would have before."""
    kept = Kept()
    ladder = Ladder(kept.session)
    kept.lose()
    clock.now += 100
    ladder.stalled(99, clock())
    waiter = CountingWaiter()
    command(kept.session, waiter)
    ladder.tick(clock() + 20)
    assert waiter.pending == 1
    ladder.tick(clock() + 30)
    assert waiter.woken == 1


def test_closed_while_there_is_no_connection() -> None:
    kept = Kept()
    made = kept.session
    waiter = CountingWaiter()
    slots = [command(made, waiter) for _ in range(3)]
    kept.lose()
    before = kept.driver.changes
    made.fail(ConnectionLost("logged out"))
    assert waiter.woken == 1 and all(str(slot.error) == "logged out" for slot in slots)
    assert kept.driver.changes == before + 1
    fresh, dm = session(kept.depth)
    made.offer(fresh)  # too late: it is closed
    assert dm.terminated and fresh.error is not None
    assert made.progress(9.0) == 0


def test_closed_with_an_offer_on_the_table() -> None:
    kept = Kept()
    kept.lose()
    fresh, dm = session(kept.depth)
    kept.session.offer(fresh)
    kept.session.fail(ConnectionLost("logged out"))
    assert dm.terminated and fresh.error is not None


def test_what_never_gets_better_ends_everything() -> None:
    kept = Kept()
    waiter = CountingWaiter()
    slot = command(kept.session, waiter)
    kept.lose()
    kept.session.offer(LunChanged("another LUN"))
    assert waiter.pending == 1  # the thread that runs ``progress`` ends the commands
    kept.session.progress(3.0)
    assert waiter.woken == 1 and isinstance(slot.error, LunChanged)
    with pytest.raises(LunChanged, match="another LUN"):
        kept.session.queue.take(CountingWaiter())


def test_a_session_that_nobody_keeps_fails() -> None:
    kept = Kept()
    kept.driver.reconnect = None
    waiter = CountingWaiter()
    command(kept.session, waiter)
    kept.lose()
    assert isinstance(kept.session.error, ConnectionLost) and waiter.woken == 1


def test_a_target_that_breaks_the_rules_is_given_another_chance() -> None:
    kept = Kept()
    waiter = CountingWaiter()
    command(kept.session, waiter)
    kept.lose(RemoteProtocolError("iSCSI", "nonsense"))
    assert kept.session.error is None and waiter.pending == 1
    assert len(kept.regain().sent) == 1


def test_an_answer_of_the_old_connection_is_none_on_the_new_one() -> None:
    """A command that is sent again gets a new tag."""
    kept = Kept()
    slot = command(kept.session, CountingWaiter())
    old = slot.itt
    kept.lose()
    dm = kept.regain()
    assert itt_of(dm.sent[0]) != old
    dm.inbox.append(response(old))
    kept.session.progress(3.0)
    assert isinstance(kept.session.suspended, RemoteProtocolError)
    assert slot.state == QUEUED


@pytest.mark.parametrize("at", ["closing", "terminate", "called"])
def test_interrupted_while_it_is_suspended(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """^C in the middle of the suspension: the next ``progress`` does the rest."""
    kept = Kept()
    made = kept.session
    waiter = CountingWaiter()
    slots = [command(made, waiter) for _ in range(3)]
    todo = [KeyboardInterrupt]

    def interrupted(*_args: object) -> None:
        if todo:
            raise todo.pop()

    with monkeypatch.context() as patch:
        if at == "closing":
            patch.setattr(kept.driver, "closing", interrupted)
        elif at == "terminate":
            patch.setattr(kept.dm, "connection_terminate", interrupted)
        else:
            patch.setattr(kept.driver, "reconnect", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept.lose()
        made.progress(1.5)
    assert [sent[0] for sent in kept.regain().sent] == slots
    assert waiter.pending == 3


def test_interrupted_while_an_answer_is_taken_in() -> None:
    """The data of that command is incomplete: it is not sent again, other commands are."""
    kept = Kept()
    made = kept.session
    waiter = CountingWaiter()
    lost, other = (_write(made, waiter, bytes(512)) for _ in range(2))
    kept.dm.inbox.append(response(lost.itt))
    deallocate = kept.dm.deallocate_task_resources

    def interrupted(slot: TaskSlot, invalidated: int) -> None:
        deallocate(slot, invalidated)
        raise KeyboardInterrupt

    kept.dm.deallocate_task_resources = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        made.progress(1.0)
    kept.lose()
    assert (lost.state, other.state, waiter.pending) == (TAKEN, QUEUED, 1)
    assert isinstance(lost.error, ConnectionLost)
    assert [sent[0] for sent in kept.regain().sent] == [other]


def test_interrupted_while_it_goes_on() -> None:
    kept = Kept()
    made = kept.session
    slots = [command(made, CountingWaiter()) for _ in range(3)]
    kept.lose()
    todo = [KeyboardInterrupt]

    def interrupted() -> None:
        if todo:
            raise todo.pop()

    kept.driver.changed = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        kept.regain()
    made.progress(3.0)
    assert made.suspended is None and [sent[0] for sent in kept.dm.sent] == slots
    assert made.counts.reconnects == 1


# -- what the target announces -------------------------------------------------------------------


def _event(dm: FakeDatamover, event: int, **fields: int) -> None:
    dm.inbox.append(
        pdu.AsyncMessage(event=event, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32, **fields).pack()  # type: ignore[arg-type]
    )


def _logouts(dm: FakeDatamover) -> list[bytes]:
    return [each for _, each in dm.sent if each[0] & bhs.OPCODE_MASK == bhs.LOGOUT_REQUEST]


@pytest.mark.parametrize("event", [pdu.ASYNC_LOGOUT_REQUEST, pdu.ASYNC_NEGOTIATE])
def test_target_asks_for_a_logout(event: int, clock: Clock) -> None:
    """Commands in flight may end before the logout; new commands wait for the next connection."""
    kept = Kept()
    made = kept.session
    waiter = CountingWaiter()
    slot = command(made, waiter)
    _event(kept.dm, event, parameter3=20)
    now = clock()
    made.progress(now)
    assert command(made, waiter).state == QUEUED and not _logouts(kept.dm)
    kept.dm.inbox.append(response(slot.itt, max_cmd_sn=40))
    made.progress(now + 1)
    (logout,) = _logouts(kept.dm)
    assert logout[1] == 0x80 | pdu.LOGOUT_CLOSE_SESSION and slot.error is None
    made.progress(now + 1.5)
    assert len(_logouts(kept.dm)) == 1
    itt = int.from_bytes(logout[16:20], "big")
    kept.dm.inbox.append(
        pdu.LogoutResponse(
            response=0, itt=itt, stat_sn=101, exp_cmd_sn=2, max_cmd_sn=40, time2wait=7
        ).pack()
    )
    made.progress(now + 2)
    assert made.error is None and "as the target had asked" in str(made.suspended)
    assert made.respite.reconnect_at == clock() + 7
    dm = kept.regain()
    assert len(dm.sent) == 1 and not _logouts(dm)
    assert command(made, waiter).state == SENT


class Unflushed(LunListener):
    """Follows a LUN with unflushed writes."""

    def hear(self, slot: Command) -> None:
        """Nothing comes."""

    def unflushed(self) -> bool:
        return True


def test_target_asks_for_a_logout_while_something_is_unflushed(clock: Clock) -> None:
    """The reconnector has it flushed first: commands go on meanwhile."""
    kept = Kept()
    made = kept.session
    made.listeners.add(bytes(8), Unflushed())
    _event(kept.dm, pdu.ASYNC_LOGOUT_REQUEST, parameter3=3)
    made.progress(clock())
    assert kept.called == 1 and made.logout_asked == clock() + 3 and not _logouts(kept.dm)
    slot = command(made, CountingWaiter())
    assert slot.state == SENT
    assert made.log_out("all is flushed", 1.0) and not made.logout_asked
    kept.dm.inbox.append(response(slot.itt, max_cmd_sn=40))
    made.progress(clock())
    assert len(_logouts(kept.dm)) == 1


def test_connection_that_is_lost_before_it_could_leave(clock: Clock) -> None:
    kept = Kept()
    kept.session.listeners.add(bytes(8), Unflushed())
    _event(kept.dm, pdu.ASYNC_LOGOUT_REQUEST, parameter3=3)
    kept.session.progress(clock())
    kept.lose()
    assert not kept.session.logout_asked


@pytest.mark.parametrize("response, wait", [(0, 7), (1, 3), (3, 7)])
def test_time2wait_of_a_logout(response: int, wait: int, clock: Clock) -> None:
    """That of the answer, in place of that of the login; but where the target does not know the
    connection it means nothing (RFC 7143 section 11.15.3)."""
    kept = Kept(default_time2wait=3)
    made = kept.session
    _event(kept.dm, pdu.ASYNC_LOGOUT_REQUEST, parameter3=20)
    made.progress(clock())
    (logout,) = _logouts(kept.dm)
    itt = int.from_bytes(logout[16:20], "big")
    numbers = {"stat_sn": 101, "exp_cmd_sn": 2, "max_cmd_sn": 40}
    kept.dm.inbox.append(
        pdu.LogoutResponse(response=response, itt=itt, time2wait=7, **numbers).pack()
    )
    made.progress(clock())
    assert made.respite.reconnect_at == clock() + wait
    assert not made.respite.reinstate_at


@pytest.mark.parametrize("agreed, wait", [(0, 0), (2, 2), (3600, MOST_WAIT_S)])
def test_time2wait_of_the_login_counts_from_a_loss_without_a_word(
    agreed: int, wait: float, clock: Clock
) -> None:
    """For what reinstates the session (RFC 7143 sections 7.5.1, 13.15), and from each loss anew."""
    kept = Kept(default_time2wait=agreed)
    for _ in range(2):
        clock.now += 100
        kept.lose()
        assert kept.session.respite.reinstate_at == clock() + wait
        assert not kept.session.respite.reconnect_at
        kept.regain(default_time2wait=agreed)


def test_logout_that_cannot_wait_longer(clock: Clock) -> None:
    kept = Kept()
    made = kept.session
    slot = command(made, CountingWaiter())
    _event(kept.dm, pdu.ASYNC_LOGOUT_REQUEST, parameter3=3)
    now = clock()
    made.progress(now)
    ladder = Ladder(made)
    made.queue.connection.last_heard = now + 10
    ladder.tick(now + 2)
    assert not _logouts(kept.dm)
    ladder.tick(now + 4)
    assert len(_logouts(kept.dm)) == 1 and not kept.dm.disconnected
    ladder.tick(now + 10)  # the logout is not answered either
    assert kept.dm.disconnected
    kept.lose()
    assert [sent[0] for sent in kept.regain().sent] == [slot]


@pytest.mark.parametrize("event", [pdu.ASYNC_CONNECTION_DROP, pdu.ASYNC_SESSION_DROP])
def test_target_announces_a_drop(event: int, clock: Clock) -> None:
    """The session waits for Time2Wait, up to a bound."""
    kept = Kept()
    slot = command(kept.session, CountingWaiter())
    _event(kept.dm, event, parameter2=60000)
    kept.session.progress(clock())
    assert slot.state == QUEUED and "drop" in str(kept.session.suspended)
    assert kept.session.respite.reconnect_at == clock() + MOST_WAIT_S
    assert not kept.session.respite.reinstate_at  # that of the login does not count then


def test_scsi_event_is_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    with caplog.at_level(logging.WARNING):
        _event(kept.dm, pdu.ASYNC_SCSI)
        kept.session.progress(1.0)
    assert kept.session.suspended is None and "SCSI asynchronous event" in caplog.text
    assert command(kept.session, CountingWaiter()).state == SENT


def test_many_losses() -> None:
    """After 20 lost connections every waiter is woken exactly once, and every slot is free."""
    kept = Kept(depth=8, window=3)
    made = kept.session
    waiters = [CountingWaiter() for _ in range(8)]
    slots = [command(made, waiter) for waiter in waiters]
    for turn in range(20):
        dm = kept.regain(window=1 + turn % 5, cmd_sn=turn) if turn else kept.dm
        numbers = [cmd_sn_of(sent) for sent in dm.sent]
        assert all(b - a == 1 for a, b in pairwise(numbers))
        kept.lose()
    dm = kept.regain(window=32)
    assert [sent[0] for sent in dm.sent] == slots
    for sent in dm.sent:
        dm.inbox.append(response(itt_of(sent)))
    made.progress(9.0)
    assert all(slot.state == TAKEN and slot.error is None for slot in slots)
    assert [waiter.woken for waiter in waiters] == [1] * 8
    for slot in slots:
        made.queue.release(slot)
    assert made.queue.busy == 0 and made.queue.free_controls == CONTROL_SLOTS
