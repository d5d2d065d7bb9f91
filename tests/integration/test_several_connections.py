"""Sessions with our own target whose connections are cut, one of several or the only one."""

from __future__ import annotations

import gc
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

from iserblk.disk import aio
from iserblk.disk.seam import AsyncDisk
from iserblk.initiator import reconnecting
from iserblk.initiator.session.session import Session
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.census import nothing_new
from tests.support.cores import session_of
from tests.support.faces import one_disk, read, write
from tests.support.faults.behaviours import Cut
from tests.support.faults.proxy import FaultProxy
from tests.support.transports import TRANSPORTS, by
from tests.support.until import until

pytestmark = pytest.mark.logs(logs.ONE_OF_SEVERAL, logs.RECONNECTED, logs.ASYNC_MESSAGE)

SPEC = "lun:size=16M:wce=0"
SIZE = 16 << 10
BLOCKS = 64
transport = pytest.mark.parametrize("transport", TRANSPORTS)
level = pytest.mark.parametrize("level", [0, 1, 2])


@asynccontextmanager
async def opened(
    start_target: StartTarget, transport: str, level: int, count: int
) -> AsyncIterator[tuple[AsyncDisk, Session]]:
    target = start_target(SPEC)
    url = by(transport, f"{target.url}/0")
    options = {"connections": str(count), "error-recovery-level": str(level)}
    async with aio.open_disks([url], options) as disks:
        disk = disks.disks[disks.default]
        yield disk, session_of(disk)


def recovered(session: Session, cuts: int) -> bool:
    assert not session.counts.reconnects, "recovery was given up"
    return session.counts.recovered == cuts


def reconnected(session: Session, times: int) -> bool:
    return session.counts.reconnects == times


# shows: SYSTEM-30
@transport
@level
def test_all_connections_are_there_and_in_use(
    start_target: StartTarget, transport: str, level: int
) -> None:
    async def main() -> None:
        async with opened(start_target, transport, level, 4) as (disk, session):
            assert session.count == 4 and not session.missing
            described = session.describe()
            assert described["connections"] == 4
            assert described.get("error_recovery_level", 0) == level

            async def one(at: int) -> None:
                data = bytearray([at]) * SIZE
                await write(disk, bytes(data), at * SIZE)
                back = await read(disk, at * SIZE, SIZE)
                assert back == data

            async with trio.open_nursery() as nursery:
                for at in range(BLOCKS):
                    nursery.start_soon(one, at)
            assert all(connection.ended for connection in session.queue.connections)

    trio.run(main)


