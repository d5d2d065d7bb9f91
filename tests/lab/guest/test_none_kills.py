"""The server of a device is killed again and again, and so is the target, under ext4, while fio
writes and compares: no request fails, and the file system stays clean.

``attach -f`` starts the successors. A kill comes some seconds after the successor of the last is
there: in an emulated guest a server takes longer to start than there would be between two kills.
The target has no volatile cache: what it has answered is in the file that is its disk, and outlives
the process. So all that fio has written can be compared, and not only what it has synced.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.commands import Server, iserblk, serving
from tests.lab.guest.attached import DEVICE, RUN, Mortal, connected, mounted, nothing_left
from tests.support.interop import Record
from tests.support.programs import SLOW_S, run
from tests.support.until import until_blocking

FEWEST = 4  # kills
LONG_S = 120  # of fio, at least
GAP_S = 5  # from a successor to the next kill


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


@dataclass
class Load:
    """fio writes and compares in ``place``, again and again, until ``end``."""

    place: Path
    requests: int = 0
    rounds: int = 0
    longest_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def _go_on(self) -> None:
        words = (
            *("fio", "--name=verify", f"--directory={self.place}", "--size=4M", "--bs=4k"),
            *("--rw=randwrite", "--verify=crc32c", "--verify_state_save=0", "--verify_fatal=1"),
            *("--direct=1", "--ioengine=libaio", "--iodepth=8", "--fsync=32", "--randrepeat=0"),
            "--output-format=json",
        )
        while not self._ending.is_set() and not self.failures:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=SLOW_S
            )
            if done.returncode:
                self.failures.append(done.stdout + done.stderr)
                return
            (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
            self.rounds += 1
            for way in ("read", "write"):
                self.requests += job[way]["total_ios"]
                self.longest_s = max(self.longest_s, job[way]["clat_ns"]["max"] / 1e9)

    def end(self) -> None:
        self._ending.set()
        self._thread.join()


def _until_successors(server: Server, count: int) -> None:
    words = "its server has died; it has a new one"
    until_blocking(lambda: server.log.read_text().count(words) >= count)


@pytest.mark.parametrize(
    ("length", "what"),
    [
        ("short", "server and target"),
        pytest.param("short", "server", marks=pytest.mark.long),
        pytest.param("long", "server and target", marks=pytest.mark.long),
        pytest.param("long", "server", marks=pytest.mark.long),
    ],
)
def test_kills_under_a_file_system(
    length: str, what: str, target: Mortal, tmp_path: Path, record: Record
) -> None:
    """Every second kill of the server takes the target along; the others are followed by one of the
    target alone."""
    run("dmesg", "--clear")
    words = ("attach", "-f", target.url, DEVICE, "-o", "io-timeout=60")
    with serving(*words, log=tmp_path / "attach.log") as server:
        run("mkfs.ext4", "-q", "-F", DEVICE)
        with mounted(DEVICE, tmp_path / "place") as place:
            load = Load(place)
            try:
                kills = _kill(target if "target" in what else None, server, load, length)
            finally:
                load.end()
            assert not load.failures
        clean = run("e2fsck", "-f", "-n", DEVICE)
        assert server.end(signal.SIGTERM) == 0
    said = run("dmesg")
    assert "I/O error" not in said and "EXT4-fs error" not in said
    print(
        f"{kills} kills, {load.requests} requests in {load.rounds} rounds, "
        f"longest {load.longest_s:.1f} s; {clean.splitlines()[-1]}"
    )
    ran = f"fio verify and e2fsck on ext4 while the {what} is killed again and again"
    record(ours="iserblk attach", peer="Linux nbd", transport="NBD, Unix socket", ran=ran)


def _kill(target: Mortal | None, server: Server, load: Load, length: str) -> int:
    """Returns how many times the server was killed."""
    kills = 0
    deadline = time.monotonic() + (LONG_S if length == "long" else 0)
    while (kills < FEWEST or time.monotonic() < deadline) and not load.failures:
        time.sleep(GAP_S)
        with_target = target is not None and kills % 2 == 1
        if with_target and target is not None:
            target.kill()
        os.kill(int((RUN / "nbd0" / "server.pid").read_text()), signal.SIGKILL)
        kills += 1
        if with_target and target is not None:
            time.sleep(1)
            target.start()
        _until_successors(server, kills)
        if target is not None and not with_target:
            time.sleep(1)
            target.kill()
            time.sleep(1)
            target.start()
    return kills
