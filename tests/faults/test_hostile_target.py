"""Targets that lie about what they send, over both transports, through both faces.

What a bare peer can do to the session is in tests/initiator/session/test_session_hostile.py; here
it is a real target, whose PDUs are changed on their way.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trio

from iserblk.errors import IserblkError, LocalProtocolError, TransportError
from iserblk.initiator.connecting import reach
from tests.faults.bystander import bystander
from tests.faults.changes import lie
from tests.support import logs
from tests.support.faces import FACES, one_disk, read, write
from tests.support.faults.behaviours import Behaviour, Drop, Duplicate
from tests.support.faults.framing import Unit
from tests.support.faults.proxy import FaultProxy, Plan
from tests.support.target import IQN, TargetProcess, running_target

pytestmark = pytest.mark.logs(logs.DEADLINES, logs.LOST_POWER, logs.RECONNECTED)

MIB = 1 << 20
TRANSPORTS = ("iser", "iscsi")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("lun")
    specs = [f"{place}/{name}:size=16M" for name in ("good", "bad")]
    with running_target(specs, place / "target.log") as running:
        yield running
    assert "Traceback" not in Path(running.log).read_text()


async def suffer(face: str, target: TargetProcess, transport: str, plan: Plan, seed: int) -> int:
    """Work on LUN 1 through the proxy, and have a bystander on LUN 0; how many errors there were.
    Errors are documented ones, and no buffer that was given to a write is changed."""
    errors = 0
    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        url = proxy.through(f"{target.url}/1").replace("iser:", f"{transport}:") + "?io-timeout=1"
        async with bystander(f"{target.url}/0"):
            for turn in range(3):
                chance = random.Random(seed * 10 + turn)
                try:
                    async with one_disk(face, url) as disk:
                        for _ in range(12):
                            size = chance.choice((512, 8192, 66048, 300 * 512))
                            at = chance.randrange(8 * MIB) // 512 * 512
                            data = chance.randbytes(size)
                            mine = bytearray(data)
                            try:
                                await disk.write(memoryview(mine), at)
                                await read(disk, at, size)
                            finally:
                                assert mine == data
                except IserblkError as error:
                    assert not isinstance(error, LocalProtocolError), repr(error)
                    errors += 1
    return errors


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("seed", range(4))
async def test_lies(
    target: TargetProcess, monkeypatch: pytest.MonkeyPatch, face: str, transport: str, seed: int
) -> None:
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 2.0)

    def plan(number: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        return [], ([lie(transport, seed * 1000 + number, 0.1)] if number % 2 == 0 else [])

    await suffer(face, target, transport, plan, seed)


def _answer(unit: Unit) -> bool:
    """A SCSI Response, or the Data-In that has the status in it."""
    return unit.opcode == 0x21 or (unit.opcode == 0x25 and bool(unit.bhs[1] & 1))


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_answers_to_dead_tasks(target: TargetProcess, face: str, transport: str) -> None:
    """Every answer comes twice: the second is for a task that has ended, or, worse, for the
    command that has its slot now; it must not be taken for that one's."""
    doubled: list[Duplicate] = []

    def plan(number: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        doubled.append(Duplicate(_answer, nth=12))
        return [], ([doubled[-1]] if number % 2 == 0 else [])

    await suffer(face, target, transport, plan, 1)
    assert any(each.hit for each in doubled)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_answer_that_never_comes(target: TargetProcess, transport: str) -> None:
    """A sequence number is missing: the command ends at its deadline, or the session does."""

    def plan(number: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        return [], ([Drop(_answer, nth=12)] if number == 0 else [])

    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        url = proxy.through(f"{target.url}/1").replace("iser:", f"{transport}:") + "?io-timeout=1"
        with trio.fail_after(20), contextlib.suppress(IserblkError):
            async with one_disk("async", url) as disk:
                for number in range(12):
                    await write(disk, bytes(512), number * 512)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("says", [b"", b"\x23\x87", b"MPA ID Rep Frame"])
async def test_a_target_that_never_ends_the_login(
    monkeypatch: pytest.MonkeyPatch, transport: str, says: bytes
) -> None:
    """It takes the connection, says little or nothing, and waits: an error in words, in time."""
    monkeypatch.setattr(reach, "LOGIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(reach, "CONNECT_TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with trio.open_nursery() as nursery:

            async def answer() -> None:
                listener.setblocking(False)
                await trio.lowlevel.wait_readable(listener)
                sock, _ = listener.accept()
                with sock:
                    sock.sendall(says)
                    await trio.sleep_forever()

            nursery.start_soon(answer)
            with trio.fail_after(20), pytest.raises(TransportError, match=str(port)):
                async with one_disk("async", f"{transport}://127.0.0.1:{port}/{IQN}/0"):
                    pass
            nursery.cancel_scope.cancel()
