"""A write that was delayed in the network arrives after its session has been replaced: nothing of
it is written, whatever part of it comes late (the command, or the data that the target asked for).

Session reinstatement (RFC 7143 section 6.3.5) ends the tasks of the old session. A login with
another ISID does not: it shows that the late write would be carried out.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
import trio

from iserblk.disk import aio
from iserblk.errors import IserblkError, TransportError
from iserblk.initiator.connecting.reach import connect
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.iscsi import bhs
from iserblk.options import Options
from iserblk.url import parse_url
from tests.initiator.peer import disk_of
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, one_disk, read, write
from tests.support.faults.behaviours import Hold
from tests.support.faults.framing import Unit
from tests.support.faults.proxy import FaultProxy
from tests.support.until import PAUSE_S, until

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.RECONNECTED, logs.ONE_OF_SEVERAL)

KIB = 1024
PATIENCE_S = 30.0
SETTLE_S = 0.3
PARTS: dict[str, tuple[Callable[[Unit], bool], int]] = {
    "command": (lambda unit: unit.is_write_command, 8 * KIB),  # with immediate data
    "command, data asked for": (lambda unit: unit.is_write_command, 256 * KIB),
    "data": (lambda unit: unit.is_write_data, 256 * KIB),
    "data that follows unasked": (lambda unit: unit.opcode == bhs.DATA_OUT, 64 * KIB),
}
CASES = [
    (transport, part)
    for transport in ("iser", "iscsi")
    for part in PARTS
    # Over TCP our target takes 64 KiB in one PDU.
    if (transport, part) != ("iscsi", "data that follows unasked")
]


@asynccontextmanager
async def disk(url: str) -> AsyncIterator[aio.TrioDisk]:
    """LUN 0 through a session of its own, without recovery."""
    session = await connect(parse_url(url), Options())
    driver = TrioDriver(session)
    async with trio.open_nursery() as nursery:
        try:
            await nursery.start(driver.run)
            yield aio.TrioDisk(disk_of(session), driver)
        finally:
            session.fail(TransportError("end of test"))
            nursery.cancel_scope.cancel()


@pytest.fixture(params=[True, False], ids=["same session", "another session"])
def reinstates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether each login has the ISID of the session before it, and so replaces it."""
    numbers = itertools.count(1)

    def isid(size: int) -> bytes:
        return bytes([7 if request.param else next(numbers)]) * size

    monkeypatch.setattr("iserblk.names.secrets.token_bytes", isid)
    yield request.param


@pytest.mark.parametrize(("transport", "part"), CASES)
async def test_a_delayed_write(
    start_target: StartTarget, reinstates: bool, transport: str, part: str
) -> None:
    when, size = PARTS[part]
    old, new = b"o" * size, b"n" * size
    hold = Hold(when)
    target = start_target("lun:size=16M")
    with FaultProxy(
        ("127.0.0.1", target.port), lambda number: ([hold] if number == 0 else [], [])
    ) as proxy:
        url = proxy.through(f"{target.url}/0").replace("iser:", f"{transport}:")
        with trio.fail_after(PATIENCE_S):
            async with disk(url) as first, trio.open_nursery() as nursery:

                async def write_old() -> None:
                    with suppress(IserblkError):
                        await write(first, old, 0)

                await read(first, 0, 512)  # takes the unit attention of the new session
                nursery.start_soon(write_old)
                await until(lambda: hold.holding)
                assert proxy.abandon() == 1  # the initiator loses its connection, the target not
                async with disk(url) as second:
                    await write(second, new, 0)
                    await second.flush()
                    assert await read(second, 0, size) == new
                    assert proxy.release(hold) >= (48 if part == "command, data asked for" else 512)
                    if not reinstates and part != "command, data asked for":
                        while await read(second, 0, size) == new:  # noqa: ASYNC110 (there is no event)
                            await trio.sleep(PAUSE_S)
                    else:  # and where no initiator is there to send the data
                        await trio.sleep(SETTLE_S)
                        assert await read(second, 0, size) == new
                nursery.cancel_scope.cancel()


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(("transport", "part"), CASES)
async def test_recovery_is_not_overtaken(
    start_target: StartTarget, face: str, transport: str, part: str, level: int
) -> None:
    """The connection is lost during a write, the disk connects again and sends the write again, a
    newer write follows; then the old write arrives. The newer data stays. At ErrorRecoveryLevel 2
    the session stays, too: only the connection is reinstated, and the write goes on, or is sent
    again with its number."""
    when, size = PARTS[part]
    old, new = b"o" * size, b"n" * size
    hold = Hold(lambda unit: ready and when(unit))
    ready = False
    target = start_target("lun:size=16M")
    with FaultProxy(
        ("127.0.0.1", target.port), lambda number: ([hold] if number == 0 else [], [])
    ) as proxy:
        url = proxy.through(f"{target.url}/0").replace("iser:", f"{transport}:")
        url += f"?error-recovery-level={level}"
        with trio.fail_after(PATIENCE_S):
            async with one_disk(face, url) as disk:
                await write(disk, b"x" * size, 0)
                ready = True
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(write, disk, old, 0)
                    await until(lambda: hold.holding)
                    assert proxy.abandon() == 1
                assert await read(disk, 0, size) == old  # it was sent again
                await write(disk, new, 0)
                assert proxy.release(hold) >= 48
                await trio.sleep(SETTLE_S)
                assert await read(disk, 0, size) == new
                await disk.flush()
                assert len(proxy.links) == 2
    reinstated = "connection 0 reinstated" if level == 2 else "session reinstated"
    assert reinstated in target.log.read_text()
    async with one_disk(face, f"{target.url}/0") as disk:
        assert await read(disk, 0, size) == new
