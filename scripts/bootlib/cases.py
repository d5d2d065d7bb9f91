"""The cases, and the boots that they share.

Three LUNs, each in one of the ways that docs/units.md describes:

    data     iserblk-attach@data makes it /dev/nbd0, with ext4, which /etc/fstab mounts at /data
    archive  /etc/fstab mounts it as a file below /luns (mount.iserblk), and the ext4 in that file,
             by a loop device, at /archive
    files    iserblk-mount@files mounts it as a file below /files

A service in the guest writes records to each of them, one after the other, with an fsync for each,
and tells this machine the number of each record that is flushed (guest/records.py). The target
keeps in memory what was not flushed, and is killed before the LUNs are looked at: what is on them
then was flushed by the guest, all the way.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bootlib import say
from bootlib.agent import Failed
from bootlib.image import Disk
from bootlib.machine import Machine, NotBooted
from bootlib.storage import (
    LUN_SIZE,
    Ledger,
    Target,
    check_digest,
    check_records,
    content,
    whole_file_system,
)

NAMES = ("data", "archive", "files")
CASES = {
    "off-alive": "it shuts down with the target alive: nothing at all is lost",
    "mounted": "after a reboot every LUN is there again",
    "reloaded": "the device gets a new server, within what its unit confines",
    "suspended": "the target is suspended for two minutes: writes wait, and go on",
    "restarted": "the target is killed, and is back after two minutes, without its cache",
    "off-target-gone": "it shuts down with the target gone",
    "mounted-again": "after that every LUN is there again",
    "off-network-gone": "it shuts down with the network gone",
    "late": "it boots without the target; when that comes, the LUNs do",
    "off-late": "and it shuts down in order",
}

PATIENT_S = 180  # io-timeout for an absence of _ABSENCE_S, by docs/recovery.md; the default
_ENDLESS = "forever"  # the same for the last shutdown without the target
_ABSENCE_S = 120
# With the target away, requests fail within a minute, whatever io-timeout is (docs/recovery.md).
# The rest is for systemd, which takes half a minute under emulation. Its limits are its own.
_OFF_S = 120
_BACK_S = 90  # until writes go on, when the target is back
_UP_S = 600
_SET_UP_S = 600
_BOOTS = 3
_RECORDS_AT = 0
_LATE_AT = 32 << 20  # of the raw LUN, for what is written without a flush
_LATE = 2 << 20
_HERE = Path(__file__).resolve().parent / "guest"
_PLACE = "/usr/local/lib/records.py"
_WRITERS = {  # the path of the records, what must be there for it, and what it starts with
    "data": ("/data/records", "data.mount", "data.mount"),
    "archive": ("/archive/records", "archive.mount", "archive.mount"),
    "files": ("/files/lun2", "iserblk-mount@files.service", "files.mount"),
}
# How long the units may take to start: they have two minutes. Emulated, on a busy machine, Python
# alone takes half of that.
_START_S = 600
_SLOW = f"[Service]\nTimeoutStartSec={_START_S}\n"
_FSTAB = f"""\
/dev/nbd0  /data  ext4  _netdev,nofail,x-systemd.requires=iserblk-attach@data.service,\
x-systemd.wanted-by=dev-nbd0.device  0  0
{{archive}}  /luns  iserblk  _netdev,nofail,io-timeout={PATIENT_S}  0  0
/luns/lun1  /archive  ext4  loop,_netdev,nofail  0  0
"""
# The line of the type iserblk has been tried, and what starts behind all mounts has started.
_UP_WITHOUT_IT = """\
until systemctl -q is-failed luns.mount && systemctl -q is-active multi-user.target &&
  systemctl -q is-active remote-fs-pre.target && systemctl -q is-active remote-fs.target
