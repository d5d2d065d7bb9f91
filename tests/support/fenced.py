"""Another host reserves the LUN: while our initiator sends its journal again, or before that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio

from iserblk.disk.aio import TrioDisk
from iserblk.disk.seam import FlushClient
from iserblk.errors import ReservationConflict, WritesLost
from iserblk.scsi import opcodes
from iserblk.scsi import reservations as pr
from tests.support.endurance import disk_and_session
from tests.support.faces import read, write
from tests.support.faults.behaviours import Behaviour, Hold
from tests.support.faults.framing import Unit
from tests.support.faults.proxy import FaultProxy
from tests.support.sessions import Host, host_of
from tests.support.until import until

KIB = 1024
AREAS = 6
AREA = 64 * KIB
SIZE = AREAS * AREA
_KEY = 0x77
_PATIENCE_S = 60.0
_DATA = [
    bytes([each]) for each in (opcodes.READ_10, opcodes.READ_16, opcodes.WRITE_10, opcodes.WRITE_16)
]


class Held:
    """``plan``: on the first connection that replaces another, ``hold`` keeps the WRITE ``number``
    (from 0), and all behind it."""

    def __init__(self, number: int) -> None:
        self.hold = Hold(lambda _unit: False)
        self._number = number

    def plan(self, link: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        if not link or self.hold.holding or self.hold.open:
            return (), ()
        left = self._number

        def is_due(unit: Unit) -> bool:
            nonlocal left
            left -= unit.is_write_command
            return left < 0

        self.hold = Hold(is_due)
        return [self.hold], ()


def _start_of(medium: Path) -> bytes:
    with medium.open("rb") as file:
        return file.read(SIZE)


def _at_data(number: int) -> Hold:
    """Keeps the READ or WRITE ``number`` (from 0), and all behind it."""
    left = number

    def is_due(unit: Unit) -> bool:
        nonlocal left
        left -= unit.cdb[:1] in _DATA
        return left < 0

    return Hold(is_due)


async def _told(disk: TrioDisk, client: FlushClient) -> bool:
    """Whether the next flush of ``client`` tells of a loss."""
    try:
        await disk.flush(client)
    except WritesLost as error:
        client.told(error.losses)
        return True
    return False


async def reserves_while_the_journal_is_sent_again(
    url: str, address: tuple[str, int], medium: Path, number: int, lun: bytes
) -> None:
    """A connection is lost, and nothing at the target. The journal is sent again, older writes with
    newer ones over parts of them; at the WRITE ``number`` of these the other host reserves the LUN,
    and writes. ``medium``: the file that shows what the target has at any time.

    What the target has never changes but by the other host. What it refuses is told to each client,
    once; and not before a flush can be carried out again."""
    held = Held(number)
    with FaultProxy(address, held.plan) as proxy:
        async with disk_and_session("async", proxy.through(url), {"io-timeout": "60"}) as (
            disk,
            session,
        ):
            assert isinstance(disk, TrioDisk)
            clients = [disk.new_client() for _ in range(2)]
            model = bytearray()
            for at in range(AREAS):
                model += b"%d" % at * AREA
            await write(disk, bytes(model), 0)
            for client in clients:
                assert not await _told(disk, client)
            for at in range(AREAS):
                await _put(disk, model, at * AREA, bytes([65 + at]) * 32 * KIB)
            for at in range(AREAS):
                await _put(disk, model, at * AREA + 8 * KIB, bytes([97 + at]) * 4 * KIB)

            def there() -> bytes:
                return _start_of(medium)

            assert there() == model
            proxy.cut()
            with trio.fail_after(_PATIENCE_S):
                await until(lambda: held.hold.holding)
            assert there() == model, "an older write went over a newer one"
            async with host_of(url, "iqn.2026-11.example:other") as host:
                host.lun = lun
                await host.out(pr.REGISTER, 0, _KEY)
                await host.out(pr.RESERVE, _KEY, kind=pr.WRITE_EXCLUSIVE)
                await host.write(b"o" * 512)
                model[:512] = b"o" * 512
                proxy.release(held.hold)
                assert await read(disk, 0, SIZE) == model
                await _is_shut_out(disk, clients)
                assert there() == model
                await _leave(host)
            # What was refused is not sent again, either, now that it would be taken.
            proxy.cut()
            assert await read(disk, 0, SIZE) == model == there()
            assert [await _told(disk, each) for each in clients] == [True, True]
            assert [await _told(disk, each) for each in clients] == [False, False]
            assert there() == model
            # What the other host has written stays, whatever becomes of the connection.
            proxy.cut()
            await _put(disk, model, SIZE - 512, b"z" * 512)
            assert not await _told(disk, clients[0])
            assert await read(disk, 0, SIZE) == model == there()
            assert session.counts.reconnects == 3


async def reserves_before_the_connection_is_lost(
    url: str, address: tuple[str, int], medium: Path, writes: bool, lun: bytes
) -> None:
    """Another host reserves the LUN, while something of ours is unflushed, and a write of ours is
    refused; it ``writes``, or not, and lets go of the LUN. Then our connection is lost, and nothing
    at the target.

    What the other host has written stays, and each client is told of a loss then, once. What was
    written behind that is kept as ever."""
    with FaultProxy(address, lambda _link: ((), ())) as proxy:
        async with disk_and_session("async", proxy.through(url), {"io-timeout": "60"}) as (
            disk,
            session,
        ):
            assert isinstance(disk, TrioDisk)
            clients = [disk.new_client() for _ in range(2)]
            model = bytearray(SIZE)
            await write(disk, bytes(model), 0)
            for client in clients:
                assert not await _told(disk, client)
            await _put(disk, model, 0, b"a" * 32 * KIB)
            async with host_of(url, "iqn.2026-11.example:other") as host:
                host.lun = lun
                await host.out(pr.REGISTER, 0, _KEY)
                await host.out(pr.RESERVE, _KEY, kind=pr.WRITE_EXCLUSIVE)
                with pytest.raises(ReservationConflict):
                    await write(disk, b"z" * 512, 4 * KIB)
                if writes:
                    await host.write(b"o" * 512)
                    model[:512] = b"o" * 512
                await _leave(host)
            await _put(disk, model, 8 * KIB, b"b" * 4 * KIB)
            proxy.cut()
            assert await read(disk, 0, SIZE) == model == _start_of(medium)
            assert [await _told(disk, each) for each in clients] == [writes, writes]
            assert [await _told(disk, each) for each in clients] == [False, False]
            assert await read(disk, 0, SIZE) == model == _start_of(medium)
            assert session.counts.reconnects == 1


async def reserves_again_while_the_lun_is_compared(
    url: str, address: tuple[str, int], medium: Path, lun: bytes
) -> None:
    """A command was refused because another host had reserved the LUN; something was written
    behind that, and the connection is lost. While what is older is compared, that host reserves the
    LUN once more, writes over what is newer, and lets go: what it has written stays, and the loss
    is told."""
    compared, behind = _at_data(0), _at_data(1)
    holds: list[Behaviour] = []  # of the next connection

    def plan(_link: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        planned = holds.copy()
        holds.clear()
        return planned, ()

    with FaultProxy(address, plan) as proxy:
        async with disk_and_session("async", proxy.through(url), {"io-timeout": "60"}) as (
            disk,
            session,
        ):
            assert isinstance(disk, TrioDisk)
            client, model = disk.new_client(), bytearray(SIZE)
            await write(disk, bytes(model), 0)
            assert not await _told(disk, client)
            await _put(disk, model, 0, b"a" * 32 * KIB)
            async with host_of(url, "iqn.2026-11.example:other") as host:
                host.lun = lun
                await host.out(pr.REGISTER, 0, _KEY)
                await host.out(pr.RESERVE, _KEY, kind=pr.EXCLUSIVE_ACCESS)
                with pytest.raises(ReservationConflict):
                    await write(disk, b"z" * 512, 4 * KIB)
                await host.out(pr.RELEASE, _KEY, kind=pr.EXCLUSIVE_ACCESS)
                await _put(disk, model, 0, b"b" * 4 * KIB)
                holds += [compared, behind]
                proxy.cut()
                with trio.fail_after(_PATIENCE_S):
                    await until(lambda: compared.holding)
                    await host.out(pr.RESERVE, _KEY, kind=pr.EXCLUSIVE_ACCESS)
                    proxy.release(compared)
                    await until(lambda: behind.holding)
                await host.write(b"o" * 512)
                model[:512] = b"o" * 512
                await host.out(pr.RELEASE, _KEY, kind=pr.EXCLUSIVE_ACCESS)
                await host.out(pr.REGISTER, _KEY, 0)
            proxy.release(behind)
            assert await read(disk, 0, SIZE) == model == _start_of(medium)
            assert await _told(disk, client) and not await _told(disk, client)
            assert await read(disk, 0, SIZE) == model == _start_of(medium)
            assert session.counts.reconnects == 1


async def _put(disk: TrioDisk, model: bytearray, at: int, data: bytes) -> None:
    model[at : at + len(data)] = data
    await write(disk, data, at)


async def _is_shut_out(disk: TrioDisk, clients: list[FlushClient]) -> None:
    """No flush tells of the loss: none was carried out."""
    for client in clients:
        with pytest.raises(ReservationConflict) as raised:
            await disk.flush(client)
        assert not raised.value.losses
    with pytest.raises(ReservationConflict):
        await write(disk, b"z" * 512, 0)


async def _leave(host: Host) -> None:
    await host.out(pr.RELEASE, _KEY, kind=pr.WRITE_EXCLUSIVE)
    await host.out(pr.REGISTER, _KEY, 0)
