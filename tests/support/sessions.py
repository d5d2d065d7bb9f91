"""A target in this process and sessions with it, one a host: raw commands and operations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from iserblk.commands.command import Operation
from iserblk.commands.running import command
from iserblk.errors import TransportError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.options import Options
from iserblk.scsi import luns
from iserblk.scsi import reservations as pr
from iserblk.scsi.reservations import OutParameters
from iserblk.target.scsi.device import LogicalUnit
from iserblk.url import parse_url
from tests.support.target_here import serve
from tests.target.fake_store import FakeStore

T = TypeVar("T")

IQN = "iqn.2026-11.example:disk"
LUN = luns.encode(0)
PATIENCE_S = 20.0  # only a test that fails ever waits that long
_READ = bytes((0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0))
_FUA_WRITE = bytes((0x2A, 0x08, 0, 0, 0, 0, 0, 0, 1, 0))


class Host:
    """One session, with one LUN."""

    def __init__(self, driver: TrioDriver, lun: bytes = LUN) -> None:
        self.lun = lun
        self.driver = driver
        self.session = driver.session

    async def run(self, operation: Operation[T]) -> T:
        return await self.driver.run_operation(operation)

    async def command(
        self,
        cdb: bytes,
        data_in: memoryview | None = None,
        data_out: memoryview | None = None,
        short_ok: bool = False,
    ) -> int:
        operation = command(self.session, self.lun, cdb, "the LUN", data_in, data_out, short_ok)
        return await self.run(operation)

    async def read(self) -> bytes:
        buffer = bytearray(512)
        await self.command(_READ, data_in=memoryview(buffer))
        return bytes(buffer)

    async def write(self, data: bytes) -> None:
        await self.command(_FUA_WRITE, data_out=memoryview(data))

    async def ask(self, action: int) -> bytes:
        buffer = bytearray(4096)
        moved = await self.command(pr.reserve_in(action, 4096), memoryview(buffer), short_ok=True)
        return bytes(buffer[:moved])

    async def keys(self) -> list[int]:
        return pr.decode_keys(await self.ask(pr.READ_KEYS))[1]

    async def held(self) -> pr.Reservation | None:
        return pr.decode_reservation(await self.ask(pr.READ_RESERVATION))[1]

    async def out(
        self,
        action: int,
        key: int,
        action_key: int = 0,
        kind: int = pr.EXCLUSIVE_ACCESS_REGISTRANTS,
    ) -> None:
        data = pr.encode_parameters(OutParameters(key, action_key))
        await self.command(pr.reserve_out(action, kind), data_out=memoryview(data))


class Place:
    """The target; ``log_in`` opens sessions that end with it."""

    def __init__(self, scheme: str, url: str, nursery: trio.Nursery, unit: LogicalUnit) -> None:
        self._url = parse_url(url.replace("iser://", f"{scheme}://"))
        self._nursery = nursery
        self.unit = unit
        self.hosts: list[Host] = []

    async def log_in(self, name: str) -> Host:
        options = Options(initiator_name=f"iqn.2026-11.example:{name}")
        driver = TrioDriver(await connect(self._url, options))
        await self._nursery.start(driver.run)
        self.hosts.append(Host(driver))
        return self.hosts[-1]


@asynccontextmanager
async def target(scheme: str, store: FakeStore) -> AsyncIterator[Place]:
    send, receive = trio.open_memory_channel[str](1)
    unit = LogicalUnit(store, serial="S", block=512)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, "127.0.0.1:0", IQN, {0: unit}, send.send_nowait)
            place = Place(scheme, await receive.receive(), nursery, unit)
            try:
                yield place
            finally:
                for host in place.hosts:
                    if host.session.error is None:
                        host.session.fail(TransportError("end of test"))
                nursery.cancel_scope.cancel()


@asynccontextmanager
async def hosts(scheme: str, store: FakeStore, *names: str) -> AsyncIterator[list[Host]]:
    """The target, and a session for each name."""
    async with target(scheme, store) as place:
        yield [await place.log_in(name) for name in names]


@asynccontextmanager
async def host_of(url: str, name: str) -> AsyncIterator[Host]:
    """The session of an initiator with this name, with LUN 0 of a target that runs."""
    driver = TrioDriver(await connect(parse_url(url), Options(initiator_name=name)))
    async with trio.open_nursery() as nursery:
        await nursery.start(driver.run)
        try:
            yield Host(driver)
        finally:
            with trio.CancelScope(shield=True):
                await driver.log_out()
            nursery.cancel_scope.cancel()
