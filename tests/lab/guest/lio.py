"""LIO's target portal group, taken away from its initiators and given back."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import failing_disk
from tests.support.failing_disk import FailingDisk
from tests.support.programs import run

_WAIT_S = 60.0


def _group() -> Path:
    return Path(os.environ["LAB_TPG"])


def _portal() -> Path:
    return _group() / "np" / f"{os.environ['LAB_ADDRESS']}:{os.environ['LAB_PORT']}"


def disable(group: Path | None = None) -> None:
    """End all sessions, and stop listening."""
    ((group or _group()) / "enable").write_text("0")


def enable(group: Path | None = None) -> None:
    ((group or _group()) / "enable").write_text("1")


@contextmanager
def without_chap() -> Iterator[None]:
    """Logins need no secret."""
    wanted = {_group() / "attrib/authentication": "0", _group() / "param/AuthMethod": "CHAP,None"}
    before = {path: path.read_text().strip() for path in wanted}
    for path, value in wanted.items():
        path.write_text(value)
    yield
    for path, value in before.items():
        path.write_text(value)


@contextmanager
def connections(most: int) -> Iterator[None]:
    """A session may have so many."""
    limit = _group() / "param/MaxConnections"
    before = limit.read_text().strip()
    limit.write_text(str(most))
    try:
        yield
    finally:
        limit.write_text(before)


def remove_portal() -> None:
    """Stop listening on the portal. Sessions stay."""
    _portal().rmdir()


def add_portal() -> None:
    """Make the portal again, as the set-up made it."""
    if Path("/run/netns/lio").exists():
        run("nsenter", "--net=/run/netns/lio", "mkdir", _portal())
        (_portal() / "iser").write_text("1")
    else:
        _portal().mkdir()


def store() -> Path:
    """The configfs directory of the first LUN's storage object."""
    return _group().parents[2] / "core/fileio_0/disk0"


def reservation() -> str:
    """The holder of the first LUN's reservation, in LIO's words."""
    return (store() / "pr/res_holder").read_text()


class Groups:
    """The first LUN behind a second portal group, which speaks plain TCP, and is another target
    port group to ALUA. ``urls``, ``portals``: of both."""

    SECOND_PORT = 3261

    def __init__(self) -> None:
        first = _group()
        self._both = first, first.with_name("tpgt_2")
        self._states = store() / "alua/default_tg_pt_gp", store() / "alua/second"
        address, port = os.environ["LAB_ADDRESS"], os.environ["LAB_PORT"]
        self.portals = f"{address}:{port}", f"{address}:{self.SECOND_PORT}"
        url = os.environ["LAB_URL"]
        self.urls = url, url.replace(*self.portals, 1).replace("iser:", "iscsi:", 1)

    def make(self) -> None:
        group, states = self._both[1], self._states[1]
        lun = group / "lun/lun_0"
        states.mkdir()
        (states / "tg_pt_gp_id").write_text("2")
        lun.mkdir(parents=True)
        (lun / "disk0").symlink_to(store())
        (lun / "alua_tg_pt_gp").write_text("second")
        (group / "np" / self.portals[1]).mkdir()
        for name, value in (
            ("authentication", "0"),
            ("generate_node_acls", "1"),
            ("demo_mode_write_protect", "0"),
        ):
            (group / "attrib" / name).write_text(value)
        enable(group)

    def remove(self) -> None:
        group, lun = self._both[1], self._both[1] / "lun/lun_0"
        disable(group)
        (group / "np" / self.portals[1]).rmdir()
        (lun / "disk0").unlink()
        for path in (lun, group, self._states[1]):
            path.rmdir()

    def disable(self, number: int) -> None:
        disable(self._both[number])

    def enable(self, number: int) -> None:
        enable(self._both[number])

    def set_state(self, number: int, state: int) -> None:
        """Set the ALUA state of a group. ``state``: a number of SPC-4: 0 optimized, 1
        non-optimized, 2 standby, 3 unavailable."""
        (self._states[number] / "alua_access_state").write_text(str(state))

    def state(self, number: int) -> tuple[int, str]:
        """The ALUA state of a group, and what changed it last, in LIO's words."""
        where = self._states[number]
        state = int((where / "alua_access_state").read_text())
        return state, (where / "alua_access_status").read_text().strip()

    def set_type(self, kind: int) -> None:
        """How states may change: 1 implicitly, 2 by command, 3 both."""
        for each in self._states:
            (each / "alua_access_type").write_text(str(kind))


def _export(storage: Path, number: int) -> tuple[Path, Path]:
    """Make LUN ``number`` of a storage object, and let our initiator write to it. Returns both
    directories, for ``_withdraw``."""
    known = _group() / "acls" / os.environ["LAB_INITIATOR"]
    luns = _group() / f"lun/lun_{number}", known / f"lun_{number}"
    for lun, target in zip(luns, (storage, luns[0]), strict=True):
        lun.mkdir()
        (lun / "disk").symlink_to(target)
    (luns[1] / "write_protect").write_text("0")
    return luns


def _withdraw(luns: tuple[Path, Path]) -> None:
    for lun in reversed(luns):
        (lun / "disk").unlink()
        lun.rmdir()


