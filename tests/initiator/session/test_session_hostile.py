"""A target that breaks the protocol after an orderly login.

Whatever it sends, in whatever pieces: operations end with documented errors; the session fails with
RemoteProtocolError or ConnectionLost, or goes on; a buffer that was given back is not touched
again, and a buffer of a write is never changed.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import select
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from iserblk.commands import running as commands
from iserblk.commands.command import Operation
from iserblk.disk import aio
from iserblk.disk.seam import BlockingLun
from iserblk.errors import (
    ConnectionLost,
    IserblkError,
    LocalProtocolError,
    RemoteProtocolError,
    TransportError,
)
from iserblk.initiator import reconnecting
from iserblk.initiator.drivers import tasks
from iserblk.initiator.reconnecting import Reconnector
from iserblk.initiator.session import deadlines
from iserblk.initiator.session.sending import CONTROL_SLOTS
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu
from iserblk.rcap import seam
from iserblk.rcap.iwarp import llp
from iserblk.rcap.iwarp.queuepair import IwarpQueuePair
from iserblk.scsi import sense as sense_data
from iserblk.sockets import stream
from iserblk.sockets.wire import wire
from tests.initiator.fake import CountingWaiter, command, itt_of, response, session
from tests.initiator.peer import CONTROL, PAIRS, Heard, Peer, disk_of, linked
from tests.initiator.tcp_peer import linked_tcp
from tests.support.disk_threads import disks_of

PATIENCE_S = 30
MARK = 0xA5

# --- what the target may do -------------------------------------------------------------------

_OPCODES = st.sampled_from(
    [bhs.NOP_IN, bhs.SCSI_RESPONSE, bhs.TASK_MANAGEMENT_RESPONSE, bhs.LOGIN_RESPONSE,
     bhs.TEXT_RESPONSE, bhs.DATA_IN, bhs.LOGOUT_RESPONSE, bhs.R2T, bhs.ASYNC_MESSAGE, bhs.REJECT,
     bhs.SCSI_COMMAND, 0x61]
)  # fmt: skip
_NUMBERS = st.sampled_from([0, 1, 2, 31, 1 << 16, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
_SENSES = st.sampled_from(
    [
        b"",
        sense_data.encode_fixed(sense_data.UNIT_ATTENTION, 0x29, 0),
        sense_data.encode_fixed(sense_data.ILLEGAL_REQUEST, 0x21, 0),
        sense_data.encode_descriptor(sense_data.MEDIUM_ERROR, 0x11, 0),
        b"\x71\x00\x06",
        b"\xff" * 300,
    ]
)
# Which command an act answers: an index into the commands that were heard, modulo their number.
_WHICH = st.integers(0, 7)

_ACTS = st.one_of(
    st.tuples(st.just("message"), st.binary(max_size=200)),
    st.tuples(
        st.just("pdu"),
        st.fixed_dictionaries(
            {
                "opcode": _OPCODES,
                "flags": st.sampled_from([0x80, 0x82, 0x84, 0x86, 0x98, 0]),
                "response": st.sampled_from([0, 0, 0, 1, 5, 255]),
                "status": st.sampled_from([0, 0, 0, 2, 4, 8, 0x18, 0x28, 0x40, 0xFF]),
                "which": _WHICH,
                "stranger": st.booleans(),  # a tag that the initiator never sent
                "numbers": st.tuples(_NUMBERS, _NUMBERS, _NUMBERS),
                "residual": st.sampled_from([0, 0, 1, 512, 4096, 0xFFFFFFFF]),
                "sense": _SENSES,
                "invalidate": st.sampled_from(["", "", "own", "other", "none"]),
            }
        ),
    ),
    st.tuples(st.just("good"), _WHICH),
    st.tuples(st.just("write"), _WHICH, st.sampled_from([0, 512, 4000, 1 << 40]),
              st.sampled_from([0, 1, 512, 5000])),
    st.tuples(st.just("read"), _WHICH, st.sampled_from([0, 512, 1 << 40]),
              st.sampled_from([0, 1, 512, 9000])),
    st.tuples(st.just("reject"), _WHICH, st.sampled_from([2, 3, 4])),
    st.tuples(st.just("asynchronous"), st.sampled_from([0, 1, 2, 3, 4, 5, 255]),
              st.tuples(*[st.sampled_from([0, 1, 3, 0xFFFF])] * 3)),
    st.tuples(st.just("bytes"), st.binary(min_size=1, max_size=100)),
    st.tuples(st.just("close")),
)  # fmt: skip


class Hostile:
    """Plays a script: one act for every PDU of the initiator, all acts left after its last PDU,
    then nothing more."""

    def __init__(self, peer: Peer, acts: list[Any]) -> None:
        self.peer = peer
        self.sinks: list[bytearray] = []  # into which the target read
        self.acts = iter(acts)
        self._random = random.Random(len(acts))

    def on_pdu(self, _heard: Heard) -> None:
        for _ in range(self._random.randint(1, 3)):
            act = next(self.acts, None)
            if act is not None:
                with suppress(TransportError):
                    getattr(self, f"_{act[0]}")(*act[1:])

    def _heard(self, which: int) -> Heard:
        return self.peer.heard[-1 - which % len(self.peer.heard)]

    def _stag(self, which: int) -> int:
        head = self._heard(which).head
        return head.read_stag or head.write_stag or 0x100

    def _message(self, data: bytes) -> None:
        self.peer.send(data)

    def _pdu(self, fields: dict[str, Any]) -> None:
        heard = self._heard(fields["which"])
        sense: bytes = fields["sense"]
        data = len(sense).to_bytes(2, "big") + sense if sense else b""
        invalidate = {"own": self._stag(fields["which"]), "other": self._stag(0), "none": 0x12345}
        stat_sn, exp_cmd_sn, max_cmd_sn = fields["numbers"]
        self.peer.say(
            pdu.ScsiResponse(
                opcode=fields["opcode"],
                flags=fields["flags"],
                response=fields["response"],
                status=fields["status"],
                itt=heard.itt ^ (1 << 20 if fields["stranger"] else 0),
                stat_sn=stat_sn,
                exp_cmd_sn=exp_cmd_sn,
                max_cmd_sn=max_cmd_sn,
                residual=fields["residual"],
                data_length=len(data),
            ),
            data,
            invalidate.get(fields["invalidate"], 0),
        )

    def _good(self, which: int) -> None:
        self.peer.respond(self._heard(which))

    def _write(self, which: int, to: int, length: int) -> None:
        self.peer.write(self._stag(which), to, bytes([MARK]) * length)

    def _read(self, which: int, to: int, length: int) -> None:
        self.sinks.append(bytearray(length))
        self.peer.read(self._stag(which), to, self.sinks[-1])

    def _reject(self, which: int, reason: int) -> None:
        header = self._heard(which).bhs
        self.peer.say(
            pdu.Reject(
                reason=reason,
                data_length=48,
                stat_sn=self.peer.next_stat_sn(),
                exp_cmd_sn=1,
                max_cmd_sn=99,
            ),
            header,
        )

    def _asynchronous(self, event: int, parameters: tuple[int, int, int]) -> None:
        one, two, three = parameters
        self.peer.say(
            pdu.AsyncMessage(
                event=event,
                parameter1=one,
                parameter2=two,
                parameter3=three,
                stat_sn=self.peer.next_stat_sn(),
                exp_cmd_sn=1,
                max_cmd_sn=99,
            )
        )

    def _bytes(self, data: bytes) -> None:
        """Send raw bytes, without framing where the transport has framing."""
        if isinstance(self.peer.pair, IwarpQueuePair):
            with suppress(OSError):
                os.write(self.peer.pair.fileno(), data)
        else:
            self.peer.send(data)

    def _close(self) -> None:
        self.peer.pair.disconnect()


# --- the initiator's operations ---------------------------------------------------------------

IO_TIMEOUT_S = 0.05
KIB = 1024
WRITTEN, GIVEN_BACK = 0x11, 0x77  # content of buffers: during a write, after any operation
READS = [(4096, 0), (700, 300), (512 * KIB, 4096)]  # length, offset
WRITES = [(4096, 0), (9 * KIB, 8192), (700, 300), (300 * KIB, 4096)]
DEPTH = 6
TCP = ["tcp", "tcp-level-1"]


@pytest.fixture(autouse=True)
def _made_up_time() -> None:
    """None, but the real one: threads and tasks wait here."""


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short time limits towards the silent target, and no log."""
    monkeypatch.setattr(deadlines, "STEP_S", 0.02)
    monkeypatch.setattr(commands, "BACK_OFF_S", 0.001)
    monkeypatch.setattr(reconnecting, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tasks, "TICK_S", 0.01)
    monkeypatch.setattr(tasks, "LOGOUT_S", 0.05)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class _Sips:
    """A Wire that receives a few bytes at a time, in pieces of random lengths."""

    def __init__(self, wire: Any, chance: random.Random) -> None:
        self.send = wire.send
        self._receive = wire.receive
        self._chance = chance

    def receive(self, buffers: list[memoryview]) -> int:
        count: int = self._receive([buffers[0][: self._chance.choice((1, 3, 17, 60, 5000))]])
        return count


