"""In the lab's guest: LIO's target as the set-up has made it, with a LUN for each subject, and a
portal for TCP beside that of iSER.

LIO, because it is the one target that speaks both to both initiators in one guest: tgtd's iSER and
its TCP want the same port. It is in the kernel, so its own part of a request is small, and what
initiators differ by is not lost in it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SIZE = 96 << 20  # bytes of a LUN
TCP_PORT = 3261
_FIRST = 2  # LUNs 0 and 1 are the set-up's
_PLACE = Path("/run/lab-luns")  # in the guest's memory, made by the set-up
_CHUNK = 1 << 20


def iqn() -> str:
    return _group().parent.name


def url(transport: str, number: int) -> str:
    """Of the LUN of subject ``number``; ``transport``: iscsi or iser."""
    return f"{transport}://{portal(transport)}/{iqn()}/{lun(number)}"


def portal(transport: str) -> str:
    port = TCP_PORT if transport == "iscsi" else os.environ["LAB_PORT"]
    return f"{os.environ['LAB_ADDRESS']}:{port}"


def lun(number: int) -> int:
    return _FIRST + number


def make(count: int) -> None:
    """Make ``count`` LUNs, full of data (holes are quicker to read), with a write cache."""
    group = _group()
    (group / "np" / portal("iscsi")).mkdir()
    known = group / "acls" / os.environ["LAB_INITIATOR"]
    for number in range(count):
        file = _PLACE / f"bench{number}"
        with file.open("wb") as data:
            for _ in range(SIZE // _CHUNK):
                data.write(os.urandom(_CHUNK))
        store = group.parents[2] / f"core/fileio_{lun(number)}/bench{number}"
        store.mkdir(parents=True)
        # With fd_buffered_io LIO has a volatile write cache, and does not wait for each write.
        control = f"fd_dev_name={file},fd_dev_size={SIZE},fd_buffered_io=1"
        (store / "control").write_text(control)
        (store / "enable").write_text("1")
        (store / "wwn/vpd_unit_serial").write_text(f"bench-{number}")
        exported = group / f"lun/lun_{lun(number)}"
        exported.mkdir()
        (exported / "disk").symlink_to(store)
        mapped = known / f"lun_{lun(number)}"
        mapped.mkdir()
        (mapped / "disk").symlink_to(exported)
        (mapped / "write_protect").write_text("0")


def log_in(interface: str, transport: str) -> None:
    """Log in with the kernel's initiator. ``interface``: that of iscsiadm."""
    node = ["iscsiadm", "-m", "node", "-T", iqn(), "-p", portal(transport)]
    for words in (["-o", "new", "-I", interface], ["-I", interface, "--login"]):
        subprocess.run([*node, *words], check=True, stdout=subprocess.DEVNULL)


def _group() -> Path:
    return Path(os.environ["LAB_TPG"])
