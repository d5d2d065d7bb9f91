"""Targets that lie: PDUs of a real target are changed on their way, over both transports, through
both faces and through NBD's wire.

tests/initiator/session/test_session_hostile.py has a bare peer as the target.
"""

from __future__ import annotations

import contextlib
import errno
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
from tests.support.faces import WAYS, one_disk, read, write
from tests.support.faults.behaviours import Behaviour, Drop, Duplicate
from tests.support.faults.framing import Unit
from tests.support.faults.proxy import FaultProxy, Plan
from tests.support.nbd_disk import NbdError
from tests.support.target import IQN, TargetProcess, running_target
from tests.support.transports import TRANSPORTS, by

pytestmark = pytest.mark.logs(
    logs.DEADLINES,
    logs.LOST_POWER,
    logs.RECONNECTED,
    r"^WARNING NBD client: (?!NBD: )",
    r"the size is the last one known: .*another LUN is there now",
)

MIB = 1 << 20
# Behind the login a byte stream is as other iSER: one way is enough.
PAIRS = [
    *((face, transport) for face in WAYS for transport in ("iser", "iscsi")),
    ("async", "stream"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("lun")
    specs = [f"{place}/{name}:size=16M" for name in ("good", "bad")]
    with running_target(specs, place / "target.log") as running:
        yield running
    assert "Traceback" not in Path(running.log).read_text()


async def suffer(
    face: str,
    target: TargetProcess,
    transport: str,
    plan: Plan,
    seed: int,
    login_s: float = reach.LOGIN_TIMEOUT_S,
) -> int:
    """Work on LUN 1 through the proxy, with a bystander on LUN 0; the number of errors. Checks that
    errors are documented ones, and that no buffer of a write is changed. ``login_s``: what a login
    may take; the bystander's may take its time."""
    errors = 0
    with (
        FaultProxy(("127.0.0.1", target.port), plan) as proxy,
        pytest.MonkeyPatch.context() as patch,
    ):
        url = by(transport, proxy.through(f"{target.url}/1"), "io-timeout=1")
        async with bystander(f"{target.url}/0"):
            patch.setattr(reach, "LOGIN_TIMEOUT_S", login_s)
            for turn in range(3):
                chance = random.Random(seed * 10 + turn)
                try:
                    async with one_disk(face, url, seed=seed) as disk:
                        for _ in range(12):
                            size = chance.choice((512, 8192, 49152, 66048, 300 * 512))
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
                    assert not isinstance(error, NbdError) or error.errno == errno.EIO, repr(error)
                    errors += 1
            patch.undo()
    return errors


# shows: SYSTEM-44
@pytest.mark.parametrize(("face", "transport"), PAIRS)
@pytest.mark.parametrize("seed", range(4))
async def test_lies(target: TargetProcess, face: str, transport: str, seed: int) -> None:
    def plan(number: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        return [], ([lie(transport, seed * 1000 + number, 0.1)] if number % 2 == 0 else [])

    await suffer(face, target, transport, plan, seed, login_s=2.0)


def _answer(unit: Unit) -> bool:
    """Whether the unit is a SCSI Response, or a Data-In with status."""
    return unit.opcode == 0x21 or (unit.opcode == 0x25 and bool(unit.bhs[1] & 1))


# shows: SYSTEM-50
@pytest.mark.parametrize(("face", "transport"), PAIRS)
async def test_answers_to_dead_tasks(target: TargetProcess, face: str, transport: str) -> None:
    """Every answer comes twice. The task of the second answer has ended, and another command may
    have its slot: the answer must not be taken for that command's."""
    doubled: list[Duplicate] = []

    def plan(number: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        doubled.append(Duplicate(_answer, nth=12))
        return [], ([doubled[-1]] if number % 2 == 0 else [])

    await suffer(face, target, transport, plan, 1)
    assert any(each.hit for each in doubled)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_answer_that_never_comes(target: TargetProcess, transport: str) -> None:
    """An answer is dropped, its sequence number is missing: the command ends at its deadline, or
    the session ends."""

    def plan(number: int) -> tuple[Sequence[Behaviour], Sequence[Behaviour]]:
        return [], ([Drop(_answer, nth=12)] if number == 0 else [])

    with FaultProxy(("127.0.0.1", target.port), plan) as proxy:
        url = by(transport, proxy.through(f"{target.url}/1"), "io-timeout=1")
        with trio.fail_after(20), contextlib.suppress(IserblkError):
            async with one_disk("async", url) as disk:
                for number in range(12):
                    await write(disk, bytes(512), number * 512)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("says", [b"", b"\x23\x87", b"MPA ID Rep Frame"])
async def test_a_target_that_never_ends_the_login(
    monkeypatch: pytest.MonkeyPatch, transport: str, says: bytes
) -> None:
    """The target takes the connection, sends little or nothing, and waits: the login ends in time,
    with an error that says so."""
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
                async with one_disk("async", by(transport, f"iser://127.0.0.1:{port}/{IQN}/0")):
                    pass
            nursery.cancel_scope.cancel()