class Growing:
    """Another LUN, number ``LUN``, of a loop device on a file that may grow."""

    LUN = 2

    def __init__(self, file: Path, size: int) -> None:
        self._file = file
        self.url = os.environ["LAB_URL"].removesuffix("0") + str(self.LUN)
        self._set(size)
        run("modprobe", "loop")
        run("modprobe", "target_core_iblock")
        self._device = run("losetup", "--find", "--show", file).strip()
        self._store = store().parents[1] / "iblock_0/growing"
        self._store.mkdir(parents=True)
        (self._store / "control").write_text(f"udev_path={self._device}")
        (self._store / "enable").write_text("1")
        # As targetcli gives each LUN one: what has none must not change its size.
        (self._store / "wwn/vpd_unit_serial").write_text("7d1b8a52-growing")
        self._luns = _export(self._store, self.LUN)

    def _set(self, size: int) -> None:
        with self._file.open("ab") as file:
            file.truncate(size)

    def grow(self, size: int) -> None:
        self._set(size)
        run("losetup", "--set-capacity", self._device)

    def remove(self) -> None:
        _withdraw(self._luns)
        self._store.rmdir()
        self._store.parent.rmdir()
        run("losetup", "--detach", self._device)


class Failing:
    """Another LUN, number ``LUN``, with the kernel's page cache as LIO's write cache, and a device
    below, ``disk``, that takes no more than ``ROOM`` bytes: what is written beyond is lost when it
    is written back. ``block``: bytes."""

    LUN = 4
    ROOM = 1 << 20

    def __init__(self, place: Path, block: int = 512) -> None:
        self.url = os.environ["LAB_URL"].removesuffix("0") + str(self.LUN)
        run("modprobe", "loop")
        self.disk = FailingDisk(place, self.ROOM, block)
        self._store = store().parents[1] / "fileio_8/failing"
        self._store.mkdir(parents=True)
        size = f"fd_dev_size={failing_disk.SIZE}"
        for word in (f"fd_dev_name={self.disk.device}", size, "fd_buffered_io=1"):
            (self._store / "control").write_text(word)
        (self._store / "enable").write_text("1")
        (self._store / "attrib/emulate_write_cache").write_text("1")
        (self._store / "wwn/vpd_unit_serial").write_text("lab-failing")
        self._luns = _export(self._store, self.LUN)

    def remove(self) -> None:
        _withdraw(self._luns)
        self._store.rmdir()
        self._store.parent.rmdir()
        self.disk.remove()


class Persistent:
    """Another LUN, number ``LUN``, which can be removed and made again with the reservations that
    LIO has saved, as happens when LIO is started again."""

    LUN = 3
    SERIAL = "lab-persistent"

    def __init__(self, file: Path, size: int) -> None:
        self._file = file
        self._size = size
        with file.open("ab") as content:
            content.truncate(size)
        self.url = os.environ["LAB_URL"].removesuffix("0") + str(self.LUN)
        self._store = store().parents[1] / "fileio_9/persistent"
        self._make([])

    def _make(self, saved: list[str]) -> None:
        self._store.mkdir(parents=True)
        (self._store / "control").write_text(f"fd_dev_name={self._file},fd_dev_size={self._size}")
        (self._store / "enable").write_text("1")
        (self._store / "wwn/vpd_unit_serial").write_text(self.SERIAL)
        for registration in saved:  # LIO takes them as long as nothing exports the device
            (self._store / "pr/res_aptpl_metadata").write_text(registration)
        self._luns = _export(self._store, self.LUN)

    def holder(self) -> str:
        """The holder of the reservation, in LIO's words."""
        return (self._store / "pr/res_holder").read_text()

    def restart(self) -> str:
        """Returns what LIO has saved."""
        root = Path("/sys/kernel/config/target/dbroot").read_text().strip()
        saved = (Path(root) / "pr" / f"aptpl_{self.SERIAL}").read_text()
        disable()
        self._unmake()
        self._make(
            [
                ",".join(line for line in each.split("\n")[1:] if line)
                for each in re.split("PR_REG_END: [0-9]+\n", saved)
                if each.strip()
            ]
        )
        enable()
        return saved

    def _unmake(self) -> None:
        _withdraw(self._luns)
        self._store.rmdir()

    def remove(self) -> None:
        self._unmake()
        self._store.parent.rmdir()


def rdma_objects() -> dict[str, int]:
    """Numbers of RDMA objects on the device.

    Connection ids are counted only if a process has them: LIO keeps the id of each request that it
    refused because its portal had just been made (seen with ``rdma resource show cm_id``: one for
    each "refused by the target"). Contexts and completion queues are not counted: one and two of
    them stayed when the first connection had ended, and no more after later ones. Most likely they
    are librdmacm's and the kernel's; that was not traced."""
    device = os.environ["LAB_DEVICE"]
    words = run("rdma", "resource", "show", device).split(":", 2)[2].split()
    counts = dict(zip(words[::2], map(int, words[1::2]), strict=True))
    ids = run("rdma", "resource", "show", "cm_id", "link", device).splitlines()
    counts["cm_id"] = sum(" pid " in line for line in ids)
    return {name: counts[name] for name in ("pd", "qp", "cm_id", "mr")}


def settled(
    expected: dict[str, int], count: Callable[[], dict[str, int]] = rdma_objects
) -> dict[str, int]:
    """The counted numbers, once they are as ``expected`` or the time limit has passed."""
    deadline = time.monotonic() + _WAIT_S
    while (found := count()) != expected and time.monotonic() < deadline:
        time.sleep(0.2)
    return found
