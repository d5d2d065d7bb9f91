"""A target that serves a LUN of another target, between real ends of ours."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import trio

from iserblk.datamover.iser import CONTROL, CONTROL_LAYOUT, ZERO_BASED_LAYOUT
from iserblk.disk.aio import open_disks
from iserblk.disk.seam import EXTENT_DATA, EXTENT_HOLE, AsyncDisk
from iserblk.errors import (
    BadArgument,
    CommandTimeout,
    ReservationConflict,
    ScsiError,
    TransportError,
    WriteProtected,
)
from iserblk.gateway.opening import Use, check_way, open_gateways, unit_of
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.initiator.session import deadlines
from iserblk.initiator.session.session import Session
from iserblk.options import Options
from iserblk.rcap.iwarp import ddp, mpa, rdmap
from iserblk.scsi import cdb, sense
from iserblk.scsi import reservations as pr
from iserblk.scsi.inquiry import MAX_GATEWAYS
from iserblk.scsi.sense import Sense
from iserblk.target.scsi.device import LogicalUnit
from iserblk.url import parse_url
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import read, write
from tests.support.gateway import GATE, running_gateway, store_of
from tests.support.sessions import Host
from tests.support.spy import Spy
from tests.support.target import IQN
from tests.support.target_here import serve
from tests.support.until import until
from tests.target.fake_store import FakeStore

MIB = 1 << 20
PATIENCE_S = 30.0  # only a test that fails ever waits that long
SLICE = 16 << 10
SCHEMES = ("iser", "iscsi")
WAYS = pytest.mark.parametrize(
    ("here", "there"), [(here, there) for here in SCHEMES for there in SCHEMES]
)


def by(scheme: str, url: str) -> str:
    return url.replace("iser:", f"{scheme}:")


@asynccontextmanager
async def remote(
    store: FakeStore, block: int = 512, read_only: bool = False, iqn: str = IQN
) -> AsyncIterator[str]:
    """The URL of LUN 0 of the other target, in this loop."""
    send, receive = trio.open_memory_channel[str](1)
    unit = LogicalUnit(store, serial="REMOTE", block=block, read_only=read_only)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, "127.0.0.1:0", iqn, {0: unit}, send.send_nowait)
            yield f"{await receive.receive()}/0"
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def through(url: str, scheme: str = "iser", options: str = "") -> AsyncIterator[AsyncDisk]:
    """The disk at a gateway to ``url``. ``options``: of the gateway's initiator."""
    async with (
        running_gateway(url) as (front, _),
        open_disks([by(scheme, front) + options], {}) as disks,
    ):
        (disk,) = disks.disks.values()
        yield disk


@asynccontextmanager
async def host(url: str, name: str = "host", **options: object) -> AsyncIterator[Host]:
    """A session with raw commands."""
    named = Options(initiator_name=f"iqn.2026-11.example:{name}", **options)  # type: ignore[arg-type]
    driver = TrioDriver(await connect(parse_url(url), named, named.isid))
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        try:
            yield Host(driver)
        finally:
            driver.session.fail(TransportError("end of test"))
            nursery.cancel_scope.cancel()


# -- what comes through ----------------------------------------------------------------------------


