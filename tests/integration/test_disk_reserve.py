"""reserve=exclusive through both faces and the command line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import trio

from iserblk.errors import Busy, ReservationConflict, ReservationLost
from iserblk.scsi import reservations as pr
from tests.integration.conftest import StartTarget
from tests.support import logs
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.sessions import host_of
from tests.support.target import ROOT, TargetProcess

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.RECONNECTED, logs.RESERVATION)

SIZE = 1 << 20
EXCLUSIVE = {"reserve": "exclusive", "initiator-name": "iqn.2026-11.example:a"}
OTHER = {**EXCLUSIVE, "initiator-name": "iqn.2026-11.example:b"}
NO_RESERVATION = {"initiator-name": "iqn.2026-11.example:c"}
THIEF = "iqn.2026-11.example:thief"
DATA = b"d" * 4096
LUNS = (f"lun0:size={SIZE}", f"lun1:size={SIZE}")


@pytest.fixture
def target(start_target: StartTarget) -> TargetProcess:
    return start_target(*LUNS)


@pytest.fixture(params=["iser", "iscsi"])
def url(request: pytest.FixtureRequest, target: TargetProcess) -> str:
    return target.url.replace("iser://", f"{request.param}://")


@pytest.mark.parametrize("face", FACES)
async def test_for_one_alone(url: str, face: str) -> None:
    async with one_disk(face, f"{url}/0", EXCLUSIVE) as disk:
        await write(disk, DATA, 0)
        await disk.flush()
        with pytest.raises(Busy, match=r"reserved by iqn.2026-11.example:a"):
            async with one_disk(face, f"{url}/0", OTHER):
                pass
        with pytest.raises(Busy, match="on this machine already"):
            async with one_disk(face, f"{url}/0", EXCLUSIVE):
                pass
        async with one_disk(face, f"{url}/0", NO_RESERVATION) as beside:
            with pytest.raises(ReservationConflict, match="another initiator has reserved"):
                await read(beside, 0, 512)
            with pytest.raises(ReservationConflict):
                await write(beside, DATA, 0)
        assert await read(disk, 0, len(DATA)) == DATA
    async with one_disk(face, f"{url}/0", NO_RESERVATION) as beside:
        assert await read(beside, 0, len(DATA)) == DATA


@pytest.mark.parametrize("face", FACES)
async def test_what_was_reserved_before_a_failure_is_given_back(url: str, face: str) -> None:
    async with one_disk(face, f"{url}/1", OTHER):
        with pytest.raises(Busy, match="lun1: reserved by"):
            async with opened(face, url, options=EXCLUSIVE):  # both LUNs
                pass
        async with one_disk(face, f"{url}/0", NO_RESERVATION) as beside:
            await read(beside, 0, 512)
    async with opened(face, url, options=EXCLUSIVE) as both:
        assert list(both) == ["lun0", "lun1"]


@pytest.fixture
def crashed(url: str) -> Iterator[None]:
    """Reserve the LUN in a process that is killed while it holds it."""
    program = (
        "import sys\n"
        "from iserblk.disk.blocking import open_disks\n"
        "with open_disks([sys.argv[1]], dict(pair.split('=') for pair in sys.argv[2:])):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    options = [f"{key}={value}" for key, value in EXCLUSIVE.items()]
    with subprocess.Popen(
        [sys.executable, "-c", program, f"{url}/0", *options],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.kill()
    yield


@pytest.mark.usefixtures("crashed")
@pytest.mark.parametrize("face", FACES)
async def test_after_a_crash(url: str, face: str) -> None:
    """After a crash the same machine gets the LUN back, and others do not get in. The disk knows
    also what a reservation hides from an initiator that is not registered (mode pages, say)."""
    with pytest.raises(Busy, match=r"reserved by iqn.2026-11.example:a"):
        async with one_disk(face, f"{url}/0", OTHER):
            pass
    async with one_disk(face, f"{url}/0", EXCLUSIVE) as disk:
        await write(disk, DATA, 0)
        info = disk.info
    async with one_disk(face, f"{url}/0", NO_RESERVATION) as disk:
        assert replace(disk.info, connection={}) == replace(info, connection={})


@pytest.mark.usefixtures("crashed")
async def test_by_the_key_of_one_that_is_gone(url: str) -> None:
    with pytest.raises(Busy) as refused:
        async with one_disk("async", f"{url}/0", OTHER):
            pass
    key = str(refused.value).partition("reserve-key=")[2].partition(" ")[0]
    async with one_disk("async", f"{url}/0", {**OTHER, "reserve-key": key}) as disk:
        await write(disk, DATA, 0)


async def test_on_the_command_line(url: str) -> None:
    # Not the machine's own name: tests of other processes may hold a LUN by it.
    words = ["trim", f"{url}/0", "--all", "--reserve", "exclusive", "--initiator-name", THIEF]
    async with one_disk("async", f"{url}/0", EXCLUSIVE):
        done = await trio.run_process(
            [sys.executable, "-m", "iserblk.cli", *words],
            cwd=ROOT,
            check=False,
            capture_stderr=True,
        )
    assert done.returncode == 28, done.stderr
    assert b"lun0: reserved by iqn.2026-11.example:a (key 0x" in done.stderr


@pytest.mark.parametrize("face", FACES)
async def test_the_target_is_killed(
    target: TargetProcess, start_target: StartTarget, url: str, face: str
) -> None:
    """A killed target forgets every reservation: the disk reserves again before it sends anything
    else."""
    async with one_disk(face, f"{url}/0", EXCLUSIVE) as disk:
        await write(disk, DATA, 0)
        await disk.flush()
        for _ in range(2):
            target.kill()
            target = start_target(*LUNS, listen=target.listen)
            assert await read(disk, 0, len(DATA)) == DATA
            async with one_disk(face, f"{url}/0", NO_RESERVATION) as beside:
                with pytest.raises(ReservationConflict):
                    await write(beside, b"x" * 512, 0)
    async with one_disk(face, f"{url}/0", OTHER) as disk:
        assert await read(disk, 0, len(DATA)) == DATA


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("left", [False, True], ids=["holds it", "has left"])
async def test_taken_by_force(url: str, face: str, left: bool) -> None:
    """A disk that lost its reservation never writes to the LUN again."""
    async with one_disk(face, f"{url}/0", {**EXCLUSIVE, "reserve-key": "0xa"}) as disk:
        await write(disk, DATA, 0)
        async with host_of(url, THIEF) as thief:
            await thief.out(pr.REGISTER, 0, 0xB)
            await thief.out(pr.PREEMPT, 0xB, 0xA)
            await thief.write(b"n" * 512)
            if left:
                await thief.out(pr.REGISTER, 0xB, 0)
            for _ in range(2):
                with pytest.raises(ReservationLost, match="nothing more is written"):
                    await write(disk, DATA, 0)
    async with one_disk(face, f"{url}/0", NO_RESERVATION) as disk:
        if left:
            assert await read(disk, 0, 512) == b"n" * 512
        else:
            with pytest.raises(ReservationConflict):
                await read(disk, 0, 512)