@pytest.mark.parametrize(
    ("transport", "level", "count"),
    [
        *(("iser", 0, 3), ("iscsi", 1, 3), ("stream", 2, 3), ("iser", 2, 1)),
        *(
            pytest.param(transport, level, count, marks=pytest.mark.long)
            for transport, level, count in (
                *(("stream", 0, 3), ("iscsi", 0, 3), ("iser", 1, 3), ("stream", 1, 3)),
                *(("iser", 2, 3), ("iscsi", 2, 3), ("stream", 2, 1), ("iscsi", 2, 1)),
            )
        ),
    ],
)
def test_one_connection_after_the_other_is_cut(
    start_target: StartTarget, transport: str, level: int, count: int
) -> None:
    """Every write is acknowledged once it is there, and what was acknowledged stays; the session
    is not reconnected. At level 2 that holds for its only connection, too, which is reinstated.

    proves: ISER-7.3.3-2, ISER-7.3.3-5, ISER-7.3.3-6, ISER-7.3.3-8, ISER-10.2.2-1, ISER-10.2.2-2
    """
    chance = random.Random(level)

    async def main() -> None:
        async with opened(start_target, transport, level, count) as (disk, session):
            done = False
            tsih = session.tsih

            async def cut() -> None:
                nonlocal done
                for cuts in range(8):
                    await until(lambda: session.count == count and session.queue.sent > 4)
                    chance.choice(session.queue.connections).datamover.disconnect()
                    await until(partial(recovered, session, cuts + 1))
                done = True

            async def one(at: int) -> None:
                turn = 0
                while not done:
                    turn += 1
                    data = bytearray([turn % 251, at]) * (SIZE // 2)
                    await write(disk, bytes(data), at * SIZE)
                    back = await read(disk, at * SIZE, SIZE)
                    assert back == data

            async with trio.open_nursery() as nursery:
                nursery.start_soon(cut)
                for at in range(16):
                    nursery.start_soon(one, at)
            counts = session.counts
            assert (counts.recovered, counts.reconnects, session.tsih) == (8, 0, tsih)
            if level < 2:
                assert counts.replayed and not counts.reassigned
            else:
                assert counts.reassigned

    trio.run(main)


def held() -> Counter[str]:
    """Objects of sessions and connections, by class, that are in use."""
    gc.collect()
    rooms = ("iserblk.initiator.", "iserblk.datamover.", "iserblk.rcap.")
    return Counter(
        type(each).__qualname__
        for each in gc.get_objects()
        if str(type(each).__module__).startswith(rooms)
    )


@transport
@pytest.mark.parametrize("lost", ["one", "all"])
def test_lost_connections_leave_no_objects(
    start_target: StartTarget, transport: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The objects of a connection refer to each other, so they are there until Python's collector
    has run; then none is. Else all would be left that are lost here."""
    monkeypatch.setattr(reconnecting, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(reconnecting, "MOST_PAUSE_S", 0.01)

    async def main() -> None:
        async with opened(start_target, transport, 0, 2) as (disk, session):
            before: Counter[str] = Counter()
            for turn in range(7):
                await write(disk, bytes([turn]) * SIZE, turn * SIZE)
                if turn == 2:
                    before = held()
                    assert before["Connection"] > 0 and before["PduSlot"] > 0
                connections = [*session.queue.connections]
                for each in connections[: 1 if lost == "one" else None]:
                    each.datamover.disconnect()
                counts = session.counts
                while counts.recovered + counts.reconnects <= turn or session.count < 2:
                    await write(disk, bytes([turn]) * SIZE, turn * SIZE)
            await write(disk, bytes(SIZE), 0)
            await until(lambda: nothing_new(held(), before))

    trio.run(main)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("transport", "length"), [("iser", 36 << 10), ("iscsi", 200 << 10), ("stream", 36 << 10)]
)
def test_a_write_is_cut_anywhere(
    start_target: StartTarget, transport: str, length: int, count: int
) -> None:
    """What the target has of a write is what it does not ask for again, wherever the connection
    ended between the command and the last of its Data-Outs, which are all unsolicited over iSER.

    proves: ISER-10.2.2-2
    """
    target = start_target(SPEC)
    url = by(transport, f"{target.url}/0", f"connections={count}&error-recovery-level=2")
    reassigned = 0

    async def cut_at(after: int) -> None:
        nonlocal reassigned
        data = random.Random(after).randbytes(length)
        with FaultProxy(("127.0.0.1", target.port)) as proxy:
            async with one_disk("async", proxy.through(url)) as disk:
                session: Session = session_of(disk)
                await until(lambda: session.count == count)
                up = proxy.alive[0].up  # the connection that comes first takes the write
                up.behaviours.append(Cut(up.taken + after))
                await write(disk, data, 0)
                assert await read(disk, 0, length) == data
                assert session.counts.reconnects == 0 and session.counts.recovered == 1
                reassigned += session.counts.reassigned

    async def main() -> None:
        for after in range(1, length + 1, length // 18):
            await cut_at(after)
        assert reassigned, "no cut was behind the command"

    trio.run(main)


@transport
@pytest.mark.parametrize("count", [1, 3])
def test_the_last_connection_is_reinstated(
    start_target: StartTarget, transport: str, count: int
) -> None:
    """All are lost at once; the session stays, and what was lost with the others comes back."""

    async def main() -> None:
        async with opened(start_target, transport, 2, count) as (disk, session):
            data = bytearray(b"x") * SIZE
            await write(disk, bytes(data), 0)
            tsih = session.tsih
            for connection in session.queue.connections.copy():
                connection.datamover.disconnect()
            back = await read(disk, 0, SIZE)
            assert back == data
            counts = session.counts
            assert (counts.reconnects, counts.recovered, session.tsih) == (0, count, tsih)
            await until(lambda: session.count == count)

    trio.run(main)


@transport
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_target_that_is_started_again(
    start_target: StartTarget,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    count: int,
    how: str,
) -> None:
    """One that was killed has no session: it refuses the login that was to reinstate a connection
    (020A), and session reinstatement brings all that is in flight to its end. One that stops asks
    for the logout of each connection, and gets it."""
    monkeypatch.setenv("LOGOUT_S", "10")
    running = start_target(SPEC)
    url = by(transport, f"{running.url}/0")
    options = {"connections": str(count), "error-recovery-level": "2"}
    stop = False
    done = 0

    async def one(disk: AsyncDisk, at: int) -> None:
        nonlocal done
        turn = 0
        while not stop:
            turn += 1
            data = bytearray([turn % 251, at]) * (SIZE // 2)
            await write(disk, bytes(data), at * SIZE)
            back = await read(disk, at * SIZE, SIZE)
            assert back == data
            done += 1

    async def main() -> None:
        nonlocal running, stop
        async with aio.open_disks([url], options) as disks, trio.open_nursery() as nursery:
            disk = disks.disks[disks.default]
            session: Session = session_of(disk)
            for at in range(16):
                nursery.start_soon(one, disk, at)

            def works(goal: int) -> bool:
                return session.count == count and done >= goal

            for turn in range(2):
                await until(partial(works, done + 64))
                listen = running.listen
                await trio.to_thread.run_sync(getattr(running, how))
                running = start_target(SPEC, listen=listen)
                await until(partial(reconnected, session, turn + 1))
            assert session.counts.reconnects == 2 and session.error is None
            stop = True

    trio.run(main)
    assert "did not log out" not in running.log.read_text()


@transport
@pytest.mark.parametrize("length", [36 << 10, 200 << 10])
@pytest.mark.parametrize("losses", [1, 2])
def test_reads_and_writes_are_cut_anywhere(
    start_target: StartTarget, transport: str, length: int, losses: int
) -> None:
    """Two reads and a write on a connection that ends between the command and the answer of any of
    them, on its way up or down; with two losses also the connection that takes them over, before,
    in or behind the reassignment.

    proves: ISER-10.2.2-2, ISER-10.2.2-3, ISER-10.2.2-7
    """
    target = start_target(SPEC)
    url = by(transport, f"{target.url}/0", "error-recovery-level=2")
    chance = random.Random(f"{transport}{length}{losses}")
    reassigned = 0

    async def cut_at(way: str, after: list[int]) -> None:
        nonlocal reassigned
        old = [chance.randbytes(length) for _ in range(4)]
        new = chance.randbytes(length)
        with FaultProxy(("127.0.0.1", target.port)) as proxy:
            through = proxy.through(f"{url}&connections={losses + 1}")
            async with one_disk("async", through) as disk:
                session: Session = session_of(disk)
                await until(lambda: session.count == losses + 1)
                for at, data in enumerate(old):
                    await write(disk, data, at * length)
                for proxied, count in zip(proxy.alive, after, strict=False):
                    flow = proxied.up if way == "up" else proxied.down
                    flow.behaviours.append(Cut(flow.taken + count))

                async def one(at: int) -> None:
                    if at == 3:
                        await write(disk, new, at * length)
                    else:
                        assert await read(disk, at * length, length) == old[at]

                async with trio.open_nursery() as nursery:
                    for at in range(4):
                        nursery.start_soon(one, at)
                assert await read(disk, 3 * length, length) == new
                reassigned += session.counts.reassigned

    async def main() -> None:
        for way, most in (("up", length), ("down", 2 * length)):
            for _ in range(6):
                await cut_at(way, [chance.randrange(1, most) for _ in range(losses)])
        assert reassigned, "no cut was behind a command"

    trio.run(main)


@transport
def test_all_connections_cut_at_once(start_target: StartTarget, transport: str) -> None:
    """Where the session itself is to be left, session reinstatement follows; then the other
    connections come back."""

    async def main() -> None:
        async with opened(start_target, transport, 2, 3) as (disk, session):
            data = bytearray(b"x") * SIZE
            await write(disk, bytes(data), 0)
            session.disconnect()
            back = await read(disk, 0, SIZE)
            assert back == data and session.counts.reconnects == 1
            await until(lambda: session.count == 3)

    trio.run(main)
