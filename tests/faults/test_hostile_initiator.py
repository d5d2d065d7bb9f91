"""Initiators that lie, flood or never end their login, a real target, and a bystander."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio
import trio.lowlevel

from iserblk.errors import IserblkError, TransportError
from iserblk.initiator.connecting import reach as connect_module
from iserblk.initiator.connecting.reach import connect
from iserblk.iscsi import bhs, pdu
from iserblk.options import Options
from iserblk.rcap import seam
from iserblk.rcap.iwarp import mpa
from iserblk.url import parse_url
from tests.faults.bystander import bystander
from tests.faults.changes import lie
from tests.iscsi import logins
from tests.support import logs
from tests.support.faces import one_disk, read, write
from tests.support.faults.behaviours import Behaviour
from tests.support.faults.proxy import FaultProxy
from tests.support.golden import golden
from tests.support.target import IQN, TargetProcess, running_target
from tests.support.transports import by
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.LOST_POWER, logs.RECONNECTED, logs.REJECTED)

MIB = 1 << 20
TRANSPORTS = ("iser", "iscsi")
LOGIN_S = 3.0
HALF_LOGINS = 1000
PATIENCE_S = 60.0
MOST_PINGS = 50_000


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    """A target: LUN 0 is for the bystander, LUN 1 for the hostile initiator."""
    place = tmp_path_factory.mktemp("lun")
    specs = [f"{place}/{name}:size=16M" for name in ("good", "bad")]
    patience = {"LOGIN_TIMEOUT_S": str(LOGIN_S)}
    with running_target(specs, place / "target.log", environment=patience) as running:
        yield running
    assert "Traceback" not in Path(running.log).read_text()


def beginnings() -> list[bytes]:
    """Beginnings of a login, cut off at bad places."""
    header, data = logins.request([("InitiatorName", "iqn.x:y"), ("TargetName", IQN)])
    whole = header + data + bytes(-len(data) & 3)
    going_on = logins.request([("InitiatorName", "iqn.x:y"), ("TargetName", IQN)], 1, None)
    first = going_on[0] + going_on[1] + bytes(-len(going_on[1]) & 3)
    start = mpa.MpaInitiator(private_data=b"\x40\0\0\0").data_to_send()
    return [b"", whole[:1], whole[:47], whole[:60], first, start[:1], start[:19], start,
            start + b"\0\x50\x41\x45" + bytes(20)]  # fmt: skip


async def settled(target: TargetProcess, baseline: dict[str, int]) -> None:
    """Wait until the target holds no more than at ``baseline``."""
    counted: dict[str, int] = {}
    with trio.move_on_after(PATIENCE_S):
        while True:
            counted = await trio.to_thread.run_sync(target.census)
            if all(counted[name] <= baseline[name] for name in ("descriptors", "queue pairs")):
                return
            await trio.sleep(0.2)
    pytest.fail(f"before: {baseline}; after: {counted}")


# shows: SYSTEM-46
async def test_a_thousand_half_logins(target: TargetProcess) -> None:
    """The target cuts off every half login, and each costs little memory. The bystander goes on.

    proves: ISER-7145-11-1
    """
    async with one_disk("async", f"{target.url}/0") as disk:  # warm
        await write(disk, bytes(MIB), 0)
    memory = target.memory
    async with bystander(f"{target.url}/0") as good:
        baseline = await trio.to_thread.run_sync(target.census)
        with contextlib.ExitStack() as stack:
            starts = beginnings()
            for number in range(HALF_LOGINS):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", target.port), 20))
                sock.sendall(starts[number % len(starts)])
                if number % 50 == 0:
                    await trio.lowlevel.checkpoint()
            turns = good.turns
            with trio.fail_after(PATIENCE_S):
                await until(lambda: good.turns > turns)
            grown = target.memory - memory
            print(f"{HALF_LOGINS} half logins: {grown / HALF_LOGINS / 1024:.0f} KiB each")
            assert grown < 128 * MIB  # mostly connections that have come through MPA start-up
            await settled(target, baseline)


def ping(number: int) -> bytes:
    return pdu.NopOut(
        opcode=bhs.NOP_OUT | bhs.IMMEDIATE,
        flags=0x80,
        data_length=4096,
        lun=bytes(8),
        itt=number & 0x7FFFFFFF,
        ttt=bhs.NO_TAG,
        cmd_sn=1,
        exp_stat_sn=1,
    ).pack() + bytes(4096)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_flood_of_pings_that_reads_no_answer(target: TargetProcess, transport: str) -> None:
    """The target disconnects the sender, or reads no more of it. Memory stays bounded, and the
    bystander goes on."""
    url = f"{target.url}/1".replace("iser:", f"{transport}:")
    baseline, memory = target.census(), target.memory
    async with bystander(f"{target.url}/0") as good:
        session = await connect(parse_url(url), Options())
        sent = [0]
        with trio.move_on_after(3), contextlib.suppress(TransportError, OSError):
            if transport == "iscsi":
                await _flood_bytes(session.fileno(), sent)
            else:
                await _flood_sends(session, sent)
        print(f"{transport}: {sent[0]} pings were taken")
        assert sent[0] > 30
        assert target.memory - memory < 128 * MIB
        turns = good.turns
        with trio.fail_after(PATIENCE_S):
            await until(lambda: good.turns >= turns + 10)
        session.fail(TransportError("end of test"))
    await settled(target, baseline)


HELLO = golden("iser/hello-28")
NOTHING_MORE = bytes((0x10,)) + bytes(27) + pdu.NopOut(
    opcode=bhs.NOP_OUT | bhs.IMMEDIATE, itt=bhs.NO_TAG, ttt=bhs.NO_TAG, cmd_sn=1, exp_stat_sn=1
).pack()  # fmt: skip


@pytest.mark.parametrize(
    ("messages", "answers"),
    [
        ([HELLO[:12]], []),
        ([HELLO + bytes(48)], []),
        ([HELLO[:1] + b"\x99" + HELLO[2:]], [0x31]),
        ([HELLO[:1] + b"\x19" + HELLO[2:]], []),
        ([HELLO, HELLO], [0x30]),
        ([NOTHING_MORE, HELLO], []),
        ([b"\x30" + HELLO[1:]], []),
    ],
    ids=["short", "long", "version", "versions", "twice", "late", "a-reply"],
)
async def test_bad_greetings(
    target: TargetProcess, messages: list[bytes], answers: list[int]
) -> None:
    """The target ends the connection, behind a HelloReply where one is due, and serves others.

    proves: ISER-10.1.3.2-3, ISER-10.1.3.3-1, ISER-10.1.3.3-3
    """
    baseline = target.census()
    async with bystander(f"{target.url}/0"):
        session = await connect(parse_url(f"{target.url}/1"), Options())
        pair = session.queue.connection.datamover.qp  # type: ignore[attr-defined]
        for message in messages:
            request = seam.WorkRequest(seam.SEND_SE)
            request.data = memoryview(message)
            pair.post([request])
        heard: list[int] = []
        with trio.fail_after(PATIENCE_S), pytest.raises(TransportError):
            while True:
                await trio.lowlevel.wait_readable(pair.fileno())
                heard += [done.data[0] for done in pair.progress(0.0)]
        assert heard == answers
        session.fail(TransportError("end of test"))
    await settled(target, baseline)


async def _flood_bytes(fileno: int, sent: list[int]) -> None:
    with socket.socket(fileno=os.dup(fileno)) as sock:
        sock.setblocking(False)
        while sent[0] < MOST_PINGS:
            data = ping(sent[0])
            while data:
                try:
                    data = data[sock.send(data) :]
                except BlockingIOError:
                    with trio.move_on_after(0.3) as scope:
                        await trio.lowlevel.wait_writable(sock)
                    if scope.cancelled_caught:
                        return
            sent[0] += 1
            await trio.lowlevel.checkpoint()


async def _flood_sends(session: object, sent: list[int]) -> None:
    pair: seam.QueuePair = session.queue.connection.datamover.qp  # type: ignore[attr-defined]
    header = bytes((0x10,)) + bytes(27)
    while sent[0] < MOST_PINGS:
        request = seam.WorkRequest(seam.SEND_SE)
        request.data = memoryview(header + ping(sent[0]))
        pair.post([request])
        sent[0] += 1
        await trio.lowlevel.checkpoint()
        while pair.wants_write():
            with trio.move_on_after(0.3) as scope:
                await trio.lowlevel.wait_writable(pair.fileno())
            if scope.cancelled_caught:
                return
            pair.post([])


# shows: SYSTEM-44
@pytest.mark.parametrize("transport", (*TRANSPORTS, "stream"))
@pytest.mark.parametrize("seed", range(4))
async def test_lies(
    target: TargetProcess, monkeypatch: pytest.MonkeyPatch, transport: str, seed: int
) -> None:
    """PDUs of a session are changed on their way to the target: lengths, tags, offsets, sequence
    numbers. Whatever becomes of the session, the bystander's data is not touched."""

    def plan(number: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        return ([lie(transport, seed * 1000 + number, 0.1)] if number < 8 else []), []

    baseline = target.census()
    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        url = by(transport, proxy.through(f"{target.url}/1"), "io-timeout=1")
        async with bystander(f"{target.url}/0"):
            with monkeypatch.context() as patch:  # the bystander's logins may take their time
                patch.setattr(connect_module, "LOGIN_TIMEOUT_S", 2.0)
                for _ in range(2):
                    with contextlib.suppress(IserblkError):
                        async with one_disk("async", url) as disk:
                            await _exercise(disk, seed)
    await settled(target, baseline)


async def _exercise(disk: object, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        size = chance.choice((512, 8192, 66048, 300 * 512))
        at = chance.randrange(8 * MIB) // 512 * 512
        await write(disk, bytes(size), at)  # type: ignore[arg-type]
        await read(disk, at, size)  # type: ignore[arg-type]
    await disk.flush()  # type: ignore[attr-defined]
