"""The outage, in the lab's guest.

    python -P -m outagelib.guest WISH

WISH is JSON, the arguments of ``Outage``. For each target and each kind of file system each
initiator has a file system on a LUN of its own, in which a program works (work.py); all have the
same outage at the same time. It begins when every writer has records that are acknowledged and not
flushed.
Afterwards the writers flush and end, the network is cut, the disks lose what is in their cache, and
the file systems are looked at on the target's disks: what is there then was flushed all the way.
The guest is thrown away behind that, with what hangs in it.

Writes $LAB_RESULTS/outage.json: report.py has the form.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outagelib import say
from outagelib.array import Array, Disks, Network
from outagelib.cases import CASES
from outagelib.initiators import INITIATORS, OF_QEMU, Lun
from outagelib.ledger import Follower, missing
from outagelib.programs import run
from outagelib.work import Database, Records, Work

LUN_MIB = 640
_BEFORE_S = 30.0
_AFTER_S = 30.0
# Records of each writer, at least, that no flush has covered when the outage begins. It is a second
# of writing: file systems flush every five seconds by themselves.
_UNFLUSHED = 4
_START_S = 600.0
_BACK_S = 300.0  # how long a writer may need, when the target is back
_END_S = 300.0  # and for its last flush
_LOOK_S = 0.02
_FLUSHES = 15  # flush I/Os, in a block device's stat
_RUN = Path("/run/outage")
_MKFS = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
}
_OF_TARGET = {"ext4": (), "xfs": ("-o", "nouuid")}  # the initiator's mount is still there


class Subject:
    """An initiator with a LUN of ``array``: its device, file system, and what works in that.
    ``index``: counts those of the same initiator, from 0."""

    def __init__(
        self, initiator: str, array: Array, file_system: str, work: Work, index: int
    ) -> None:
        self.work = work
        self.initiator = initiator
        self.array = array
        self.file_system = file_system
        self.name = lun_name(initiator, array.target, file_system)
        self.place = _RUN / self.name
        self.place.mkdir(parents=True)
        self.mount = self.place / "files"
        self.mount.mkdir()
        say(f"{self.name}: attaching")
        self.device = INITIATORS[initiator](Lun(array.host, self.name, array.lun, index))
        run("mount", self.device, self.mount)
        self._follower = Follower(self.place / "log")
        self.ledger = self._follower.ledger
        self._flushes = 0
        self._covered = 0  # records, by these flushes
        self._process = work.start(self.mount, self.place)

    def look(self) -> None:
        self._follower.look()
        flushes = int(Path("/sys/block", self.device.name, "stat").read_text().split()[_FLUSHES])
        if flushes != self._flushes:
            self._flushes, self._covered = flushes, len(self.ledger.acknowledged)
        if self._process.poll() not in (None, 0):
            words = (self.place / "said").read_text().strip().splitlines()
            raise RuntimeError(f"the writer of {self.name} has ended: {words[-1:]}")

    @property
    def is_due(self) -> bool:
        """An outage may begin: there are records that are acknowledged, and that no flush of the
        device has covered, whether the writer or its file system asked for it."""
        return (
            not self.work.unflushed or len(self.ledger.acknowledged) - self._covered >= _UNFLUSHED
        )

    def goes_on(self, since: float) -> bool:
        """Whether it has done so for long enough since that moment."""
        back = [each for each in self.ledger.flushes if each > since]
        return bool(back) and self.ledger.acknowledged[-1] > back[0] + _AFTER_S

    def stop(self) -> None:
        (self.place / "stop").touch()

    @property
    def ended(self) -> bool:
        return self.ledger.ended

    def mounted_how(self) -> str:
        """read-write, or what else has become of it."""
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, place, _, options, *_ = line.split()
            if place == str(self.mount):
                return "read-only" if options.split(",")[0] == "ro" else "read-write"
        return "gone"


def lun_name(initiator: str, target: str, file_system: str) -> str:
    return f"{target}-{file_system}-{initiator}".lower()


class Outage:
    """``targets``: with the directories that their programs are in. ``database``: the directory
    of PostgreSQL's programs; "": numbered records are written instead."""

    def __init__(
        self,
        case: str,
        away_s: float,
        targets: dict[str, str],
        file_systems: Sequence[str],
        database: str,
    ) -> None:
        self._case = CASES[case]
        self._away_s = away_s
        if "xfs" in file_systems:
            run("modprobe", "xfs")
        self._network = Network()
        disks = Disks()
        may_come = [os.environ["LAB_INITIATOR"], OF_QEMU]
        self._arrays = []
        for number, (target, prefix) in enumerate(targets.items()):
            names = [
                lun_name(initiator, target, each)
                for each in file_systems
                for initiator in INITIATORS
            ]
            self._arrays.append(
                Array(self._network, disks, number, target, Path(prefix), names, LUN_MIB, may_come)
            )
        # They are made at the target, and whole: tgtd takes minutes for the WRITE SAME commands by
        # which the kernel's initiator would fill them with zeros.
        for array, file_system, initiator in itertools.product(
            self._arrays, file_systems, INITIATORS
        ):
            disk = array.device(lun_name(initiator, array.target, file_system))
            run(*_MKFS[file_system], disk)
        for array in self._arrays:
            array.start()
        self._work: Work = Records()
        self._program = "pgbench" if database else "records"
        if database:
            self._work = Database(Path(database), _RUN / "new")
        kinds = itertools.product(self._arrays, file_systems)
        self._subjects = [
            Subject(initiator, array, file_system, self._work, index)
            for index, (array, file_system) in enumerate(kinds)
            for initiator in INITIATORS
        ]

    def run(self) -> list[dict[str, Any]]:
        """An outage for each target and kind of file system: report.py has the form."""
        say("all write")
        self._wait(lambda: all(each.ledger.flushes for each in self._subjects), _START_S)
        begin = time.monotonic()
        self._wait(
            lambda: (
                time.monotonic() > begin + _BEFORE_S and all(each.is_due for each in self._subjects)
            ),
            _START_S,
        )
        cut = time.monotonic()
        say(f"{self._case.about}")
        self._begin()
        time.sleep(max(0.0, cut + self._away_s - time.monotonic()))
        self._end()
        back = time.monotonic()
        say(f"the target is back after {back - cut:.0f} s")
        if not self._wait(lambda: all(each.goes_on(back) for each in self._subjects), _BACK_S):
            say(f"not every file system goes on after {_BACK_S:.0f} s")
        for each in self._subjects:
            each.stop()
        self._wait(lambda: all(each.ended for each in self._subjects), _END_S)
        end = time.monotonic()
        states = {each.name: each.mounted_how() for each in self._subjects}
        self._network.cut()
        for array in self._arrays:
            array.stop()
            array.lose_cache()
        return [
            {
                "case": self._case.name,
                "file_system": file_system,
                "target": array.target,
                "program": self._program,
                "kernel": os.uname().release,
                "before_s": round(cut - begin, 3),
                "away_s": round(back - cut, 3),
                "after_s": round(end - back, 3),
                "subjects": [
                    self._judge(each, states[each.name], begin, cut, end)
                    for each in self._subjects
                    if each.array is array and each.file_system == file_system
                ],
            }
            for array, file_system in dict.fromkeys(
                (each.array, each.file_system) for each in self._subjects
            )
        ]

    def _begin(self) -> None:
        if self._case.cut:
            self._network.cut()
        for array in self._arrays:
            if self._case.down:
                array.stop()
            if self._case.lost:
                array.lose_cache()

    def _end(self) -> None:
        for array in self._arrays:
            if self._case.moved:
                array.move()
            if self._case.down:
                array.start()
        if self._case.cut:
            self._network.join()

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Whether it has come true in that time."""
        deadline = time.monotonic() + limit_s
        while True:
            for each in self._subjects:
                each.look()
            if condition():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_S)

    def _judge(
        self, subject: Subject, state: str, begin: float, cut: float, end: float
    ) -> dict[str, Any]:
        say(f"{subject.name}: looking at the target's disk")
        ledger = subject.ledger
        pause_s, went_on = ledger.pause(end)
        place = subject.place / "at-the-target"
        place.mkdir()
        whole = True
        try:
            device = subject.array.device(subject.name)
            run("mount", *_OF_TARGET[subject.file_system], device, place)
        except RuntimeError as error:
            say(f"{subject.name}: {error}")
            lost = missing(ledger, lambda _number: False)
            whole = False
        else:
            there, right = subject.work.looked_at(place, subject.place)
            lost = missing(ledger, there)
            run("umount", place)
            whole = self._whole(subject) and right
        return {
            "name": subject.initiator,
            "pause_s": round(pause_s, 3),
            "went_on": went_on,
            "failed": len(ledger.failed),
            "first_failed_s": round(ledger.failed[0][0] - cut, 3) if ledger.failed else None,
            "errors": sorted({os.strerror(number) for _, number in ledger.failed}),
            "state": "read-only" if ledger.read_only else state,
            "whole": whole,
            "acknowledged": len(ledger.acknowledged),
            "missing": asdict(lost),
            "rates": ledger.rates(begin, end, subject.work.unit),
        }

    def _whole(self, subject: Subject) -> bool:
        """Whether the file system has nothing to mend, with its journal replayed."""
        check = ["e2fsck", "-f", "-n"] if subject.file_system == "ext4" else ["xfs_repair", "-n"]
        try:
            run(*check, subject.array.device(subject.name))
        except RuntimeError as error:
            say(f"{subject.name}: {error}")
            return False
        return True


def main(wish: str) -> None:
    measured = Outage(**json.loads(wish)).run()
    (Path(os.environ["LAB_RESULTS"]) / "outage.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        say(str(error))
        sys.exit(1)
