"""Initiators behind a gateway take turns: one that floods does not keep out the others.

The session with the other target is a real one; that target answers when the test says so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

from iserblk.errors import ConnectionLost
from iserblk.gateway.store import DiskStore
from iserblk.loop.strands import open_strands
from iserblk.scsi.cdb import FUA
from iserblk.scsi.opcodes import READ_16, WRITE_16
from iserblk.target.store.store import OWNER
from tests.nbd.serving import Again
from tests.support.turns import BLOCK, DEPTH, Answering
from tests.support.until import until

FLOOD = 10 * DEPTH  # operations of one initiator: more than a target's window has
LBA = 77  # that only the single read is about


class Gateway(Answering):
    """A LUN whose ``store`` is on the session. ``ended``: errors of what has ended, by its
    initiator."""

    def __init__(self, window: int) -> None:
        super().__init__(window)
        self.store: DiskStore
        self.ended: dict[str, list[OSError | None]] = {}

    def begin(self, owner: str, what: str, lba: int = 0) -> object:
        """An operation of the initiator ``owner``."""
        buffer = memoryview(bytearray(BLOCK))

        def ended(error: OSError | None) -> None:
            self.ended.setdefault(owner, []).append(error)

        if what == "read":
            return self.store.begin_read(buffer, lba * BLOCK, owner, ended)
        if what == "flush":
            return self.store.begin_flush(owner, ended)
        return self.store.begin_write(buffer, lba * BLOCK, what == "FUA", owner, ended)

    async def flood(self, owner: str, what: str) -> list[object]:
        # Each write has blocks of its own, as others wait for the range.
        begun = [self.begin(owner, what, 100 + number) for number in range(FLOOD)]
        await self.settle()
        return begun


@asynccontextmanager
async def gateway(window: int = DEPTH) -> AsyncIterator[Gateway]:
    """At the end everything must be answered, and has ended."""
    found = Gateway(window)
    async with trio.open_nursery() as nursery, open_strands() as group:
        found.store = DiskStore(found.disk(0), group, nursery)
        try:
            yield found
        except Exception:
            found.session.fail(ConnectionLost("the test has failed"))
            raise
        while await found.answer():
            pass
        found.store.end()
    queue = found.session.queue
    assert queue.busy == 0 and not queue.waiting.entries


@pytest.mark.parametrize("window", [DEPTH, 4])
@pytest.mark.parametrize("what", ["read", "write", "FUA", "flush"])
async def test_a_single_read_beside_a_flood(what: str, window: int) -> None:
    """It waits for no more than two commands of the other initiator for a slot, and no more than
    two for the command window."""
    async with gateway(window) as found:
        await found.flood("flood", what)
        for number in range(5):
            found.begin("single", "read", LBA + number)
            await found.settle()
            assert await found.answers_until_sent(LBA + number) <= 4
            await found.answer_all_sent()
            assert found.ended["single"] == [None] * (number + 1)
        if what != "flush":  # flushes that come together are one command
            assert len(found.ended["flood"]) < FLOOD
    assert found.ended["flood"] == [None] * FLOOD


async def test_a_single_write_beside_a_flood_of_threads() -> None:
    """Both come from threads, as all but READ, WRITE and SYNCHRONIZE CACHE do."""
    async with gateway() as found, trio.open_nursery() as nursery:
        begun = 0
        limiter = trio.CapacityLimiter(2 * FLOOD)
        write = found.store.disk.write

        async def counted(*arguments: Any) -> None:
            nonlocal begun
            begun += 1
            await write(*arguments)

        async def in_thread(owner: str, lba: int) -> None:
            OWNER.set(owner)
            data = memoryview(bytearray(BLOCK))
            await trio.to_thread.run_sync(
                found.store.write, data, lba * BLOCK, False, False, limiter=limiter
            )

        found.store.disk.write = counted  # type: ignore[method-assign, assignment]
        for number in range(2 * DEPTH):
            nursery.start_soon(in_thread, "flood", 100 + number)
        await until(lambda: begun == 2 * DEPTH)
        nursery.start_soon(in_thread, "single", LBA)
        await until(lambda: begun == 2 * DEPTH + 1)
        await found.settle()
        assert await found.answers_until_sent(LBA) <= 4
        while await found.answer():
            pass


async def test_several_floods() -> None:
    async with gateway() as found:
        for what in ("read", "write", "FUA"):
            await found.flood(what, what)
        found.begin("single", "read", LBA)
        await found.settle()
        assert await found.answers_until_sent(LBA) <= 2 * 3


async def test_two_floods_share_the_slots() -> None:
    """None of them has more than its half for long."""
    async with gateway() as found:
        await found.flood("one", "read")
        await found.flood("other", "write")
        for _ in range(4 * DEPTH):
            assert await found.answer()
        operations = [message[32] for _, message in found.datamover.sent[-2 * DEPTH :]]
        assert operations.count(READ_16) == operations.count(WRITE_16) == DEPTH


async def test_a_flood_that_is_given_up() -> None:
    """Its initiator has gone, or has reset the LUN: what waits ends in its turns, and the other
    initiator does not notice."""
    async with gateway() as found:
        for operation in await found.flood("flood", "read"):
            found.store.give_up(operation)
        found.begin("single", "read", LBA)
        await found.settle()
        assert await found.answers_until_sent(LBA) <= 4


async def test_those_of_one_initiator_keep_their_order() -> None:
    """Turns are taken between initiators only."""
    async with gateway(window=4) as found:
        await found.flood("one", "read")
        await found.flood("other", "read")
        while await found.answer():
            pass
        blocks = [int.from_bytes(message[34:42], "big") for _, message in found.datamover.sent]
    assert len(blocks) == 2 * FLOOD
    firsts = [blocks.index(100 + number) for number in range(FLOOD)]
    assert firsts == sorted(firsts)


async def test_a_write_that_is_to_be_durable_is_one_with_fua() -> None:
    async with gateway() as found:
        for what in ("write", "FUA"):
            found.begin("one", what, LBA)
            await found.settle()
            await found.answer_all_sent()
    assert [message[33] for _, message in found.datamover.sent] == [0, FUA]


async def test_what_has_yet_to_go_on_when_the_strands_are_closed_has_failed() -> None:
    """A write is not taken for done."""
    disk = Again()
    ended: list[OSError | None] = []
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with open_strands() as group:
                store = DiskStore(disk, group, nursery)
                store.begin_read(memoryview(bytearray(BLOCK)), 0, OWNER, ended.append)
                store.begin_write(memoryview(bytes(BLOCK)), 0, False, OWNER, ended.append)
                scope.cancel()
                await trio.lowlevel.checkpoint()
    assert len(ended) == 2 and None not in ended and not disk.rests


async def test_what_takes_more_than_one_command_goes_on_with_the_rest() -> None:
    """With its deadline: it has no other one."""
    disk = Again()
    ended: list[OSError | None] = []
    async with trio.open_nursery() as nursery, open_strands() as group:
        store = DiskStore(disk, group, nursery)
        store.begin_read(memoryview(bytearray(BLOCK)), 0, OWNER, ended.append)
        store.begin_write(memoryview(bytes(BLOCK)), 0, False, OWNER, ended.append)
        disk.end()
        await until(lambda: len(ended) == 2)
        nursery.cancel_scope.cancel()
    assert ended == [None] * 2 and disk.rests == [disk.LEFT] * 2