# shows: SYSTEM-26
@WAYS
@pytest.mark.parametrize("block", [512, 4096])
async def test_data_and_identity(here: str, there: str, block: int) -> None:
    """Reads and writes of many lengths and alignments, at once; zeroes, trims, extents.

    proves: ISER-B.1-1, ISER-IB00-6.2-1
    """
    store = FakeStore(8 * MIB)
    wanted = bytearray(store.size)
    chance = random.Random(26)
    async with remote(store, block) as url, through(by(there, url), here) as disk:
        async with open_disks([url], {}) as direct:
            (behind,) = direct.disks.values()
            for field in (
                *("vendor", "product", "revision", "serial", "identifiers", "size", "block_size"),
                *("physical_block_size", "read_only", "rotational", "write_cache", "can_trim"),
                *("zero_by_unmap", "can_extents", "unmap_granularity", "unmap_alignment"),
            ):
                assert getattr(disk.info, field) == getattr(behind.info, field), field
            assert disk.info.target == GATE

        async def one(offset: int, length: int) -> None:
            data = wanted[offset : offset + length] = chance.randbytes(length)
            await write(disk, data, offset, fua=bool(length & 1))
            assert await read(disk, offset, length) == data

        async with trio.open_nursery() as nursery:
            for index in range(40):
                room = store.size // 40
                length = chance.choice((1, block, 4096, 16385, 70_000, room))
                nursery.start_soon(one, index * room + chance.randrange(room - length + 1), length)
        assert await read(disk, 0, store.size) == wanted == store.content
        await disk.zero(MIB, MIB, may_trim=True)
        await disk.zero(3 * MIB, 512)
        await disk.trim(4 * MIB, MIB)
        await disk.flush()
        assert ("punch", MIB, MIB) in store.calls and ("punch", 4 * MIB, MIB) in store.calls
        assert ("flush",) in store.calls
        store.holes = [(0, MIB, True), (MIB, store.size - MIB, False)]
        found = await disk.extents(0, store.size)
        assert [(start, count, flags & EXTENT_HOLE) for start, count, flags in found] == [
            (0, MIB, EXTENT_DATA),
            (MIB, store.size - MIB, EXTENT_HOLE),
        ]


def connections_made(session: Session) -> int:
    """Behind the first ones."""
    return session.counts.recovered + session.counts.reconnects


