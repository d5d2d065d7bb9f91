"""The target dies and comes back, connections are cut: reads and writes see only a pause."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from iserblk.commands.command import Command
from iserblk.commands.listeners import LunListener
from iserblk.disk import aio, blocking
from iserblk.disk.seam import AsyncDisk
from iserblk.errors import CommandTimeout, LunChanged, OutOfRange, RemoteProtocolError
from iserblk.initiator import reconnecting
from iserblk.initiator.session.session import Session
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.census import census, nothing_new
from tests.support.cores import core_of, session_of
from tests.support.faces import FACES, InThreads, read, write
from tests.support.target import TargetProcess
from tests.support.until import all_ended, until

pytestmark = pytest.mark.logs(logs.RECONNECTED, logs.SHRUNK)

KIB = 1024
MIB = 1 << 20
PATIENCE_S = 60.0
SPEC = "lun:size=32M:wce=0"  # acknowledged data outlives a killed target

face = pytest.mark.parametrize("face", FACES)
transport = pytest.mark.parametrize("transport", ["iser", "iscsi"])


def _url(target: TargetProcess, transport: str) -> str:
    return target.url.replace("iser://", f"{transport}://") + "/0"


@asynccontextmanager
async def _opened(
    face: str,
    target: TargetProcess,
    transport: str = "iser",
    io_timeout: str = "60",
    **more: str,
) -> AsyncIterator[tuple[AsyncDisk, Session]]:
    """A disk, and its session."""
    urls, options = [_url(target, transport)], {"io-timeout": io_timeout, **more}
    if face == "async":
        async with aio.open_disks(urls, options) as disks:
            disk = disks.disks[disks.default]
            yield disk, session_of(disk)
    else:
        with blocking.open_disks(urls, options) as found:
            inner = found.disks[found.default]
            yield InThreads(inner), session_of(inner)  # type: ignore[misc]


async def _back(session: Session, reconnects: int) -> None:
    with trio.fail_after(PATIENCE_S):
        await until(lambda: session.counts.reconnects >= reconnects)


# shows: SYSTEM-39
@transport
@face
async def test_killed_and_started_again(
    start_target: StartTarget, face: str, transport: str
) -> None:
    """Sixteen clients verify what they wrote, while the target is killed three times."""
    running = start_target(SPEC)
    stop = False
    done = 0

    async def client(disk: AsyncDisk, number: int) -> None:
        nonlocal done
        chance = random.Random(number)
        base, size = number * MIB, MIB
        model = bytearray(size)
        await write(disk, bytes(size), base)
        while not stop:
            length = chance.choice((512, 4096, 5000, 65_536, 400_001))
            offset = chance.randrange(size - length)
            model[offset : offset + length] = data = chance.randbytes(length)
            await write(disk, data, base + offset)
            assert await read(disk, base + offset, length) == data
            done += 1
        assert await read(disk, base, size) == model

    async def work() -> None:
        goal = done + 4 * 16
        with trio.fail_after(PATIENCE_S):
            await until(lambda: done >= goal)

    async with _opened(face, running, transport) as (disk, session):
        async with trio.open_nursery() as nursery:
            for number in range(16):
                nursery.start_soon(client, disk, number)
            for turn in range(3):
                await work()
                listen = running.listen
                running.kill()
                await trio.sleep(0.2)
                running = start_target(SPEC, listen=listen)
                await _back(session, turn + 1)
            await work()
            stop = True
        assert session.counts.reconnects >= 3 and session.counts.replayed > 0
        assert session.error is None
        await all_ended(session.queue)


@transport
@face
async def test_commands_in_flight_are_sent_again(
    start_target: StartTarget, face: str, transport: str
) -> None:
    """A paused target has the commands and is killed: the next target process answers them."""
    running = start_target(SPEC)
    async with _opened(face, running, transport) as (disk, session):
        await write(disk, b"old" * 4096, 0)
        running.pause()
        done: list[bytes] = []

        async def reading() -> None:
            done.append(await read(disk, 0, 12_288))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(reading)
            for number in range(8):
                nursery.start_soon(write, disk, bytes([number + 1]) * MIB, (number + 1) * MIB)
                nursery.start_soon(write, disk, bytes([number + 1]) * 512, 64 * KIB + number * 512)
            await until(lambda: session.queue.in_flight >= 17)
            listen = running.listen
            running.kill()
            start_target(SPEC, listen=listen)
        assert done == [b"old" * 4096] and session.counts.reconnects >= 1
        for number in range(8):
            assert await read(disk, (number + 1) * MIB, MIB) == bytes([number + 1]) * MIB
        small = await read(disk, 64 * KIB, 4096)
        assert small == b"".join(bytes([number + 1]) * 512 for number in range(8))


@transport
@face
async def test_deadline_and_what_follows(
    start_target: StartTarget, face: str, transport: str
) -> None:
    """Each request fails once, at its deadline; requests after the outage succeed."""
    running = start_target(SPEC)
    async with _opened(face, running, transport, "1") as (disk, session):
        listen = running.listen
        running.kill()
        with pytest.raises(CommandTimeout, match="not connected for"):
            await read(disk, 0, 4096)
        with pytest.raises(CommandTimeout, match="target listening there"):
            await write(disk, b"lost" * 1024, 0)
        start_target(SPEC, listen=listen)
        await _back(session, 1)
        assert await read(disk, 0, 4096) == bytes(4096)
        await write(disk, b"kept" * 1024, 0)
        assert await read(disk, 0, 4096) == b"kept" * 1024
        assert session.counts.replayed == 0


async def test_cancelled_while_the_target_is_away(start_target: StartTarget) -> None:
    """A read is cancelled at once, and its buffer is the caller's again."""
    running = start_target(SPEC)
    buffer = bytearray(3 * MIB + 1)

    async def reading(disk: AsyncDisk) -> bool:
        with trio.move_on_after(0.2) as scope:
            await disk.read_into(memoryview(buffer), 0)
        return scope.cancelled_caught

    async with _opened("async", running) as (disk, session):
        running.kill()
        with trio.fail_after(PATIENCE_S / 2):
            await until(lambda: session.suspended is not None)
            assert await reading(disk)
        await all_ended(session.queue)
        await trio.lowlevel.checkpoint()  # trio's loop drops the exception that it raised
        buffer.clear()  # BufferError while a view of it exists