class Victims:
    """The buffers of all operations. ``wrong``: what must not have happened to them."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.disk = disk_of(session)
        self.reads = [bytearray(length) for length, _ in READS]
        self.writes = [bytearray([WRITTEN]) * length for length, _ in WRITES]
        self.wrong: list[object] = []

    def gave_back(self, buffer: bytearray, written: bool) -> None:
        if written and buffer.count(WRITTEN) != len(buffer):
            self.wrong.append("a buffer was changed that was to be written from")
        buffer[:] = bytes([GIVEN_BACK]) * len(buffer)

    def failed(self, error: Exception) -> None:
        if not isinstance(error, IserblkError) or isinstance(error, LocalProtocolError):
            self.wrong.append(error)

    def check(self, hostile: Hostile) -> None:
        """Check buffers and session, after all operations have ended."""
        assert not self.wrong, self.wrong
        gc.collect()  # exceptions, and the frames they came through, are cycles
        for buffer in self.reads + self.writes:
            assert buffer.count(GIVEN_BACK) == len(buffer)
            buffer.clear()  # BufferError while a view of it exists
        assert not any(GIVEN_BACK in sink for sink in hostile.sinks)
        assert GIVEN_BACK not in hostile.peer.sent
        session = self.session
        error = session.error
        assert isinstance(error, RemoteProtocolError | ConnectionLost), error
        assert session.queue.busy == session.queue.in_flight == 0
        assert not session.queue.waiting.entries


def _link(pair: str, immediate: bool) -> tuple[Session, Peer]:
    if pair in TCP:
        level = TCP.index(pair)
        return linked_tcp(level, DEPTH, IO_TIMEOUT_S, immediate_data=immediate)
    return linked(pair, depth=DEPTH, io_timeout=IO_TIMEOUT_S, immediate=immediate, level=1)


def _start(pair: str, acts: list[Any], seed: int) -> tuple[Session, Hostile, Victims]:
    chance = random.Random(seed)
    ends: list[object] = []

    def sipping(sock: socket.socket, end_of_record: bool) -> object:
        made = wire(sock, end_of_record)
        ends.append(sock)  # the initiator's end is made first
        return _Sips(made, chance) if len(ends) == 1 else made

    with pytest.MonkeyPatch.context() as patch:
        if seed & 2:
            patch.setattr(llp, "wire", sipping)
            patch.setattr(stream, "wire", sipping)
        made, peer = _link(pair, bool(seed & 1))
    return made, Hostile(peer, acts), Victims(made)


def _in_threads(pair: str, acts: list[Any], seed: int) -> None:
    _, hostile, victims = _start(pair, acts, seed)
    disks = disks_of(victims.disk)
    disk = disks.disks["lun0"]
    over = threading.Event()
    peer = hostile.peer

    def play() -> None:
        done = 0
        while peer.error is None and not over.is_set():
            select.select([peer.pair.fileno()], [], [], 0.05)
            peer.poll()
            for heard in peer.heard[done:]:
                done += 1
                hostile.on_pdu(heard)

    def client(buffer: bytearray | None, call: Callable[[], object], writes: bool) -> None:
        try:
            call()
        except Exception as error:
            victims.failed(error)
        if buffer is not None:
            victims.gave_back(buffer, writes)

    def clients() -> Iterator[threading.Thread]:
        for buffer, (_, offset) in zip(victims.reads, READS, strict=True):
            yield threading.Thread(
                target=client,
                args=(buffer, partial(_read_into, disk, buffer, offset), False),
            )
        for buffer, (_, offset) in zip(victims.writes, WRITES, strict=True):
            yield threading.Thread(
                target=client,
                args=(buffer, partial(_write_from, disk, buffer, offset), True),
            )
        for call in (disk.flush, partial(disk.trim, 0, 8192), partial(disk.extents, 0, 8192)):
            yield threading.Thread(target=client, args=(None, call, False))

    players = [threading.Thread(target=play), *clients()]
    for thread in players:
        thread.start()
    for thread in players[1:]:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    disks.close()
    over.set()
    players[0].join(PATIENCE_S)
    victims.check(hostile)
    peer.close()


def _read_into(disk: BlockingLun, buffer: bytearray, offset: int) -> None:
    disk.read_into(memoryview(buffer), offset)


def _write_from(disk: BlockingLun, buffer: bytearray, offset: int) -> None:
    disk.write(memoryview(buffer), offset)


async def _in_trio(pair: str, acts: list[Any], seed: int) -> None:
    made, hostile, victims = _start(pair, acts, seed)
    driver = tasks.TrioDriver(made)
    disk = aio.TrioDisk(victims.disk, driver)

    async def client(
        buffer: bytearray | None, call: Callable[[], Awaitable[object]], writes: bool
    ) -> None:
        try:
            if seed & 4:
                with trio.move_on_after(0.01):  # operations are cancelled, too
                    await call()
            else:
                await call()
        except Exception as error:
            victims.failed(error)
        if buffer is not None:
            victims.gave_back(buffer, writes)

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hostile.peer.run, hostile.on_pdu)
            await nursery.start(driver.run)
            async with trio.open_nursery() as clients:
                for buffer, (_, offset) in zip(victims.reads, READS, strict=True):
                    call = partial(disk.read_into, memoryview(buffer), offset)
                    clients.start_soon(client, buffer, call, False)
                for buffer, (_, offset) in zip(victims.writes, WRITES, strict=True):
                    call = partial(disk.write, memoryview(buffer), offset)
                    clients.start_soon(client, buffer, call, True)
                clients.start_soon(client, None, disk.flush, False)
                clients.start_soon(client, None, partial(disk.trim, 0, 8192), False)
                clients.start_soon(client, None, partial(disk.extents, 0, 8192), False)
                del call, buffer
            await driver.log_out()
            nursery.cancel_scope.cancel()
    del clients, nursery
    victims.check(hostile)
    hostile.peer.close()


async def _in_recovery(pair: str, acts: list[Any], seed: int) -> None:
    """Each connection that is lost is followed by another one, to a peer that goes on with the
    script; in the end with one that is silent."""
    script = iter(acts)
    hostiles: list[Hostile] = []

    def meet(peer: Peer) -> Hostile:
        hostile = Hostile(peer, [])
        hostile.acts = script
        hostiles.append(hostile)
        return hostile

    made, peer = _link(pair, bool(seed & 1))
    first = meet(peer)
    victims = Victims(made)
    driver = tasks.TrioDriver(made)
    disk = aio.TrioDisk(victims.disk, driver)

    async def client(
        buffer: bytearray, call: Callable[[], Awaitable[object]], writes: bool
    ) -> None:
        for _ in range(2):
            try:
                await call()
            except Exception as error:
                victims.failed(error)
        victims.gave_back(buffer, writes)

    def resume(_fresh: Session) -> Operation[None]:
        yield from ()

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            spawn = nursery.start_soon

            async def connect() -> Session:
                await trio.lowlevel.checkpoint()
                fresh, end = _link(pair, bool(seed & 1))
                spawn(end.run, meet(end).on_pdu)
                return fresh

            nursery.start_soon(first.peer.run, first.on_pdu)
            await nursery.start(driver.run)
            reconnector = Reconnector(driver, connect, resume)
            nursery.start_soon(reconnector.run)
            async with trio.open_nursery() as clients:
                for buffer, (_, offset) in zip(victims.reads, READS, strict=True):
                    call = partial(disk.read_into, memoryview(buffer), offset)
                    clients.start_soon(client, buffer, call, False)
                for buffer, (_, offset) in zip(victims.writes, WRITES, strict=True):
                    call = partial(disk.write, memoryview(buffer), offset)
                    clients.start_soon(client, buffer, call, True)
                del call, buffer
            reconnector.stop()
            await driver.log_out()
            if made.error is None:
                made.fail(ConnectionLost("end of test"))
            nursery.cancel_scope.cancel()
    del clients, nursery
    for hostile in hostiles:
        for heard in hostile.peer.heard:  # what it remembers of commands that have ended
            for stag in filter(None, (heard.head.read_stag, heard.head.write_stag)):
                hostile.peer.write(stag, 0, bytes([MARK]))
    assert all(GIVEN_BACK not in each.peer.sent for each in hostiles)
    victims.check(first)
    for hostile in hostiles:
        hostile.peer.close()


SCRIPTS = st.lists(_ACTS, max_size=20)
SEEDS = st.integers(0, 1 << 16)
EXAMPLES = settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SURVIVORS = [
    *TCP,
    *(pair for pair in PAIRS if pair != "iwarp-nocrc"),
    pytest.param("iwarp-nocrc", marks=pytest.mark.long),  # the CRC hides no fault of a session
]


@pytest.mark.parametrize("pair", SURVIVORS)
@EXAMPLES
@given(acts=SCRIPTS, seed=SEEDS)
def test_threads_survive(pair: str, acts: list[Any], seed: int) -> None:
    """Random acts while several threads wait."""
    _in_threads(pair, acts, seed)


@pytest.mark.parametrize("pair", SURVIVORS)
@EXAMPLES
@given(acts=SCRIPTS, seed=SEEDS)
def test_tasks_survive(pair: str, acts: list[Any], seed: int) -> None:
    """Random acts against the trio driver, with cancellations."""
    trio.run(_in_trio, pair, acts, seed)


@pytest.mark.parametrize("pair", SURVIVORS)
@settings(EXAMPLES, max_examples=15)
@given(acts=SCRIPTS, seed=SEEDS)
def test_recovery_survives(pair: str, acts: list[Any], seed: int) -> None:
    """Random acts while connections are lost, and made again."""
    trio.run(_in_recovery, pair, acts, seed)


# --- single misdeeds --------------------------------------------------------------------------


def _settle(made: Session) -> None:
    """Run ``progress`` as long as the descriptor asks for it."""
    while made.error is None and select.select([made.fileno()], [], [], 0.05)[0]:
        made.progress(monotonic())


@pytest.mark.parametrize("pair", PAIRS)
def test_violation_behind_a_good_answer(pair: str) -> None:
    """A violation right after a valid answer is noticed, although no more bytes come."""
    made, peer = linked(pair)
    waiter = CountingWaiter()
    slot = command(made, waiter)
    _until(peer, 1)
    answer = seam.WorkRequest(seam.SEND_SE)
    answer.data = memoryview(CONTROL + response(peer.heard[0].itt))
    violation = seam.WorkRequest(seam.RDMA_WRITE)
    violation.stag, violation.data = 0x4711, memoryview(b"x")
    peer.pair.post([answer, violation])
    assert select.select([made.fileno()], [], [], PATIENCE_S)[0]
    _settle(made)
    assert waiter.woken == 1 and slot.error is None
    assert isinstance(made.error, RemoteProtocolError)
    peer.close()


def _end(made: Session, slot: TaskSlot) -> None:
    """Run ``progress`` until the command of ``slot`` has ended, and give it back."""
    while slot.waiter.pending and made.error is None:
        assert select.select([made.fileno()], [], [], PATIENCE_S)[0]
        made.progress(monotonic())
    made.queue.release(slot)


def _until(peer: Peer, count: int) -> None:
    while len(peer.heard) < count:
        assert select.select([peer.pair.fileno()], [], [], PATIENCE_S)[0]
        peer.poll()


def test_pings_without_end_while_the_wire_is_full() -> None:
    """A target that sends pings without end and reads nothing is disconnected: its pings take no
    memory."""
    made, dm = session()
    dm.full = True
    ping = pdu.NopIn(itt=bhs.NO_TAG, ttt=7, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32).pack()
    for _ in range(4 * CONTROL_SLOTS):
        dm.inbox.append(ping)
        made.progress(monotonic())
    assert isinstance(made.error, RemoteProtocolError) and "flood" in str(made.error)
    assert len({id(slot) for slot, _ in dm.sent}) == len(dm.sent) < CONTROL_SLOTS


def test_pings_that_are_answered_in_time_are_no_flood() -> None:
    made, dm = session()
    ping = pdu.NopIn(itt=bhs.NO_TAG, ttt=7, stat_sn=100, exp_cmd_sn=1, max_cmd_sn=32).pack()
    for _ in range(4 * CONTROL_SLOTS):
        dm.inbox.append(ping)
        made.progress(monotonic())
    assert made.error is None and len(dm.sent) == 4 * CONTROL_SLOTS


@pytest.mark.parametrize("opcode", [bhs.NOP_IN, bhs.LOGOUT_RESPONSE, bhs.DATA_IN, bhs.R2T])
def test_answer_of_another_kind_than_the_question(opcode: int) -> None:
    """A PDU of another kind with the tag of an ABORT TASK is not taken for its answer."""
    made, dm = session()
    waiter = CountingWaiter()
    slot = command(made, waiter)
    deadlines.Ladder(made).cancel(slot, monotonic())
    answer = pdu.TaskManagementResponse(
        opcode=opcode, response=0, itt=itt_of(dm.sent[1]), stat_sn=1, exp_cmd_sn=1, max_cmd_sn=32
    )
    dm.inbox.append(answer.pack())
    made.progress(monotonic())
    assert isinstance(made.error, RemoteProtocolError)
    assert waiter.woken == 1 and isinstance(slot.error, RemoteProtocolError)


# --- memory that is not the target's any more ---------------------------------------------------

EVERY_PAIR = [*TCP, *PAIRS]


def _submitted(
    made: Session, fill: Callable[[TaskSlot, bytes, memoryview], None], buffer: bytearray
) -> TaskSlot:
    slot = made.queue.take_now()
    assert slot is not None
    slot.waiter = CountingWaiter()
    slot.waiter.pending = 1
    fill(slot, bytes(8), memoryview(buffer))
    made.queue.submit(slot)
    return slot


def _read(made: Session, buffer: bytearray) -> TaskSlot:
    """Submit a READ into ``buffer``."""
    return _submitted(made, commands.fill_read, buffer)


def _write(made: Session, buffer: bytearray) -> TaskSlot:
    """Submit a WRITE from ``buffer``."""
    return _submitted(made, commands.fill_write, buffer)


def _reject(peer: Peer, heard: Heard) -> None:
    """The target has discarded the command, it says, because its data was damaged."""
    peer.say(
        pdu.Reject(
            reason=pdu.REJECT_DATA_DIGEST_ERROR,
            data_length=bhs.BHS_LENGTH,
            stat_sn=peer.next_stat_sn(),
            exp_cmd_sn=1,
            max_cmd_sn=99,
        ),
        heard.bhs,
    )


@pytest.mark.parametrize("pair", EVERY_PAIR)
def test_what_was_advertised_to_a_command_that_was_rejected(pair: str) -> None:
    """Whether the command ends or is sent again: when it has ended, no buffer can be written."""
    made, peer = _link(pair, False)
    buffer = bytearray(4096)
    slot = _read(made, buffer)
    _until(peer, 1)
    _reject(peer, peer.heard[0])
    _settle(made)
    if slot.waiter.pending:
        _until(peer, 2)
        peer.respond(peer.heard[-1], flags=0x82, residual=len(buffer))
        _settle(made)
    assert not slot.waiter.pending
    for heard in peer.heard:
        if heard.head.read_stag:
            peer.write(heard.head.read_stag, 0, bytes([MARK]) * 512)
            _settle(made)
    assert not any(buffer)
    made.fail(ConnectionLost("end of test"))
    peer.close()


@pytest.mark.parametrize("pair", TCP)
def test_what_was_asked_for_before_a_command_was_sent_again(pair: str) -> None:
    """The target asks for data, takes none of it, and has the command sent again: when that has
    ended, no data leaves from its buffer any more."""
    made, peer = _link(pair, False)
    buffer = bytearray([WRITTEN]) * made.parameters.max_burst_length
    slot = _write(made, buffer)
    _until(peer, 1)
    peer.read(peer.heard[0].itt, 0, bytearray(len(buffer)))
    _settle(made)
    assert made.wants_write()  # not all has left
    _reject(peer, peer.heard[0])
    _settle(made)
    if slot.waiter.pending:
        peer.respond(peer.heard[0])
        _settle(made)
    assert not slot.waiter.pending
    buffer[:] = bytes([GIVEN_BACK]) * len(buffer)
    while made.wants_write() and made.error is None:
        peer.poll()
        made.progress(monotonic())
    while select.select([peer.pair.fileno()], [], [], 0)[0] and peer.error is None:
        peer.poll()
    assert peer.sent and GIVEN_BACK not in peer.sent and peer.error is None
    made.fail(ConnectionLost("end of test"))
    buffer.clear()  # BufferError while a view of it exists
    peer.close()


@pytest.mark.parametrize("pair", TCP)
def test_commands_that_the_target_answers_and_does_not_take(pair: str) -> None:
    """Their tags can be guessed. What waits to be sent has a bound."""
    made, peer = _link(pair, False)
    buffer = bytearray(512)
    for _ in range(10_000):
        if made.error is not None:
            break
        slot = _read(made, buffer)
        peer.say(
            pdu.ScsiResponse(
                itt=slot.itt,
                status=0,
                flags=0x82,
                residual=512,
                stat_sn=peer.next_stat_sn(),
                exp_cmd_sn=1,
                max_cmd_sn=0x7FFFFFF,
            )
        )
        _end(made, slot)
    assert isinstance(made.error, RemoteProtocolError)
    peer.close()


@pytest.mark.parametrize("pair", TCP)
def test_writes_that_end_before_their_data_has_left(pair: str) -> None:
    """The target asks for data by tags that it has guessed, ends the command, and takes nothing.
    What of it is kept has a bound."""
    made, peer = _link(pair, False)
    buffer = bytearray(1 << 20)
    for _ in range(10_000):
        if made.error is not None:
            break
        slot = _write(made, buffer)
        peer.read(slot.itt, 0, buffer)
        peer.say(
            pdu.ScsiResponse(
                itt=slot.itt,
                status=0,
                stat_sn=peer.next_stat_sn(),
                exp_cmd_sn=1,
                max_cmd_sn=0x7FFFFFF,
            )
        )
        _end(made, slot)
    assert isinstance(made.error, RemoteProtocolError)
    peer.close()
