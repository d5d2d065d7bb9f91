"""The target behind /dev/nbd0 dies and comes back. Within io-timeout programs see a pause, after it
errors; no task hangs."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.commands import iserblk
from tests.lab.guest.attached import DEVICE, MIB, Mortal, attached, connected, mounted, nothing_left
from tests.support.programs import SLOW_S, run
from tests.support.until import until_blocking

IO_TIMEOUT_S = 4


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Mortal]:
    made = Mortal(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(autouse=True)
def tidy(target: Mortal) -> Iterator[None]:
    yield
    for name in connected():  # after a failure: for the next test
        iserblk("detach", name)
    nothing_left()


def uninterruptible() -> dict[int, str]:
    """Tasks in D state: pid → kernel stack."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/task/[0-9]*/stat"):
        try:
            state = status.read_text().rpartition(")")[2].split()[0]
            if state == "D":
                found[int(status.parent.name)] = (status.parent / "stack").read_text()
        except OSError:
            continue  # it has ended
    return found


def nobody_hangs() -> None:
    """Check that no task stays uninterruptible, now that every request has had its time."""
    deadline = time.monotonic() + SLOW_S / 2
    while waiting := uninterruptible():
        assert time.monotonic() < deadline, waiting
        time.sleep(0.2)


def test_fio_sees_a_pause(target: Mortal) -> None:
    """The target is killed again and again while fio writes, reads back and compares."""
    words = (
        *("fio", "--name=verify", f"--filename={DEVICE}", "--size=16M"),
        *("--rw=randwrite", "--verify=crc32c", "--verify_fatal=1", "--verify_state_save=0"),
        *("--ioengine=libaio", "--iodepth=16", "--direct=1"),
        "--bssplit=512/20:4k/30:128k/30:1m/20",
    )
    largest = Path("/sys/block", Path(DEVICE).name, "queue/max_sectors_kb")
    before = largest.read_text()
    with attached(target.url, DEVICE, "-o", "io-timeout=120"):
        assert largest.read_text() == "1024\n"  # else 1 MiB were several requests
        kills = 0
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as fio:
            try:
                while kills < 2:
                    time.sleep(1)
                    if fio.poll() is not None:
                        break
                    target.kill()
                    kills += 1
                    time.sleep(0.5)
                    target.start()
                output, _ = fio.communicate(timeout=SLOW_S)
            finally:
                fio.kill()
        assert (fio.returncode, kills > 0) == (0, True), output
    assert largest.read_text() == before  # for the next program that connects it
    nobody_hangs()


def test_a_file_system_does_not_notice(target: Mortal, tmp_path: Path) -> None:
    """Files on ext4 are written and synced one by one while the target is killed and comes back.
    All are there afterwards, and the file system is clean."""
    files = {f"file{number}": os.urandom(20_000 + number) for number in range(24)}
    with attached(target.url, DEVICE, "-o", "io-timeout=120"):
        run("mkfs.ext4", "-q", "-b", "4096", DEVICE)
        with mounted(DEVICE, tmp_path / "mnt") as place:
            for number, (name, content) in enumerate(files.items()):
                if number % 8 == 4:
                    target.kill()
                writing = subprocess.Popen(
                    ["dd", f"of={place / name}", "bs=4k", "conv=fsync", "status=none"],
                    stdin=subprocess.PIPE,
                )
                if number % 8 == 4:
                    time.sleep(1)
                    target.start()
                writing.communicate(content, timeout=SLOW_S / 2)
                assert writing.returncode == 0, name
            target.kill()  # synced files survive this
            time.sleep(0.5)
            target.start()
        run("e2fsck", "-f", "-n", DEVICE)
        with mounted(DEVICE, tmp_path / "mnt", "-o", "ro") as place:
            for name, content in files.items():
                assert (place / name).read_bytes() == content, name
    nobody_hangs()


def direct(output: Path, number: int) -> subprocess.Popen[bytes]:
    source = f"if={DEVICE}" if number % 2 else "if=/dev/zero"
    place = "of=/dev/null" if number % 2 else f"of={DEVICE}"
    flag = "iflag=direct" if number % 2 else "oflag=direct"
    with output.open("wb") as said:
        return subprocess.Popen(
            ["dd", source, place, flag, "bs=64k", "count=1"],
            stdout=said,
            stderr=said,
            stdin=subprocess.DEVNULL,
        )


def written(data: bytes) -> bool:
    """Write ``data`` to the device; whether that succeeded."""
    try:
        with DEVICE.open("r+b", buffering=0) as disk:
            disk.write(data)
            os.fsync(disk.fileno())
    except OSError:
        return False
    return True


def test_away_for_longer_than_the_io_timeout(target: Mortal, tmp_path: Path) -> None:
    """Pending and later requests fail at their deadlines; requests after the outage succeed."""
    data = os.urandom(MIB)
    with attached(target.url, DEVICE, "-o", f"io-timeout={IO_TIMEOUT_S}"):
        target.kill()
        for turn in range(2):
            outputs = [tmp_path / f"{turn}-{number}" for number in range(4)]
            waiting = [direct(output, number) for number, output in enumerate(outputs)]
            for process, output in zip(waiting, outputs, strict=True):
                assert process.wait(SLOW_S / 2) == 1
                assert "Input/output error" in output.read_text()
        with DEVICE.open("wb", buffering=0) as disk:
            disk.write(data)
            with pytest.raises(OSError, match="Input/output") as raised:
                os.fsync(disk.fileno())
            assert raised.value.errno == errno.EIO
        nobody_hangs()
        target.start()
        # Until the server is connected again, requests fail after a second.
        until_blocking(lambda: written(data))
        run("dd", f"if={DEVICE}", f"of={tmp_path}/back", "bs=1M", "count=1", "iflag=direct")
        assert (tmp_path / "back").read_bytes() == data