async def _suspended(session: Session) -> None:
    await until(lambda: session.suspended is not None)


@transport
@face
async def test_closed_while_the_target_is_away(
    start_target: StartTarget, face: str, transport: str
) -> None:
    """Closing does not wait for the target, and leaves nothing behind."""
    running = start_target(SPEC)
    listen = running.listen
    async with _opened(face, running, transport):
        pass
    before = census()
    for _ in range(3):
        with trio.fail_after(PATIENCE_S / 2):
            async with _opened(face, running, transport) as (_, session):
                running.kill()
                await _suspended(session)
        del _, session
        running = start_target(SPEC, listen=listen)
    await trio.lowlevel.checkpoint()  # trio's loop drops the exception that it raised
    before["descriptors"] += 3  # pipes of the targets
    with trio.fail_after(PATIENCE_S):
        await until(lambda: nothing_new(census(), before))
    assert before["queue pairs"] == before["open regions"] == 0


@face
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("other:size=32M:wce=0:serial=OTHER", "another LUN is there now: .* serial OTHER"),
        ("lun:size=32M:wce=0:block=4096", "blocks of 512 bytes, it has blocks of 4096"),
    ],
)
async def test_another_lun(start_target: StartTarget, face: str, spec: str, words: str) -> None:
    """Nothing is written to another LUN in the same place: pending and later requests fail."""
    running = start_target(SPEC)
    async with _opened(face, running) as (disk, session):
        await write(disk, b"mine" * 128, 0)
        running.pause()

        async def writing() -> None:
            with pytest.raises(LunChanged, match=words):
                await write(disk, b"more" * 128, 512)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(writing)
            await until(lambda: session.queue.in_flight)
            listen = running.listen
            running.kill()
            again = start_target(spec, listen=listen)
        with pytest.raises(LunChanged, match=words):
            await read(disk, 0, 512)
        assert isinstance(session.error, LunChanged)
    async with _opened(face, again) as (disk, _):
        assert await read(disk, 4096, 4096) == bytes(4096)
        if not spec.startswith("lun:"):
            assert await read(disk, 0, 4096) == bytes(4096)


