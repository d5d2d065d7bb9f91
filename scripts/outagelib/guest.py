"""The outage, in the lab's guest.

    python -P -m outagelib.guest CASE FILE-SYSTEM AWAY_S TARGET PREFIX

Each initiator has a file system on a LUN of its own, with a writer (writer.py); all have the same
outage at the same time. It begins when every writer has records that are acknowledged and not
flushed. Afterwards the writers flush and end, the network is cut, the disks lose what is in their
cache, and the file systems are looked at on the target's disks: what is there then was flushed all
the way. The guest is thrown away behind that, with what hangs in it.

Writes $LAB_RESULTS/outage.json: report.py has the form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from outagelib import say, writer
from outagelib.array import Array
from outagelib.cases import CASES, Case
from outagelib.initiators import INITIATORS, OF_QEMU
from outagelib.ledger import Follower, in_file, missing
from outagelib.programs import run

LUN_MIB = 640
_BEFORE_S = 30.0
_AFTER_S = 30.0
# Records of each writer, at least, that no flush has covered when the outage begins. It is a second
# of writing: file systems flush every five seconds by themselves.
_UNFLUSHED = 4
_START_S = 600.0
_BACK_S = 300.0  # how long a writer may need, when the target is back
_END_S = 60.0
_LOOK_S = 0.02
_FLUSHES = 15  # flush I/Os, in a block device's stat
_RUN = Path("/run/outage")
_MKFS = {"ext4": ("mkfs.ext4", "-q", "-F"), "xfs": ("mkfs.xfs", "-q", "-f")}
_OF_TARGET = {"ext4": (), "xfs": ("-o", "nouuid")}  # the initiator's mount is still there


class Subject:
    """One initiator, with its device, file system and writer."""

    def __init__(self, name: str, lun: int, file_system: str) -> None:
        self.name = name
        self.place = _RUN / name
        self.place.mkdir(parents=True)
        self.mount = self.place / "files"
        self.mount.mkdir()
        say(f"{name}: attaching")
        self.device = INITIATORS[name](name, lun)
        run(*_MKFS[file_system], self.device)
        run("mount", self.device, self.mount)
        self._log = self.place / "log"
        self._follower = Follower(self._log)
        self.ledger = self._follower.ledger
        self._flushes = 0
        self._covered = 0  # records, by these flushes
        with (self.place / "said").open("wb") as said:
            self._writer = subprocess.Popen(
                [sys.executable, "-I", writer.__file__,
                 self.mount / "records", self._log, self.place / "stop"],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip

    def look(self) -> None:
        self._follower.look()
        flushes = int(Path("/sys/block", self.device.name, "stat").read_text().split()[_FLUSHES])
        if flushes != self._flushes:
            self._flushes, self._covered = flushes, len(self.ledger.acknowledged)
        if self._writer.poll() not in (None, 0):
            words = (self.place / "said").read_text().strip().splitlines()
            raise RuntimeError(f"the writer of {self.name} has ended: {words[-1:]}")

    @property
    def unflushed(self) -> int:
        """Records that are acknowledged, and that no flush of the device has covered, whether the
        writer or its file system asked for it."""
        return len(self.ledger.acknowledged) - self._covered

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


class Outage:
    def __init__(
        self, case: Case, file_system: str, away_s: float, target: str, prefix: Path
    ) -> None:
        self._case = case
        self._file_system = file_system
        self._away_s = away_s
        ours = os.environ["LAB_INITIATOR"]
        self._target = target
        self._array = Array(target, prefix, [*INITIATORS], LUN_MIB, [ours, OF_QEMU])
        self._array.start()
        lun = self._array.lun
        self._subjects = [Subject(name, lun, file_system) for name in INITIATORS]

    def run(self) -> dict[str, Any]:
        say("all write")
        self._wait(lambda: all(each.ledger.flushes for each in self._subjects), _START_S)
        begin = time.monotonic()
        self._wait(
            lambda: (
                time.monotonic() > begin + _BEFORE_S
                and all(each.unflushed >= _UNFLUSHED for each in self._subjects)
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
        self._array.cut()
        self._array.stop()
        self._array.lose_cache()
        return {
            "case": self._case.name,
            "file_system": self._file_system,
            "target": self._target,
            "kernel": os.uname().release,
            "before_s": round(cut - begin, 3),
            "away_s": round(back - cut, 3),
            "after_s": round(end - back, 3),
            "subjects": [
                self._judge(each, states[each.name], begin, cut, end) for each in self._subjects
            ],
        }

    def _begin(self) -> None:
        if self._case.cut:
            self._array.cut()
        if self._case.down:
            self._array.stop()
        if self._case.lost:
            self._array.lose_cache()

    def _end(self) -> None:
        if self._case.moved:
            self._array.move()
        if self._case.down:
            self._array.start()
        if self._case.cut:
            self._array.join()

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
            run("mount", *_OF_TARGET[self._file_system], self._array.device(subject.name), place)
        except RuntimeError as error:
            say(f"{subject.name}: {error}")
            lost = missing(ledger, lambda _number: False)
            whole = False
        else:
            file = place / "records"
            lost = missing(ledger, in_file(file) if file.exists() else lambda _number: False)
            run("umount", place)
            whole = self._whole(subject.name)
        return {
            "name": subject.name,
            "pause_s": round(pause_s, 3),
            "went_on": went_on,
            "failed": len(ledger.failed),
            "first_failed_s": round(ledger.failed[0][0] - cut, 3) if ledger.failed else None,
            "errors": sorted({os.strerror(number) for _, number in ledger.failed}),
            "state": "read-only" if ledger.read_only else state,
            "whole": whole,
            "acknowledged": len(ledger.acknowledged),
            "missing": asdict(lost),
            "rates": ledger.rates(begin, end),
        }

    def _whole(self, name: str) -> bool:
        """Whether the file system has nothing to mend, with its journal replayed."""
        device = self._array.device(name)
        check = ["e2fsck", "-f", "-n"] if self._file_system == "ext4" else ["xfs_repair", "-n"]
        try:
            run(*check, device)
        except RuntimeError as error:
            say(f"{name}: {error}")
            return False
        return True


def main(case: str, file_system: str, away_s: str, target: str, prefix: str) -> None:
    if file_system == "xfs":
        run("modprobe", "xfs")
    measured = Outage(CASES[case], file_system, float(away_s), target, Path(prefix)).run()
    (Path(os.environ["LAB_RESULTS"]) / "outage.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        say(str(error))
        sys.exit(1)
