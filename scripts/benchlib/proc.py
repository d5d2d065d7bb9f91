"""Reads /proc and /sys: descendants of processes, CPU time, memory, listening sockets; the CPU time
of the whole machine, and what a disk has done."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SECTOR = 512  # in a disk's stat, whatever its blocks are (Documentation/block/stat.rst)
_LISTEN = "0A"
_RESET_PEAK_RSS = "5"  # proc(5), clear_refs


class NoSuchProcess(Exception):
    """The process has ended."""


def family(pid: int) -> list[int]:
    """``pid`` and all its living descendants."""
    found = [pid]
    for parent in found:  # grows during the loop
        with suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def lives_in(session: int, pid: int) -> bool:
    """Whether the process lives, and is in ``session``: its pid may have been reused."""
    try:
        state, _ppid, _pgrp, its_session = _stat_fields(_read(pid, "stat"))[:4]
    except NoSuchProcess:
        return False
    return state not in "ZX" and int(its_session) == session


def parse_cpu_seconds(stat: str) -> float:
    """User and system time of all threads, ended ones included, from the text of PID/stat."""
    utime, stime = map(int, _stat_fields(stat)[11:13])
    return (utime + stime) / TICKS_PER_S


def cpu_seconds(pids: Iterable[int]) -> float:
    """CPU time of all the processes together. Raises NoSuchProcess."""
    return sum(parse_cpu_seconds(_read(pid, "stat")) for pid in pids)


def parse_busy_seconds(stat: str, now: float) -> float:
    """Processor time of the whole machine, the kernel's threads and interrupts included, until the
    monotonic time ``now``, from the text of /proc/stat. Only differences say something.

    It is all that is neither idle nor waiting for a disk. These two the kernel measures; what the
    processors did it counts by ticks, of which an emulated guest on a busy machine misses most.
    """
    lines = [line.split() for line in stat.splitlines()]
    cpus = sum(line[0].startswith("cpu") for line in lines if line) - 1  # the first line is the sum
    idle, iowait = map(int, lines[0][4:6])
    return now * cpus - (idle + iowait) / TICKS_PER_S


def busy_seconds() -> float:
    return parse_busy_seconds(Path("/proc/stat").read_text(encoding="ascii"), time.monotonic())


def parse_disk_bytes(stat: str, *, writes: bool) -> int:
    """Bytes that a disk has read, or written, from the text of /sys/block/NAME/stat."""
    return int(stat.split()[6 if writes else 2]) * _SECTOR


def disk_bytes(name: str, *, writes: bool) -> int:
    """The same of the disk /dev/NAME."""
    return parse_disk_bytes(Path("/sys/block", name, "stat").read_text(), writes=writes)


def parse_peak_rss(status: str) -> int:
    """VmHWM in bytes, from the text of PID/status."""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024  # always in kB
    raise NoSuchProcess  # a zombie has no memory


def peak_rss(pids: Iterable[int]) -> int:
    """Sum of the peaks in bytes since ``reset_peak_rss``. Raises NoSuchProcess."""
    return sum(parse_peak_rss(_read(pid, "status")) for pid in pids)


def parse_pss(smaps: str) -> int:
    """Pss in bytes, from the text of PID/smaps_rollup: a page that several processes share counts
    for each in part."""
    for line in smaps.splitlines():
        name, _, value = line.partition(":")
        if name == "Pss":
            return int(value.split()[0]) * 1024  # always in kB
    raise NoSuchProcess  # a zombie has no memory


def pss(pids: Iterable[int]) -> int:
    """Sum of the present sizes in bytes. Raises NoSuchProcess."""
    return sum(parse_pss(_read(pid, "smaps_rollup")) for pid in pids)


def reset_peak_rss(pids: Iterable[int]) -> None:
    """Make the peaks count again, from the current resident size on."""
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            Path(f"/proc/{pid}/clear_refs").write_text(_RESET_PEAK_RSS, encoding="ascii")


def parse_listeners(table: str) -> dict[str, tuple[str, int]]:
    """Socket inode → (IPv4 address, port), of the listening sockets in /proc/net/tcp's text."""
    found = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN:
            address, port = fields[1].split(":")
            host = socket.inet_ntoa(struct.pack("=I", int(address, 16)))
            found[fields[9]] = (host, int(port, 16))
    return found


def listening(pid: int) -> set[tuple[str, int]]:
    """The IPv4 (address, port) pairs that the process listens on."""
    found = set()
    with suppress(FileNotFoundError):
        # The sockets of the network namespace that the process is in.
        listeners = parse_listeners(Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii"))
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                kind, _, inode = os.readlink(entry).partition(":")
                if kind == "socket" and inode.strip("[]") in listeners:
                    found.add(listeners[inode.strip("[]")])
    return found


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free just now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _stat_fields(stat: str) -> list[str]:
    """The fields after the name, from the state on. The name may hold any text, even ")"
    (proc(5))."""
    return stat[stat.rindex(")") + 2 :].split()


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        raise NoSuchProcess(pid) from None