@face
async def test_a_lun_that_has_shrunk(start_target: StartTarget, tmp_path: Path, face: str) -> None:
    """Requests within the new size succeed; requests behind it fail with an error that says so."""
    running = start_target(SPEC)
    async with _opened(face, running) as (disk, _):
        await write(disk, b"mine" * 128, 0)
        listen = running.listen
        running.kill()
        os.truncate(tmp_path / "lun", 16 << 20)
        start_target("lun:wce=0", listen=listen)
        assert await read(disk, 0, 512) == b"mine" * 128
        with pytest.raises(OutOfRange, match=r"16777216 bytes .it had 33554432 before it shrank"):
            await read(disk, 20 << 20, 512)
        assert disk.size == 16 << 20


@face
async def test_lun_that_has_grown(start_target: StartTarget, face: str) -> None:
    running = start_target(SPEC)
    async with _opened(face, running) as (disk, session):
        listen = running.listen
        running.kill()
        start_target("lun:size=48M:wce=0", listen=listen)
        await _back(session, 1)
        assert disk.size == 48 * MIB
        await write(disk, b"new" * 512, 40 * MIB)
        assert await read(disk, 40 * MIB, 1536) == b"new" * 512


@transport
@face
async def test_connections_cut_in_login(
    start_target: StartTarget, face: str, transport: str
) -> None:
    """A server that took the port closes every connection: each costs one attempt, and no more."""
    running = start_target(SPEC)
    async with _opened(face, running, transport) as (disk, session):
        host, _, port = running.listen.rpartition(":")
        listen = running.listen
        running.kill()
        with socket.create_server((host, int(port))) as impostor:
            impostor.settimeout(PATIENCE_S)
            for turn in range(4):
                sock, _ = await trio.to_thread.run_sync(impostor.accept)
                with sock:
                    sock.settimeout(PATIENCE_S)
                    if turn % 2:
                        with contextlib.suppress(ConnectionError):
                            await trio.to_thread.run_sync(sock.recv, 16)
                    if turn > 1:
                        with contextlib.suppress(ConnectionError):
                            sock.sendall(b"HTTP/1.0 200 OK\r\n\r\n" * 10)
        start_target(SPEC, listen=listen)
        await write(disk, b"here" * 128, 0)
        assert await read(disk, 0, 512) == b"here" * 128
        assert session.counts.reconnects == 1


