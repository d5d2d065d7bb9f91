"""Disks in memory behind both faces of the disk seam, for tests of the front-ends.

``FakeDisk`` does the work; ``BlockingFake`` and ``AsyncFake`` are its two faces. ``install()``
puts them where the front-ends import the real ones from. What the disks are like comes from the
environment, because nbdkit and a daemonised mount run in other processes:

    FAKE_LUNS    JSON: [{"size": 1048576, "read_only": true, ...}, ...]   changes to LunInfo
    FAKE_FAULTS  JSON: {"write": "CommandTimeout", "open": "ConnectFailed", ...}   error by method
    FAKE_CLOSE_S how long the logout of a mount takes, and a line "closing" before it
    FAKE_CHANGES the only client is told of a change by another thread, while it is made
    FAKE_LOCALS  reads and writes leave a note in thread-local storage, and log what they found
    FAKE_LOG     file that gets one line per call; reads and writes only where there are faults
    FAKE_AWAY    requests are said to wait for their target; what is asked for then is logged
    FAKE_HOLD    file: flushes wait while it is there, and log that they do
    FAKE_LOSE    file: when a request finds it, it goes, and writes of that disk are lost
    FAKE_SIZE    file with the size that the disks have grown to, when they are asked for it
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import trio

from iserblk import errors
from iserblk.commands.command import Command, Waiter
from iserblk.disk.durability.losses import Losses
from iserblk.disk.ending import EndOfUse
from iserblk.disk.seam import (
    EXTENT_DATA,
    EXTENT_HOLE,
    EXTENT_ZERO,
    Extent,
    FlushClient,
    LossCount,
    LunInfo,
    Rest,
)
from iserblk.loop.strands import elsewhere

MIB = 1 << 20
BLOCK = 4096

_locals = threading.local()
_LOOK_S = 0.01


def lun_info(number: int, **changes: Any) -> LunInfo:
    values: dict[str, Any] = {
        "name": f"lun{number}",
        "url": f"iser://127.0.0.1/iqn.2026-11.example:fake/{number}",
        "target": "iqn.2026-11.example:fake",
        "lun": number,
        "size": 8 * MIB,
        "block_size": 512,
        "physical_block_size": 4096,
        "read_only": False,
        "rotational": False,
        "write_cache": True,
        "fua": True,
        "can_trim": True,
        "can_zero": True,
        "zero_by_unmap": True,
        "can_extents": True,
        "vendor": "iserblk",
        "product": "fake",
        "revision": "1",
        "serial": f"fake{number}",
        # Of each process other ones: those that run beside it are no writers to its LUNs.
        "identifiers": (f"naa.6{os.getpid():014x}{number:x}",),
        "max_transfer": MIB,
        "optimal_transfer": 0,
    }
    return LunInfo(**(values | changes))


def fail(method: str) -> None:
    """Raise the error that FAKE_FAULTS has for ``method``, if any."""
    name = json.loads(os.environ.get("FAKE_FAULTS", "{}")).get(method)
    if name is not None:
        raise getattr(errors, name)(f"{method}: made to fail")


def note(text: str) -> None:
    if path := os.environ.get("FAKE_LOG"):
        with open(path, "a") as file:
            file.write(f"{text}\n")


def looks_at_hold() -> Iterator[None]:
    """One look after another at FAKE_HOLD, while it is there."""
    if os.path.exists(hold := os.environ.get("FAKE_HOLD", "")):
        note("a flush waits")
    while os.path.exists(hold):
        yield


async def _not_held() -> None:
    await trio.lowlevel.checkpoint()
    for _ in looks_at_hold():
        await trio.sleep(_LOOK_S)


class FakeEnding(EndOfUse):
    """Of targets that are away, with FAKE_AWAY: notes what is asked for."""

    def waits(self) -> bool:
        return "FAKE_AWAY" in os.environ

    def ask(self, wanted: bool = True) -> None:
        if "FAKE_AWAY" in os.environ:
            note("the end is wanted" if wanted else "the end is not wanted")


class FakeDisk:
    def __init__(self, info: LunInfo) -> None:
        self.info = info
        self.data = bytearray(info.size)
        self.holes = set(range(info.size // BLOCK))
        self.faulty = "FAKE_FAULTS" in os.environ
        self.dirty = False
        self.unflushed: int | None = None
        self.losses = Losses()
        self.client = self.losses.new_client()

    def check(self, method: str, offset: int, length: int) -> None:
        self.dirty |= method in ("write", "trim", "zero")
        if "FAKE_LOSE" in os.environ:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.environ["FAKE_LOSE"])
                self.losses.add()
        if "FAKE_LOCALS" in os.environ:
            note(f"{method} after {getattr(_locals, 'method', None)}")
            _locals.method = method
        if self.faulty:
            note(f"{method} {offset} {length}")
            fail(method)
        if offset < 0 or offset + length > self.info.size:
            raise errors.OutOfRange(f"{method}: {offset}+{length} is past the end")
        if method in ("write", "trim", "zero") and self.info.read_only:
            raise errors.WriteProtected(f"{self.info.name} is read-only")

    def refresh(self) -> int:
        fail("refresh")
        path = Path(os.environ.get("FAKE_SIZE", os.devnull))
        size = int(path.read_text() or 0) if path.exists() else 0
        if size > self.info.size:
            self.holes.update(range(self.info.size // BLOCK, size // BLOCK))
            self.data.extend(bytes(size - self.info.size))
            self.info = dataclasses.replace(self.info, size=size)
        return self.info.size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        self.check("read", offset, len(buffer))
        with memoryview(self.data) as data:
            buffer[:] = data[offset : offset + len(buffer)]

    def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        self.check("write", offset, len(buffer))
        if fua:
            note(f"{self.info.name} fua write {offset} {len(buffer)}")
        with memoryview(self.data) as data:
            data[offset : offset + len(buffer)] = buffer
        self.holes.difference_update(
            range(offset // BLOCK, (offset + len(buffer) + BLOCK - 1) // BLOCK)
        )

    def flush(self, client: FlushClient | None = None) -> None:
        note(f"{self.info.name} flush")
        self.check("flush", 0, 0)
        self.dirty = False
        if (client or self.client).owed:
            error = errors.WritesLost(f"{self.info.name}: writes were lost")
            error.losses = self.losses.count
            if client is None:
                self.client.told(error.losses)
            raise error

    def trim(self, offset: int, length: int, fua: bool = False, *, patient: bool = False) -> None:
        note(f"{self.info.name} trim {offset} {length} fua={fua}")
        self.check("trim", offset, length)
        self._punch(offset, length)

    def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        note(f"{self.info.name} zero {offset} {length} may_trim={may_trim} fast={fast} fua={fua}")
        self.check("zero", offset, length)
        if fast and not may_trim:
            raise errors.NotSupported("a zero that must stay allocated is not fast here")
        self.data[offset : offset + length] = bytes(length)
        if may_trim:
            self._punch(offset, length)

    def _punch(self, offset: int, length: int) -> None:
        first, last = (offset + BLOCK - 1) // BLOCK, (offset + length) // BLOCK
        if first < last:
            self.data[first * BLOCK : last * BLOCK] = bytes((last - first) * BLOCK)
            self.holes.update(range(first, last))

    def extents(self, offset: int, length: int) -> list[Extent]:
        self.check("extents", offset, length)
        found: list[Extent] = []
        while length:
            block = offset // BLOCK
            kind = EXTENT_HOLE | EXTENT_ZERO if block in self.holes else EXTENT_DATA
            part = min(length, (block + 1) * BLOCK - offset)
            if found and found[-1][2] == kind:
                found[-1] = (found[-1][0], found[-1][1] + part, kind)
            else:
                found.append((offset, part, kind))
            offset += part
            length -= part
        return found

    def cache(self, offset: int, length: int) -> None:
        note(f"{self.info.name} cache {offset} {length}")
        self.check("cache", offset, length)


def make_disks() -> list[FakeDisk]:
    changes = json.loads(os.environ.get("FAKE_LUNS", "[{}]"))
    return [FakeDisk(lun_info(number, **each)) for number, each in enumerate(changes)]


class BlockingFake:
    """Implements BlockingDisk; the bound methods of a FakeDisk under one lock."""

    def __init__(self, disk: FakeDisk) -> None:
        self.info = disk.info
        self.fake = disk
        self.client = disk.client
        lock = threading.Lock()
        for name in ("read_into", "write", "flush", "trim", "zero", "extents", "cache"):
            setattr(self, name, self._locked(lock, getattr(disk, name)))

    @staticmethod
    def _locked(lock: threading.Lock, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            for _ in looks_at_hold() if method.__name__ == "flush" else ():
                time.sleep(_LOOK_S)
            with lock:
                return method(*args, **kwargs)

        return call

    @property
    def size(self) -> int:
        return self.info.size

    @property
    def dirty(self) -> bool:
        return self.fake.dirty or self.fake.losses.untold

    @property
    def unflushed(self) -> int | None:
        return self.fake.unflushed

    def new_client(self) -> FlushClient:
        return self.fake.losses.new_client()

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> FlushClient:
        client = self.fake.losses.only_client(before, changed)
        if "FAKE_CHANGES" in os.environ:
            other = threading.Thread(target=changed)
            other.start()
            other.join(0.1)  # or it waits for the caller
        return client

    def refresh(self) -> int:
        self.fake.refresh()
        self.info = self.fake.info
        return self.size


class BlockingSet:
    """Has a thread, as the real one does: it must not be made before nbdkit has forked."""

    def __init__(self, disks: list[FakeDisk]) -> None:
        self.disks = {disk.info.name: BlockingFake(disk) for disk in disks}
        self.default = next(iter(self.disks))
        self.ending = FakeEnding()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._end.wait)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        note("close")


def open_blocking(urls: Sequence[str], options: Mapping[str, str]) -> BlockingSet:
    note(f"open {json.dumps([list(urls), dict(options)])}")
    fail("open")
    return BlockingSet(make_disks())


class AsyncFake:
    """Implements DirectDisk: each method of a FakeDisk after a checkpoint. No command is begun
    without a coroutine that waits for it."""

    def __init__(self, disk: FakeDisk) -> None:
        self.info = disk.info
        self.fake = disk
        self.client = disk.client

    def check_here(self) -> None:
        """It belongs to no loop."""

    @property
    def size(self) -> int:
        return self.info.size

    @property
    def dirty(self) -> bool:
        return self.fake.dirty or self.fake.losses.untold

    @property
    def unflushed(self) -> int | None:
        return self.fake.unflushed

    def new_client(self) -> FlushClient:
        return self.fake.losses.new_client()

    def only_client(self, before: LossCount, changed: Callable[[], None]) -> FlushClient:
        return self.fake.losses.only_client(before, changed)

    async def refresh(self) -> int:
        await elsewhere(trio.lowlevel.checkpoint)
        self.fake.refresh()
        self.info = self.fake.info
        return self.size

    async def read_into(self, buffer: memoryview, offset: int, rest: Rest | None = None) -> None:
        await elsewhere(trio.lowlevel.checkpoint)
        self.fake.read_into(buffer, offset)

    async def write(
        self, buffer: memoryview, offset: int, fua: bool = False, rest: Rest | None = None
    ) -> None:
        await elsewhere(trio.lowlevel.checkpoint)
        self.fake.write(buffer, offset, fua)

    async def flush(self, client: FlushClient | None = None) -> None:
        await elsewhere(_not_held)
        self.fake.flush(client)

    async def trim(
        self, offset: int, length: int, fua: bool = False, *, patient: bool = False
    ) -> None:
        await elsewhere(trio.lowlevel.checkpoint)
        self.fake.trim(offset, length, fua, patient=patient)

    async def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
        patient: bool = False,
    ) -> None:
        await elsewhere(trio.lowlevel.checkpoint)
        self.fake.zero(offset, length, may_trim=may_trim, fast=fast, fua=fua, patient=patient)

    async def extents(self, offset: int, length: int) -> list[Extent]:
        await elsewhere(trio.lowlevel.checkpoint)
        return self.fake.extents(offset, length)

    async def cache(self, offset: int, length: int) -> None:
        await elsewhere(trio.lowlevel.checkpoint)
        self.fake.cache(offset, length)

    def begin_read(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
        return None

    def begin_write(self, buffer: memoryview, offset: int, waiter: Waiter) -> Command | None:
        return None

    def end_read(self, slot: Command) -> Rest | None:
        raise AssertionError("no command was begun")

    def end_write(self, slot: Command) -> Rest | None:
        raise AssertionError("no command was begun")

    def take_over(self, slot: Command, buffer: bytearray) -> bytearray | None:
        return None

    def begin_batch(self) -> bool:
        return False

    def end_batch(self, held: bool) -> None:
        pass

    def abandon(self, mine: Callable[[Waiter], bool]) -> int:
        return 0


class AsyncSet:
    def __init__(self, disks: list[FakeDisk]) -> None:
        self.disks = {disk.info.name: AsyncFake(disk) for disk in disks}
        self.default = next(iter(self.disks))
        self.ending = FakeEnding()


@asynccontextmanager
async def open_async(
    urls: Sequence[str], options: Mapping[str, str], *, metrics_later: bool = False
) -> AsyncIterator[AsyncSet]:
    note(f"open {json.dumps([list(urls), dict(options)])}")
    fail("open")
    # A nursery, as the real one has: errors of its body come out in a group.
    async with trio.open_nursery():
        yield AsyncSet(make_disks())
    if pause := os.environ.get("FAKE_CLOSE_S"):
        note("closing")
        await trio.sleep(float(pause))
    note("close")


def install() -> None:
    """From now on ``open_disks`` of this process opens fakes."""
    blocking = types.ModuleType("iserblk.disk.blocking")
    blocking.open_disks = open_blocking  # type: ignore[attr-defined]
    blocking.ThreadDiskSet = BlockingSet  # type: ignore[attr-defined]
    aio = types.ModuleType("iserblk.disk.aio")
    aio.open_disks = open_async  # type: ignore[attr-defined]
    aio.TrioDiskSet = AsyncSet  # type: ignore[attr-defined]
    sys.modules[blocking.__name__] = blocking
    sys.modules[aio.__name__] = aio
