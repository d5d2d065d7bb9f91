"""The kernel's ib_iser in front of a gateway, and tgtd over TCP or LIO over iSER behind it. Each of
the three is killed in turn, under ext4, while fio writes and compares: no request fails.

What the targets behind have answered is in files in memory, and outlives them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest

from tests.lab.guest import kernel_initiator as kernel
from tests.lab.guest import lio
from tests.lab.guest.attached import mounted
from tests.lab.guest.test_none_kills import Load
from tests.support.gateway import MortalGateway
from tests.support.interop import Record
from tests.support.programs import run
from tests.support.tgtd import MortalTgtd

LAB_LAST = True  # sessions are cut off in the middle of commands

PORT = 3271  # of the gateway; LIO, and tgtd's iSER, have 3260
TGTD_PORT = 3272
MIB = 1 << 20
# The gateway answers BUSY after this time, and the kernel repeats. Its own limit for a command is
# higher: in an emulated guest everything takes longer.
IO_TIMEOUT_S = 20
COMMAND_S = 180
WRITES = 50  # of the kernel, between two kills


class Behind(Protocol):
    """A target that can be killed, and comes back with the same LUN."""

    url: str

    def kill(self) -> None: ...

    def start(self) -> None: ...

    def end(self) -> None: ...


class Tgtd(MortalTgtd):
    def __init__(self) -> None:
        programs = Path(os.environ["LAB_TGT"]) / "usr/sbin"
        super().__init__(
            programs, os.environ["LAB_ADDRESS"], TGTD_PORT, Path("/run/lab-luns"), 64 * MIB
        )

    def end(self) -> None:
        self.kill()


class Lio:
    """LIO's iSER target. The kernel cannot be killed: its portal group ends all sessions, and stops
    listening."""

    def __init__(self) -> None:
        # LIO waits long enough for the data of a WRITE only where it knows the initiator's name.
        name = os.environ["LAB_INITIATOR"]
        self.url = f"{os.environ['LAB_URL2']}?rcap=verbs&initiator-name={name}"

    def kill(self) -> None:
        lio.disable()

    def start(self) -> None:
        lio.enable()

    def end(self) -> None:
        """The set-up has made it."""


class Initiator:
    """open-iscsi's daemon. The kernel's session goes on without it; when it starts again, it has
    each connection made anew."""

    def kill(self) -> None:
        for pid in run("pidof", "iscsid").split():
            with suppress(ProcessLookupError):  # its two processes end together
                os.kill(int(pid), signal.SIGKILL)

    def start(self) -> None:
        run("iscsid")


def sessions() -> int:
    """How many sessions the kernel has had so far: it reports the unit attention of each."""
    return run("dmesg").count("Power-on or device reset occurred")


@pytest.fixture(
    params=[
        pytest.param(Tgtd, id="tgtd"),
        pytest.param(Lio, id="LIO", marks=pytest.mark.long),  # minutes, in an emulated machine
    ]
)
def behind(request: pytest.FixtureRequest) -> Iterator[Behind]:
    made: Behind = request.param()
    try:
        yield made
    finally:
        made.end()


# shows: SYSTEM-26
def test_each_is_killed_in_turn(behind: Behind, tmp_path: Path, record: Record) -> None:
    run("dmesg", "--clear")
    gateway = MortalGateway(
        f"{behind.url}{'&' if '?' in behind.url else '?'}io-timeout={IO_TIMEOUT_S}",
        tmp_path / "gateway.log",
        *("--rcap", "verbs"),
        listen=f"{os.environ['LAB_ADDRESS']}:{PORT}",
        iqn=kernel.IQN,
    )

    try:
        with kernel.logged_in(os.environ["LAB_ADDRESS"], {}, port=PORT) as device:
            node = Path("/sys/block", device.name)
            (node / "device/timeout").write_text(str(COMMAND_S))

            def written() -> int:
                return int((node / "stat").read_text().split()[4])

            def go_on(enough: Callable[[], bool]) -> None:
                while not enough() and not load.failures:
                    time.sleep(0.2)

            run("mkfs.ext4", "-q", "-F", device)
            with mounted(device, tmp_path / "place") as place:
                load = Load(place)
                try:
                    for victim in (Initiator(), gateway, behind):
                        before, count = written(), sessions()
                        go_on(lambda: written() > before + WRITES)  # noqa: B023
                        victim.kill()
                        victim.start()
                        if victim is not behind:
                            go_on(lambda: sessions() > count)  # noqa: B023
                        back = written()
                        go_on(lambda: written() > back + WRITES)  # noqa: B023
                finally:
                    load.end()
                assert not load.failures
            run("e2fsck", "-f", "-n", device)
    finally:
        gateway.kill()
    said = run("dmesg")
    assert "I/O error" not in said and "EXT4-fs error" not in said
    print(f"{load.requests} requests in {load.rounds} rounds, longest {load.longest_s:.1f} s")
    record(
        ours="gateway (target, pyverbs)",
        peer=f"ib_iser in front, {'tgtd' if isinstance(behind, Tgtd) else 'LIO'} behind",
        transport="RoCE v2; TCP" if isinstance(behind, Tgtd) else "RoCE v2",
        ran="fio verify and e2fsck on ext4 while iscsid, the gateway and the target behind are "
        "killed in turn",
    )