@transport
@face
async def test_50_reconnects_leave_nothing(
    start_target: StartTarget, face: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50 lost connections with data under way: no descriptor, thread or region is left, at either
    end."""
    monkeypatch.setattr(reconnecting, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(reconnecting, "MOST_PAUSE_S", 0.01)
    running = start_target(SPEC)
    async with _opened(face, running, transport) as (disk, session):
        samples: list[dict[str, int]] = []
        theirs: list[dict[str, int]] = []
        data = random.Random(1).randbytes(300_000)
        for turn in range(50):
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(write, disk, data, number * MIB)
                await trio.sleep(0.002 * (turn % 4))
                session.disconnect()
                await _back(session, turn + 1)
            if turn % 10 == 9:
                assert await read(disk, (turn % 4) * MIB, len(data)) == data
                # What is being closed may be there for a moment, also the first time: what is
                # left by ten connections is more than that.
                if samples:
                    await until(lambda: nothing_new(census(), samples[0]))
                samples.append(census())
                theirs.append(running.census())
        assert theirs[-1]["queue pairs"] == theirs[0]["queue pairs"]
        assert theirs[-1]["open regions"] == theirs[0]["open regions"]
        assert session.counts.reconnects == 50
        await all_ended(session.queue)


# shows: SYSTEM-14
@pytest.mark.plain("replaces a method")
@face
async def test_bytes_that_are_wrong(start_target: StartTarget, face: str) -> None:
    """A peer that breaks the rules costs a connection, not the session."""
    running = start_target(SPEC)
    async with _opened(face, running) as (disk, session):
        dm = session.queue.connection.datamover
        inner = dm.progress

        def progress(now: float) -> int:
            count = inner(now)
            if count:
                raise RemoteProtocolError("iSCSI", "nonsense")
            return count

        dm.progress = progress  # type: ignore[method-assign]
        with contextlib.suppress(CommandTimeout):
            assert await read(disk, 0, 4096) == bytes(4096)
        await _back(session, 1)
        assert await read(disk, 0, 4096) == bytes(4096)


@face
async def test_reservation_on_every_connection(start_target: StartTarget, face: str) -> None:
    """The disk reserves on every new connection, and knows also what the reservation hides from a
    nexus that is not registered."""
    running = start_target("lun:size=8M")
    async with _opened(face, running, reserve="exclusive") as (disk, session):
        before = disk.info.write_cache, disk.info.fua
        for turn in range(3):
            session.disconnect()
            await write(disk, bytes([turn]) * 4096, turn * 4096)
            assert session.counts.reconnects == turn + 1
            core = core_of(disk)
            assert (core.info.write_cache, core.info.fua) == before
            await disk.flush()


class Heard(LunListener):
    """``all``: the sense data of commands that did not end with GOOD."""

    def __init__(self) -> None:
        self.all: list[bytes] = []

    def hear(self, slot: Command) -> None:
        self.all.append(bytes(slot.sense))


@pytest.mark.logs(logs.ONE_OF_SEVERAL)
@face
async def test_the_reservation_stays_with_the_session(start_target: StartTarget, face: str) -> None:
    """At ErrorRecoveryLevel 2 a connection that is reinstated belongs to the same nexus: nothing is
    reserved again, and no unit attention comes."""
    running = start_target("lun:size=8M")
    heard = Heard()
    more = {"reserve": "exclusive", "error-recovery-level": "2"}
    async with _opened(face, running, **more) as (disk, session):
        session.listeners.add(bytes(8), heard)
        tsih = session.tsih
        for turn in range(3):
            session.queue.connection.datamover.disconnect()
            await write(disk, bytes([turn]) * 4096, turn * 4096)
            await disk.flush()
            assert (session.counts.recovered, session.counts.reconnects) == (turn + 1, 0)
        assert session.tsih == tsih and not heard.all
    assert "session reinstated" not in running.log.read_text()


@face
async def test_reserved_and_closed_while_the_target_is_away(
    start_target: StartTarget, face: str
) -> None:
    """Closing does not wait for a connection to give the reservation back."""
    running = start_target("lun:size=8M")
    with trio.fail_after(PATIENCE_S / 2):
        async with _opened(face, running, reserve="exclusive") as (_, session):
            running.kill()
            await until(lambda: session.suspended is not None)


STOPPED_S = 5.0  # more than twice io-timeout, and what a driver needs to notice


@pytest.fixture
def stopped() -> Iterator[Callable[[], None]]:
    """Stops this process for a while when it is called, as a debugger or a paused virtual machine
    does; returns when that is over."""
    here = os.getpid()
    script = f"read _; kill -STOP {here}; sleep {STOPPED_S}; kill -CONT {here}; echo"
    with subprocess.Popen(
        ["sh", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        reader, writer = process.stdout, process.stdin

        def stop() -> None:
            writer.write(b"\n")
            writer.flush()
            reader.readline()

        yield stop
        process.kill()


@transport
@face
async def test_this_process_is_stopped(
    start_target: StartTarget, face: str, transport: str, stopped: Callable[[], None]
) -> None:
    """For longer than io-timeout, with commands in flight that the target has not answered: they
    have the rest of their time then, and nothing is aborted."""
    running = start_target(SPEC)
    async with _opened(face, running, transport, io_timeout="2") as (disk, session):
        await write(disk, b"old" * 4096, 0)
        running.pause()
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(write, disk, b"new" * 4096, number * MIB)
            await until(lambda: session.queue.in_flight == 4)
            stopped()
            running.resume()
        assert await read(disk, 0, 12_288) == b"new" * 4096
        assert session.error is None and not session.counts.reconnects