@pytest.mark.logs(logs.ONE_OF_SEVERAL, logs.RECONNECTED, logs.LOST_POWER)
@WAYS
@pytest.mark.parametrize(("level", "count"), [(0, 2), (2, 2), (2, 1)])
async def test_several_connections(here: str, there: str, level: int, count: int) -> None:
    """Both sessions have as many, of which one is cut now in front and now behind: nothing that was
    acknowledged is lost. The sessions go on where the statuses of what was in flight are not lost;
    else they are reinstated, as something is unflushed."""
    store = FakeStore(16 * SLICE)
    options = f"?connections={count}&error-recovery-level={level}"
    chance = random.Random(level)
    async with (
        remote(store) as url,
        running_gateway(f"{by(there, url)}{options}") as (front, unit),
        open_disks([by(here, front) + options], {}) as disks,
    ):
        (disk,) = disks.disks.values()
        sessions: list[Session] = [
            each.core.session  # type: ignore[attr-defined]
            for each in (disk, store_of(unit).disk)
        ]
        done = False

        async def cut() -> None:
            nonlocal done
            for cuts in range(6):
                session = sessions[cuts % 2]
                await until(lambda: session.count == count and session.queue.sent > 2)  # noqa: B023
                chance.choice(session.queue.connections).datamover.disconnect()
                await until(lambda: connections_made(session) == cuts // 2 + 1)  # noqa: B023
            done = True

        async def one(at: int) -> None:
            turn = 0
            while not done:
                turn += 1
                data = bytes((turn % 251, at)) * (SLICE // 2)
                await write(disk, data, at * SLICE, fua=not turn % 8)
                assert await read(disk, at * SLICE, SLICE) == data
                assert store.content[at * SLICE : (at + 1) * SLICE] == data

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cut)
            for at in range(16):
                nursery.start_soon(one, at)
        assert [connections_made(session) for session in sessions] == [3, 3]


def fpdus(said: bytes | bytearray) -> Iterator[bytes]:
    """The whole FPDUs behind MPA's start."""
    at = mpa.HEADER_SIZE + int.from_bytes(said[18:20], "big")
    while at + 2 <= len(said):
        end = at + ddp.fpdu_size(int.from_bytes(said[at : at + 2], "big"))
        if end > len(said):
            return
        yield bytes(said[at:end])
        at = end


def tagged_offsets(answered: bytes | bytearray) -> tuple[list[int], list[int]]:
    """TOs of the target's RDMA Writes, and source TOs of its RDMA Read Requests."""
    writes, reads = [], []
    for each in fpdus(answered):
        if each[2] & 0x80:
            writes.append(ddp.TAGGED_HEADER.unpack_from(each)[3])
        elif each[3] & rdmap.OPCODE_MASK == rdmap.READ_REQUEST:
            # Sink STag and TO, length, source STag and TO (RFC 5040 section 4.4).
            at = ddp.UNTAGGED_SIZE
            reads.append(int.from_bytes(each[at + 20 : at + 28], "big"))
    return writes, reads


# shows: SYSTEM-27
async def test_headers_of_28_bytes_in_front_and_of_12_behind(start_target: StartTarget) -> None:
    """What the client advertises with a Base Offset is a zero-based buffer to the other target.

    proves: ISER-GEN-5.3-3, ISER-B.1-1, ISER-IB00-6.2-1
    """
    target = start_target(f"lun:size={MIB}", header=12)
    behind = Spy(target.port)
    query = "header=12&mpa-crc=no&immediate-data=no&unsolicited-data=no"
    url = target.url.replace(str(target.port), str(behind.port))
    async with running_gateway(f"{url}/0?{query}&style=cm") as (given, _):
        port = parse_url(given).port
        before = Spy(port)
        front = given.replace(str(port), str(before.port))
        async with open_disks([front], {"immediate-data": "no", "style": "cm"}) as disks:
            (disk,) = disks.disks.values()
            data = random.Random(27).randbytes(1024)
            await write(disk, data, 4096)
            assert await read(disk, 4096, 1024) == data
    await trio.to_thread.run_sync(before.close)
    await trio.to_thread.run_sync(behind.close)
    writes, reads = tagged_offsets(behind.answered)
    assert writes and set(writes) == {0}
    assert reads == [0]
    heads = [each[ddp.UNTAGGED_SIZE :] for each in fpdus(behind.asked) if not each[2] & 0x80]
    commands = [head for head in heads if head[0] & 0xF0 == CONTROL]
    stags = [ZERO_BASED_LAYOUT.unpack_from(head) for head in commands]
    assert any(write_stag for _, write_stag, _ in stags)
    assert all(head[12] & 0x3F < 0x20 for head in commands)  # an initiator's BHS follows
    # In front each buffer is named by an STag and a Base Offset, in headers of 28 bytes.
    heads = [each[ddp.UNTAGGED_SIZE :] for each in fpdus(before.asked) if not each[2] & 0x80]
    commands = [head for head in heads if head[0] & 0xF0 == CONTROL]
    assert all(head[28] & 0x3F < 0x20 for head in commands)
    named = [CONTROL_LAYOUT.unpack_from(head) for head in commands]
    writes, reads = tagged_offsets(before.answered)
    assert {base for _, _, _, stag, base in named if stag} == set(writes)
    assert [base for _, stag, base, _, _ in named if stag] == reads != []


async def test_a_lun_that_grows() -> None:
    store = FakeStore(MIB)
    async with remote(store) as url, through(url) as disk:
        store.size = 2 * MIB
        store.content += bytes(MIB)

        async def grown() -> None:
            while disk.size == MIB:
                await trio.sleep(0.05)
                await read(disk, 0, 512)

        await grown()
        await write(disk, b"n" * 4096, 2 * MIB - 4096)
        assert store.content.endswith(b"n" * 4096)


async def test_what_cannot_be_written() -> None:
    async with remote(FakeStore(MIB), read_only=True) as url, through(url) as disk:
        assert disk.info.read_only
        with pytest.raises(WriteProtected):
            await write(disk, bytes(512), 0)
    async with (
        remote(FakeStore(MIB)) as url,
        running_gateway(url, read_only=True) as (front, _),
        open_disks([front], {}) as disks,
    ):
        (disk,) = disks.disks.values()
        assert disk.info.read_only


NOT_FLUSHED = "the last flush failed, data may be lost: "


@pytest.mark.logs(logs.FILE_ERRORS, NOT_FLUSHED, logs.RECONNECTED, logs.LOST_POWER)
@WAYS
async def test_errors_of_the_medium(here: str, there: str) -> None:
    store = FakeStore(MIB)
    async with remote(store) as url, through(by(there, url), here) as disk:
        store.failure = OSError(errno.EIO, "broken")
        for wrong, code in (
            (read(disk, 0, 512), sense.UNRECOVERED_READ_ERROR),
            (write(disk, bytes(512), 0), sense.WRITE_ERROR),
        ):
            with pytest.raises(ScsiError) as caught:
                await wrong
            assert isinstance(caught.value.sense, Sense)
            assert (caught.value.sense.key, caught.value.sense.code) == (sense.MEDIUM_ERROR, code)
        store.failure = OSError(errno.ENOSPC, "full")
        with pytest.raises(ScsiError) as caught:
            await write(disk, bytes(512), 0)
        assert isinstance(caught.value.sense, Sense)
        assert caught.value.sense.code == sense.SPACE_ALLOCATION_FAILED


@pytest.mark.logs(logs.FILE_ERRORS, logs.LOST_WRITES, logs.RECONNECTED, logs.LOST_POWER)
async def test_a_flush_that_fails_is_told_to_each_client() -> None:
    store = FakeStore(MIB)
    async with (
        remote(store) as url,
        running_gateway(url) as (front, _),
        host(front, "a") as one,
        host(front, "b") as other,
        host(front, "c") as reader,
    ):
        flush = cdb.synchronize_cache10(0, 0)
        for each in (one, other):
            await each.command(
                bytes((0x2A, 0, 0, 0, 0, 0, 0, 0, 1, 0)), None, memoryview(bytes(512))
            )
        store.failure = OSError(errno.EIO, "broken")
        with pytest.raises(ScsiError, match="write error"):
            await one.command(flush)
        store.failure = None
        with pytest.raises(ScsiError, match="write error"):
            await other.command(flush)
        await reader.read()
        for each in (one, other, reader):
            await each.command(flush)


# -- gateways behind gateways ----------------------------------------------------------------------


async def test_the_way_through_two_gateways_is_told() -> None:
    middle = f"{GATE}-middle"
    async with (
        remote(FakeStore(MIB)) as url,
        running_gateway(url, iqn=middle) as (inner, _),
        running_gateway(inner) as (outer, _),
        open_disks([outer], {}) as disks,
        open_disks([inner], {}) as others,
        open_disks([url], {}) as direct,
    ):
        ways = [next(iter(each.disks.values())).info.gateway_to for each in (disks, others, direct)]
        assert ways == [(middle, IQN), (IQN,), ()]
        (disk,) = disks.disks.values()
        await write(disk, b"n" * 512, 512)
        assert await read(disk, 0, 1024) == bytes(512) + b"n" * 512


async def test_a_way_that_leads_back_is_refused() -> None:
    """Over one other gateway, and over two. The name may be written otherwise."""
    async with (
        remote(FakeStore(MIB), iqn=GATE.replace("gate", "GATE")) as url,
        running_gateway(url, iqn=f"{GATE}-b") as (inner, _),
        running_gateway(inner, iqn=f"{GATE}-c") as (outer, _),
        open_gateways(GATE) as gateways,
    ):
        for way in (inner, outer):
            with pytest.raises(BadArgument, match="a gateway back to this target") as caught:
                await gateways.open([way])
            assert way.partition("//")[2] in str(caught.value)
        # The other gateways go on.
        async with open_disks([outer], {}) as disks:
            (disk,) = disks.disks.values()
            assert await read(disk, 0, 512) == bytes(512)


async def test_a_way_over_too_many_gateways_is_refused() -> None:
    async with remote(FakeStore(MIB)) as url, running_gateway(url) as (_, unit):
        info = store_of(unit).disk.info
        names = tuple(f"{IQN}-{number}" for number in range(MAX_GATEWAYS))
        check_way(replace(info, gateway_to=names[1:]), GATE)
        with pytest.raises(BadArgument, match="there are 16 gateways on the way"):
            check_way(replace(info, gateway_to=names), GATE)


# -- reservations, and what must be atomic ---------------------------------------------------------


async def test_reservations_are_refused() -> None:
    async with remote(FakeStore(MIB)) as url, running_gateway(url) as (front, unit):
        async with host(front) as one:
            for call in (
                one.out(pr.REGISTER, 0, 5),
                one.keys(),
                one.command(bytes((0x16,)) + bytes(5)),
            ):
                with pytest.raises(ScsiError) as caught:
                    await call
                assert isinstance(caught.value.sense, Sense)
                assert caught.value.sense.code == sense.INVALID_OPERATION_CODE
            listed = bytearray(4096)
            await one.command(
                bytes((0xA3, 0x0C, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0)),
                memoryview(listed),
                short_ok=True,
            )
            opcodes = set(listed[4::8])
            assert 0x42 in opcodes and not opcodes & {0x5E, 0x5F, 0x16, 0x17}
        assert unit.lacks


async def test_with_the_lun_reserved_clients_reserve_among_themselves() -> None:
    async with (
        remote(FakeStore(MIB)) as url,
        running_gateway(f"{url}?reserve=exclusive") as (front, _),
        host(front, "a") as one,
        host(front, "b") as other,
    ):
        await one.out(pr.REGISTER, 0, 5)
        await one.out(pr.RESERVE, 5)
        await one.write(b"1" * 512)
        with pytest.raises(ReservationConflict):
            await other.write(b"2" * 512)
        # Others of the remote LUN are kept out by the gateway's own reservation.
        async with host(url, "c") as outside:
            with pytest.raises(ReservationConflict):
                await outside.write(b"3" * 512)


@pytest.mark.logs(NOT_FLUSHED)
async def test_a_reservation_conflict_comes_through() -> None:
    async with remote(FakeStore(MIB)) as url, through(url) as disk, host(url, "c") as outside:
        await outside.out(pr.REGISTER, 0, 5)
        await outside.out(pr.RESERVE, 5)
        with pytest.raises(ReservationConflict):
            await write(disk, bytes(512), 0)


UNKNOWN = "^WARNING COMPARE AND WRITE: it may have been carried out: "
COMPARE_AND_WRITE = bytes((0x89,)) + bytes(12) + b"\x01" + bytes(2)


async def test_compare_and_write() -> None:
    store = FakeStore(MIB)
    async with remote(store) as url:
        async with running_gateway(url) as (front, _), host(front) as one:
            data = memoryview(bytes(512) + b"n" * 512)
            await one.command(COMPARE_AND_WRITE, None, data)
            assert store.content[:512] == b"n" * 512
            with pytest.raises(ScsiError) as caught:
                await one.command(COMPARE_AND_WRITE, None, data)
            assert isinstance(caught.value.sense, Sense)
            assert caught.value.sense.key == sense.MISCOMPARE
        async with running_gateway(f"{url}?shared=yes") as (front, _), host(front) as one:
            with pytest.raises(ScsiError) as caught:
                await one.command(COMPARE_AND_WRITE, None, data)
            assert isinstance(caught.value.sense, Sense)
            assert caught.value.sense.code == sense.INVALID_OPERATION_CODE


async def test_what_the_remote_lun_lacks() -> None:
    """A disk that cannot unmap is not said to be thin."""
    store = FakeStore(MIB)
    async with remote(store) as url, running_gateway(url) as (_, unit):
        inner = store_of(unit)
        info = replace(inner.disk.info, can_trim=False, zero_by_unmap=False, can_extents=False)
        plain = unit_of(inner, info, Use(False, False), False)
        assert not plain.capacity.lbpme and not plain.capacity.lbprz
        assert plain.limits.max_unmap_lba_count == 0
        assert 0xB2 not in plain.vpd_pages(IQN)
        assert 0x42 in plain.lacks and 0x9E12 in plain.lacks


# -- aborts and outages ----------------------------------------------------------------------------


class Stuck(FakeStore):
    """Writes wait for ``go``."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.begun = threading.Event()
        self.go = threading.Event()

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        if nowait:
            return False
        self.begun.set()
        assert self.go.wait(PATIENCE_S)
        return super().write(data, offset, durable, nowait)


@pytest.mark.logs(logs.DEADLINES)
@WAYS
async def test_an_aborted_write_is_over_when_the_abort_is_answered(here: str, there: str) -> None:
    """The client's ABORT TASK reaches the other target, which cannot end a write that a thread is
    in. As long as it may land, the client gets no answer."""
    store = Stuck(MIB)
    async with (
        remote(store) as url,
        running_gateway(by(there, url)) as (front, _),
        host(by(here, front)) as one,
    ):
        ended: list[str] = []

        async def doomed() -> None:
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await one.write(b"x" * 512)
            ended.append("cancelled" if scope.cancelled_caught else "done")

        scopes: list[trio.CancelScope] = []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(doomed)
            await trio.to_thread.run_sync(store.begun.wait, PATIENCE_S)
            scopes[0].cancel()
            for _ in range(50):
                await trio.lowlevel.checkpoint()
            assert not ended
            async with host(by(here, front), "other") as other:
                await other.read()  # the gateway goes on meanwhile
            assert not ended
            store.go.set()
        assert ended == ["cancelled"]
        assert one.session.error is None
        await one.write(b"y" * 512)
        assert store.content[:512] == b"y" * 512


@pytest.mark.logs(logs.DEADLINES, logs.RECONNECTED, logs.LOST_POWER, UNKNOWN)
async def test_a_compare_and_write_whose_outcome_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other target takes longer than the gateway waits. BUSY would have the client send the
    command again; it would miscompare with its own data."""
    monkeypatch.setattr(deadlines, "STEP_S", 0.1)
    store = Stuck(MIB)
    async with (
        remote(store) as url,
        running_gateway(f"{url}?io-timeout=1") as (front, _),
        host(front) as one,
    ):
        data = memoryview(bytes(512) + b"n" * 512)
        with pytest.raises(ScsiError) as caught:
            await one.command(COMPARE_AND_WRITE, None, data)
        assert isinstance(caught.value.sense, Sense)
        told = caught.value.sense
        assert (told.key, told.code) == (sense.HARDWARE_ERROR, sense.COMMUNICATION_TIMEOUT)
        store.go.set()
        await one.write(b"y" * 512)
        assert store.content[:512] == b"y" * 512


@pytest.mark.logs(logs.DEADLINES)
async def test_a_client_that_comes_back_waits_for_its_old_write() -> None:
    """Its session ends while the other target writes; the next session of its name begins when
    that write is over."""
    store = Stuck(MIB)
    isid = bytes.fromhex("800000000001")
    async with (
        remote(store) as url,
        running_gateway(url) as (front, _),
        host(front, isid=isid) as first,
        trio.open_nursery() as nursery,
    ):
        done: list[bytes] = []

        async def again() -> None:
            async with host(front, isid=isid) as second:
                await second.write(b"y" * 512)
                done.append(await second.read())

        async def lost() -> None:
            with pytest.raises(TransportError):
                await first.write(b"x" * 512)
            told.set()

        told = trio.Event()
        nursery.start_soon(lost)
        await trio.to_thread.run_sync(store.begun.wait, PATIENCE_S)
        nursery.start_soon(again)
        await told.wait()
        async with host(front, "other") as other:
            await other.read()  # the gateway serves others meanwhile
        assert not done
        store.go.set()
        await until(lambda: bool(done))
        assert done == [b"y" * 512]
        assert [call[0] for call in store.calls].count("write") == 2


@pytest.mark.logs(logs.RECONNECTED, logs.DEADLINES, logs.LOST_POWER)
@WAYS
async def test_the_other_target_is_killed_and_comes_back(
    start_target: StartTarget, here: str, there: str
) -> None:
    """Commands of the client wait; when the gateway's io-timeout has passed, they get BUSY, and the
    client sends them again. What was acknowledged and not flushed is not lost."""
    spec = f"lun:size={MIB}:volatile-cache=8M"
    target = start_target(spec)
    listen = target.listen
    async with through(f"{by(there, target.url)}/0?io-timeout=1", here, "?io-timeout=60") as disk:
        await write(disk, b"1" * 4096, 0)
        target.kill()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, disk, b"2" * 4096, 4096)
            nursery.start_soon(disk.flush)
            await trio.lowlevel.checkpoint()
            # Its time ends while it waits for an answer, or before it is sent again, or BUSY is
            # the last answer.
            late = r"did not end within|not done within|BUSY"
            with pytest.raises((CommandTimeout, ScsiError), match=late):
                async with open_disks([f"{by(here, gate_of(disk))}?io-timeout=2"], {}) as disks:
                    (second,) = disks.disks.values()
                    await read(second, 0, 512)
            await trio.to_thread.run_sync(lambda: start_target(spec, listen=listen))
        assert await read(disk, 0, 8192) == b"1" * 4096 + b"2" * 4096


def gate_of(disk: AsyncDisk) -> str:
    return by("iser", disk.info.url.replace("iscsi:", "iser:"))