do sleep 2; done
"""
_DAMAGE = re.compile("I/O error|EXT4-fs error|Remounting filesystem read-only|Aborting journal")
# What systemd says when it does not wait any longer for something of ours.
_OVERDUE = re.compile(r"(?:iserblk|records|data|luns|archive|files)\S*: .*(?:timed out|Killing )")


@dataclass(frozen=True)
class Outcome:
    """How a case ended. ``took_s``: of what the case is about, by itself."""

    name: str
    about: str
    passed: bool
    took_s: float
    text: str = ""


class Cases:
    """Runs the wanted cases. ``directory``: for the LUNs, the console and the logs."""

    def __init__(self, disk: Disk, directory: Path, kvm: bool, wanted: frozenset[str]) -> None:
        self.outcomes: list[Outcome] = []
        self._disk = disk
        self._directory = directory
        self._kvm = kvm
        self._wanted = wanted
        self._overlay = disk.overlay(directory / "overlay.qcow2")
        self._ledgers = {name: Ledger(directory / f"{name}.flushed") for name in NAMES}
        self._target = Target(directory, NAMES)

    def close(self) -> None:
        self._target.kill()

    def run(self) -> None:
        """Run them all, in their order. Later boots go on after a case that fails."""
        if not self._boot("set up", self._first_boot):
            return
        if self._wanted - {"off-alive", "late", "off-late"}:
            self._boot("after a reboot in order", self._second_boot)
        if self._wanted & {"mounted-again", "off-network-gone"}:
            self._boot("after the target had gone", self._third_boot)
        if self._wanted & {"late", "off-late"}:
            self._target.kill()
            self._boot("without the target", self._last_boot)

    # --- boots -----------------------------------------------------------------------------

    def _first_boot(self, machine: Machine) -> None:
        self._set_up(machine)
        self._go_on(machine)
        self._shut_down(machine, "off-alive", "reboot", orderly=True)

    def _second_boot(self, machine: Machine) -> None:
        with self._case("mounted"):
            self._everything_is_there(machine)
        if "reloaded" in self._wanted:
            with self._case("reloaded"):
                machine.agent.run("systemctl reload iserblk-attach@data", limit_s=_START_S)
                self._nothing_has_failed(machine)
        if "suspended" in self._wanted:
            with self._case("suspended"):
                self._target.suspend()
                time.sleep(_ABSENCE_S)
                self._target.resume()
                self._nothing_has_failed(machine)
        if "restarted" in self._wanted:
            with self._case("restarted"):
                self._target.kill()
                time.sleep(_ABSENCE_S)
                self._target.start()
                self._nothing_has_failed(machine)
        # At the next boot requests wait for ever, for another shutdown without the target.
        machine.agent.run(
            f"sed -i s/io-timeout={PATIENT_S}/io-timeout={_ENDLESS}/"
            " /etc/fstab /etc/iserblk/*.conf\nsync -f /etc/fstab"
        )
        self._target.kill()
        self._shut_down(machine, "off-target-gone", "poweroff")

    def _third_boot(self, machine: Machine) -> None:
        with self._case("mounted-again"):
            self._everything_is_there(machine)
        machine.unplug()
        self._shut_down(machine, "off-network-gone", "poweroff")

    def _last_boot(self, machine: Machine) -> None:
        run = machine.agent.run
        with self._case("late"):
            # What is tried again and again holds up neither other mounts nor what comes after them.
            run(_UP_WITHOUT_IT, limit_s=_UP_S)
            self._target.start()
            self._writers_go_on(("data", "files"), _UP_S)
            # mount(8) tries once, as with every other file system of the network.
            run("systemctl start luns.mount archive.mount", limit_s=_UP_S)
            self._everything_is_there(machine)
        self._shut_down(machine, "off-late", "poweroff", orderly=True)

    # --- parts of cases --------------------------------------------------------------------

    def _set_up(self, machine: Machine) -> None:
        run = machine.agent.run
        machine.agent.write(_PLACE, (_HERE / "records.py").read_text())
        for name, (path, needs, wanted_by) in _WRITERS.items():
            text = (_HERE / "records.service").read_text()
            words = {"name": name, "program": _PLACE, "path": path, "needs": needs}
            text = text.format(at=_RECORDS_AT, wanted_by=wanted_by, **words)
            machine.agent.write(f"/etc/systemd/system/records-{name}.service", text)
        for unit in ("iserblk-attach@", "iserblk-mount@"):
            place = f"/etc/systemd/system/{unit}.service.d"
            run(f"mkdir -p {place}")
            machine.agent.write(f"{place}/slow.conf", _SLOW)
        options = f"-o io-timeout={PATIENT_S}"
        for name, place in (("data", "--device /dev/nbd0"), ("files", "--mountpoint /files")):
            run(f"iserblk add {name} {self._target.url(name)} {place} {options}", limit_s=_SET_UP_S)
        run("mkdir -p /data /luns /archive /files\nsystemctl daemon-reload")
        run("iserblk enable data", limit_s=_SET_UP_S)
        run("iserblk enable files", limit_s=_SET_UP_S)
        run("mkfs.ext4 -q /dev/nbd0", limit_s=_SET_UP_S)
        fstab = _FSTAB.format(archive=self._target.url("archive"))
        run("cat >>/etc/fstab\nsystemctl daemon-reload", given=fstab)
        run("systemctl start luns.mount", limit_s=_SET_UP_S)
        run("mkfs.ext4 -q -F /luns/lun1", limit_s=_SET_UP_S)
        run("systemctl start data.mount archive.mount", limit_s=_SET_UP_S)
        units = " ".join(f"records-{name}.service" for name in NAMES)
        run(f"systemctl enable --now {units}", limit_s=_SET_UP_S)

    def _everything_is_there(self, machine: Machine) -> None:
        """Every unit has started, every file system is mounted for writing, and the writers go on
        behind the records that there were. Raises Failed."""
        state = machine.agent.run("systemctl is-system-running --wait || true", limit_s=_UP_S)
        if state.strip() != "running":
            failed = machine.agent.run("systemctl --failed --plain --no-legend || true")
            raise Failed(f"the system is {state.strip()}: {failed.strip()}")
        self._go_on(machine)

    def _nothing_has_failed(self, machine: Machine) -> None:
        """The target is back: the writers go on, none of them was started again, and the kernel has
        seen no error. Raises Failed."""
        self._go_on(machine)
        need_no_damage(machine.agent.run("dmesg"))
        for name in NAMES:
            restarts = machine.agent.run(
                f"systemctl show -P NRestarts -P ActiveState records-{name}.service"
            ).split()
            if restarts != ["0", "active"]:
                raise Failed(f"records-{name}.service: {restarts}")

    def _go_on(self, machine: Machine) -> None:
        self._writers_go_on(NAMES, _BACK_S)
        for place in ("/data", "/archive", "/luns", "/files"):
            machine.agent.run(f"findmnt --mountpoint {place} --options rw")

    def _writers_go_on(self, names: tuple[str, ...], limit_s: float) -> None:
        """Three records more are flushed of each, within the time. Raises Failed."""
        wanted = {name: self._ledgers[name].last() + 3 for name in names}
        deadline = time.monotonic() + limit_s
        while behind := [name for name in names if self._ledgers[name].last() < wanted[name]]:
            if time.monotonic() > deadline:
                raise Failed(f"{', '.join(behind)}: nothing is flushed for {limit_s:.0f} s")
            time.sleep(0.5)

    def _shut_down(self, machine: Machine, name: str, how: str, *, orderly: bool = False) -> None:
        """Shut the guest down with writers at work, wait for its end, and look at the LUNs.

        ``orderly``: the target is there, and so what was not flushed must be on it, too.
        """
        with self._case(name) as took:
            late = self._write_late(machine) if orderly else {}
            machine.agent.start(f"systemctl {how}")
            words = "reboot: Restarting system" if how == "reboot" else "reboot: Power down"
            took(machine.ended(_OFF_S, words))
            need_patience(machine.text())
            self._target.kill()
            self._check_luns(late)
        self._target.kill()
        self._target.start()

    def _write_late(self, machine: Machine) -> dict[str, str]:
        """Write to each LUN without a flush; returns the SHA-256 of what was written."""
        places = {
            "data": "of=/data/late",
            "archive": "of=/archive/late",
            "files": f"of=/files/lun2 seek={_LATE_AT} oflag=seek_bytes conv=notrunc",
        }
        said = {
            name: machine.agent.run(
                f"dd if=/dev/urandom of=/run/late bs=64k count={_LATE >> 16} status=none\n"
                f"dd if=/run/late bs=64k {words} status=none\nsha256sum </run/late"
            )
            for name, words in places.items()
        }
        return {name: text.split()[0] for name, text in said.items()}

    def _check_luns(self, late: dict[str, str]) -> None:
        """What was flushed is on the LUNs, and so is what ``late`` names. Raises Failed."""
        for name in NAMES:
            lun, last = self._target.file(name), self._ledgers[name].last()
            if name == "files":
                data = lun.read_bytes()
                assert len(data) == LUN_SIZE
                records, other = data[_RECORDS_AT:_LATE_AT], data[_LATE_AT : _LATE_AT + _LATE]
            else:
                copy = whole_file_system(lun, self._directory)
                records, other = content(copy, "records"), content(copy, "late")
                copy.unlink()
            check_records(name, records, last)
            if name in late:
                check_digest(name, other, late[name])

    # --- around them -----------------------------------------------------------------------

    def _boot(self, what: str, run: Callable[[Machine], None]) -> bool:
        """Boot a guest for ``run``. False: it has not booted, or something failed outside of its
        cases."""
        start = time.monotonic()
        for attempt in range(1, _BOOTS + 1):
            console = self._directory / "console"
            try:
                with Machine(self._disk, self._overlay, console, self._ports(), self._kvm) as guest:
                    say(f"{what}: booted after {guest.boot():.0f} s")
                    run(guest)
                    return True
            except NotBooted as hung:
                if attempt < _BOOTS:
                    say(f"{what}: {str(hung).partition(':')[0]}; starting another guest")
                    continue
                failure = str(hung)
            except Failed as error:
                failure = str(error)
            break
        self._add(Outcome("boot", what, False, time.monotonic() - start, failure))
        return False

    def _ports(self) -> list[tuple[str, Path]]:
        return [(f"records.{name}", ledger.file) for name, ledger in self._ledgers.items()]

    @contextmanager
    def _case(self, name: str) -> Iterator[Callable[[float], None]]:
        """A case: it has passed if the block raises nothing. The block may say how long it took;
        else that is the time of the block. The outcome of a case that is not wanted is dropped."""
        start = time.monotonic()
        times: list[float] = []
        text = ""
        try:
            yield times.append
        except Failed as error:
            text = str(error)
        took_s = times[0] if times else time.monotonic() - start
        if name in self._wanted:
            self._add(Outcome(name, CASES[name], not text, took_s, text))
        elif text:
            raise Failed(text)

    def _add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        how = "passed" if outcome.passed else f"FAILED: {outcome.text}"
        say(f"{outcome.name}: {how} ({outcome.took_s:.0f} s)")


def need_patience(console: str) -> None:
    """Raises Failed: systemd has given up something of ours."""
    if found := _OVERDUE.search(console):
        raise Failed(f"systemd has not waited: {found[0]}")


def need_no_damage(said: str) -> None:
    """Raises Failed: the kernel has seen a request fail, or has given up a file system."""
    if found := _DAMAGE.search(said):
        raise Failed(f"the kernel says `{found[0]}`")


def write_report(outcomes: list[Outcome], file: Path) -> None:
    """One JSON object a line."""
    file.write_text("".join(json.dumps(asdict(each)) + "\n" for each in outcomes))
