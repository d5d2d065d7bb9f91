"""The faces of the disk, and NBD's wire, behind one set of names: a test is written once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from iserblk.disk import aio, blocking
from iserblk.disk.request_queue import Request, RequestQueue, open_queue
from iserblk.disk.seam import AsyncDisk, BlockingDisk, DirectDisk, Extent, LunInfo
from tests.support.gateway import running_gateway
from tests.support.nbd_disk import FORMS, through_nbd
from tests.support.plain_initiator import plain_disk

FACES = ("async", "blocking")
QUEUE = "queue"  # reads and writes of all tasks through one queue of requests
NBD = "nbd"  # over one connection of each form
NBD_FORMS = tuple(f"{NBD} {form}" for form in FORMS)  # over two connections of one form
WAYS = (*FACES, NBD)
MEMORY = "memory"  # over no iSCSI; a URL is ``memory:SIZE``, and perhaps ``/1``: large blocks
GATEWAY = "gateway"  # over iSER; "gateway iscsi" over TCP
THREADS = 64


class InThreads:
    """Implements AsyncDisk over a BlockingDisk: every call in a thread of its own."""

    def __init__(self, disk: BlockingDisk) -> None:
        self.disk = disk
        self._limiter = trio.CapacityLimiter(THREADS)
        self.info: LunInfo = disk.info

    @property
    def size(self) -> int:
        return self.disk.size

    async def refresh(self) -> int:
        size: int = await self._run(self.disk.refresh)
        return size

    async def _run(self, call: Callable[..., Any], *args: object, **kwargs: object) -> Any:
        return await trio.to_thread.run_sync(partial(call, *args, **kwargs), limiter=self._limiter)

    async def read_into(self, buffer: memoryview, offset: int) -> None:
        await self._run(self.disk.read_into, buffer, offset)

    async def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        await self._run(self.disk.write, buffer, offset, fua)

    async def flush(self) -> None:
        await self._run(self.disk.flush)

    async def trim(self, offset: int, length: int, fua: bool = False) -> None:
        await self._run(self.disk.trim, offset, length, fua)

    async def zero(
        self,
        offset: int,
        length: int,
        *,
        may_trim: bool = False,
        fast: bool = False,
        fua: bool = False,
    ) -> None:
        await self._run(self.disk.zero, offset, length, may_trim=may_trim, fast=fast, fua=fua)

    async def extents(self, offset: int, length: int) -> list[Extent]:
        found: list[Extent] = await self._run(self.disk.extents, offset, length)
        return found

    async def cache(self, offset: int, length: int) -> None:
        await self._run(self.disk.cache, offset, length)


class InQueue:
    """Implements AsyncDisk over another one: reads and writes through ``queue``. ``hand_out`` is
    the body of the task that they are waited for in. A cancelled one goes on to its end."""

    def __init__(self, disk: DirectDisk, queue: RequestQueue) -> None:
        self._queue = queue
        self._disk = disk
        self._begun = trio.Event()
        self.info: LunInfo = disk.info
        self.refresh = disk.refresh
        self.client = disk.client
        self.new_client = disk.new_client
        self.only_client = disk.only_client
        self.flush = disk.flush
        self.trim = disk.trim
        self.zero = disk.zero
        self.extents = disk.extents
        self.cache = disk.cache

    @property
    def size(self) -> int:
        return self._disk.size

    @property
    def dirty(self) -> bool:
        return self._disk.dirty

    @property
    def unflushed(self) -> int | None:
        return self._disk.unflushed

    async def hand_out(self) -> None:
        while True:
            requests = await self._queue.ended()
            for request in requests:
                assert isinstance(request.tag, trio.Event)
                request.tag.set()
            if not requests:
                self._begun = trio.Event()
                await self._begun.wait()

    async def read_into(self, buffer: memoryview, offset: int) -> None:
        await self._outcome(self._queue.read(buffer, offset, trio.Event()))

    async def write(self, buffer: memoryview, offset: int, fua: bool = False) -> None:
        await self._outcome(self._queue.write(buffer, offset, trio.Event(), fua=fua))

    async def _outcome(self, request: Request) -> None:
        self._begun.set()
        assert isinstance(request.tag, trio.Event)
        with trio.CancelScope(shield=True):
            await request.tag.wait()
        if request.error is not None:
            raise request.error


@asynccontextmanager
async def opened(
    face: str, *urls: str, options: Mapping[str, str] | None = None
) -> AsyncIterator[dict[str, AsyncDisk]]:
    """The disks of ``urls`` by export name, first URL's first."""
    if face == "async":
        async with aio.open_disks(urls, options or {}) as disks:
            yield dict(disks.disks)
    else:
        with blocking.open_disks(urls, options or {}) as found:  # the loop has nothing else to do
            yield {name: InThreads(disk) for name, disk in found.disks.items()}  # type: ignore[misc]


@asynccontextmanager
async def one_disk(
    face: str, url: str, options: Mapping[str, str] | None = None, seed: object = 0
) -> AsyncIterator[AsyncDisk]:
    """``face``: one of FACES, QUEUE, NBD, NBD_FORMS, or GATEWAY and perhaps a scheme. ``seed``: of
    what a client of NBD chooses."""
    if face.startswith(GATEWAY):
        scheme = face.removeprefix(GATEWAY).strip() or "iser"
        async with running_gateway(url) as (given, _):
            front = given.replace("iser:", f"{scheme}:")
            async with opened("async", front, options=options) as disks:
                (disk,) = disks.values()
                yield disk
        return
    if face == MEMORY:
        size, _, number = url.removeprefix(f"{MEMORY}:").partition("/")
        async with plain_disk(int(size), 4096 if number == "1" else 512, seed) as plain:
            yield plain
        return
    if face == QUEUE:
        async with aio.open_disks([url], options or {}) as found:
            (direct,) = found.disks.values()
            async with trio.open_nursery() as nursery, open_queue(direct) as queue:
                queued = InQueue(direct, queue)
                nursery.start_soon(queued.hand_out)
                yield queued
                nursery.cancel_scope.cancel()
        return
    if not face.startswith(NBD):
        async with opened(face, url, options=options) as disks:
            (disk,) = disks.values()
            yield disk
        return
    forms = FORMS if face == NBD else (face.removeprefix(f"{NBD} "),) * 2
    async with aio.open_disks([url], options or {}) as found:
        (direct,) = found.disks.values()
        async with through_nbd(direct, forms, seed) as disk:
            yield disk


async def read(disk: AsyncDisk, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    await disk.read_into(memoryview(buffer), offset)
    return bytes(buffer)


async def write(disk: AsyncDisk, data: bytes, offset: int, fua: bool = False) -> None:
    await disk.write(memoryview(data), offset, fua)
