"""reserve=exclusive through both faces and the command line; libiscsi's tests of reservations."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from iserblk.errors import Busy, ReservationConflict
from tests.integration.conftest import StartTarget
from tests.support.faces import FACES, one_disk, opened, read, write
from tests.support.target import ROOT, TargetProcess

SIZE = 1 << 20
EXCLUSIVE = {"reserve": "exclusive", "initiator-name": "iqn.2026-11.example:a"}
OTHER = {**EXCLUSIVE, "initiator-name": "iqn.2026-11.example:b"}
NO_RESERVATION = {"initiator-name": "iqn.2026-11.example:c"}
DATA = b"d" * 4096


@pytest.fixture
def target(start_target: StartTarget) -> TargetProcess:
    return start_target(f"lun0:size={SIZE}", f"lun1:size={SIZE}")


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
    """An attach that is killed while it has the LUN."""
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
    """The same machine comes back, others do not get in. All that a reservation hides from those
    that are not registered (mode pages, for one) is known."""
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
    async with one_disk("async", f"{url}/0", EXCLUSIVE):
        done = await trio.run_process(
            [sys.executable, "-m", "iserblk.cli", "trim", f"{url}/0", "--reserve", "exclusive"],
            cwd=ROOT,
            check=False,
            capture_stderr=True,
        )
    assert done.returncode == 28, done.stderr
    assert b"lun0: reserved by iqn.2026-11.example:a (key 0x" in done.stderr


@pytest.mark.parametrize("tests", ["SCSI.Prin*", "SCSI.Prout*"])
def test_iscsi_test_cu(target: TargetProcess, tests: str, tmp_path: Path) -> None:
    """libiscsi's own tests of PERSISTENT RESERVE IN and OUT."""
    program = shutil.which("iscsi-test-cu")
    if program is None:
        pytest.skip("iscsi-test-cu is not installed: run scripts/setup --tests")
    url = target.url.replace("iser://", "iscsi://")
    done = subprocess.run(
        [program, "--dataloss", "--fail", "--test", tests, f"{url}/0"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    assert "...passed" in done.stdout.replace("\n", "")
    assert "FAILED" not in done.stdout and "[SKIPPED]" not in done.stdout, done.stdout
