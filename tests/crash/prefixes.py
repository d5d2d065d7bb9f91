"""Plays a workload on a file system on a LUN that records, makes the disks that a power failure
could have left at any moment of it, and checks them.

Each of these disks is mounted, as after a power failure; all that was durable is there, with its
content; and the file system's own check finds nothing.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from tests.crash.recording import Journal
from tests.crash.states import Medium, Record, read_record
from tests.crash.workloads import (
    Check,
    Lost,
    Play,
    Versions,
    check_files,
    check_sqlite,
    play_files,
    play_sqlite,
    play_sqlite_rollback,
)
from tests.support.fuse import loop_mount
from tests.support.nbdkit import need, run
from tests.support.target import running_target
from tests.support.until import until_blocking

MIB = 1 << 20


class FileSystem(NamedTuple):
    """``size``: MiB, not much more than its mkfs takes. ``piece``: bytes, aligned, that have to be
    written whole or not at all. ``options``: of its mounts."""

    size: int
    piece: int
    mkfs: Sequence[str]
    fsck: Sequence[str]
    options: Sequence[str] = ()


FILE_SYSTEMS = {
    "ext4": FileSystem(
        24, 4096, ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0"], ["e2fsck", "-f", "-n"]
    ),
    "xfs": FileSystem(300, 512, ["mkfs.xfs", "-q", "-f"], ["xfs_repair", "-n", "-f"]),
    "btrfs": FileSystem(128, 4096, ["mkfs.btrfs", "-q", "-f"], ["btrfs", "check", "--readonly"]),
}
WORKLOADS: dict[str, tuple[Play, Check]] = {
    "files": (play_files, check_files),
    "sqlite": (play_sqlite, check_sqlite),
    "sqlite-rollback": (play_sqlite_rollback, check_sqlite),
}


class Recorded(NamedTuple):
    kind: str
    journal: Path
    record: Record
    directory: Path
    check: Check
    block: int


Through = Callable[[str, Path], AbstractContextManager[Path]]


def play(
    directory: Path,
    kind: str,
    workload: str,
    steps: int,
    through: Through,
    block: int = 512,
    fault: str = "",
) -> Recorded:
    """Run a workload on a file system of ``kind``, on a LUN that records. ``through``: makes of the
    LUN's URL, in a directory, a file or a device with the file system's content."""
    system = FILE_SYSTEMS[kind]
    need(system.mkfs[0], system.fsck[0])
    program, check = WORKLOADS[workload]
    journal = directory / "journal"
    notes = Journal(journal)
    specs = [f"{directory}/lun:size={system.size}M:block={block}"]
    environment = {"RECORD": f"{journal}:{fault}" if fault else str(journal)}
    log = directory / "target.log"
    with (
        running_target(specs, log, environment=environment) as target,
        through(target.url, directory) as lun,
    ):
        run(*system.mkfs, lun)
        with loop_mount(lun, directory / "inside", *system.options) as inside:
            program(inside, notes, steps)
    notes.close()
    return Recorded(kind, journal, read_record(journal), directory, check, block)


def moments(record: Record, between: int, chance: random.Random) -> list[int]:
    """Lines at which the power may fail: each at which a flush begins or has ended, with
    ``between`` others."""
    begin = record.begin()
    found = {line + after for line in record.flushes for after in (0, 1) if line > begin}
    found |= {chance.randrange(begin, record.lines) for _ in range(between)}
    return sorted(found)


def check_state(recorded: Recorded, image: Path, versions: Versions) -> None:
    """Mount the disk, look for all that is durable, unmount it, and have it checked. Raises
    Lost."""
    system = FILE_SYSTEMS[recorded.kind]
    inside = recorded.directory / "after"
    inside.mkdir(exist_ok=True)
    mount = ["mount", "-o", ",".join(("loop", *system.options)), str(image), str(inside)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Lost(f"it cannot be mounted: {done.stderr}")
    try:
        recorded.check(inside, versions)
    except OSError as error:
        raise Lost(f"{error.filename}: {error.strerror}") from error
    finally:
        run("umount", inside)
        until_blocking(lambda: not run("losetup", "--associated", image))
    done = subprocess.run([*system.fsck, str(image)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Lost(f"{system.fsck[0]}: {done.stdout[-1000:]}{done.stderr[-1000:]}")
    if recorded.kind == "btrfs":  # the next disk has the same names
        run("btrfs", "device", "scan", "--forget")


def check_all(recorded: Recorded, lines: Sequence[int], samples: int, chance: random.Random) -> int:
    """Check the states at these lines. Returns how many there were. Raises Lost, with the state."""
    system = FILE_SYSTEMS[recorded.kind]
    piece = max(recorded.block, system.piece)
    base = recorded.directory / "base"
    medium = Medium(recorded.record, recorded.journal, base, system.size * MIB)
    image = recorded.directory / "image"
    count = 0
    try:
        for line in lines:
            versions = Versions(each for each in recorded.record.notes if each.line < line)
            for state in medium.states(line, chance, samples, piece):
                state.write(image)
                try:
                    check_state(recorded, image, versions)
                except Lost as error:
                    raise Lost(f"{state}: {error}") from error
                count += 1
    finally:
        medium.close()
    return count


def some(lines: Sequence[int], count: int) -> list[int]:
    """So many of them, evenly, the last one included."""
    step = max(1, len(lines) // count)
    return list(lines[::-step][::-1])
