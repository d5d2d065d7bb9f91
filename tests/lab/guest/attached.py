"""Shared by tests of /dev/nbdX: commands, and checks of what is left when they are done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from iserblk.nbd.kernel.orders import PROGRAM
from tests.cli.commands import good, iserblk
from tests.support.programs import run
from tests.support.target import TargetProcess

MIB = 1 << 20
DEVICE = Path("/dev/nbd0")
RUN = Path("/run/iserblk")


def block(name: str, attribute: str) -> str:
    """An attribute of the block device from sysfs; "" when it does not exist."""
    try:
        return Path("/sys/block", name, attribute).read_text().strip()
    except OSError:
        return ""


def connected() -> list[str]:
    return sorted(path.parent.name for path in Path("/sys/block").glob("nbd*/pid"))


def servers() -> list[str]:
    """The command lines of all servers of devices."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[0].endswith("nbdkit") or PROGRAM in words:
            found.append(" ".join(words))
    return found


def nothing_left() -> None:
    assert connected() == []
    assert servers() == []
    assert [path.name for path in RUN.glob("*") if path.is_dir()] == []


@contextmanager
def attached(*arguments: object) -> Iterator[Path]:
    """Attach, by default on the first free device; detach at the end."""
    ready, _, path = good("attach", *arguments).strip().partition(" ")
    assert ready == "ready"
    try:
        yield Path(path)
    except BaseException:
        iserblk("detach", path)
        raise
    assert good("detach", path) == ""


@contextmanager
def mounted(source: object, place: Path, *words: str) -> Iterator[Path]:
    place.mkdir(exist_ok=True)
    run("mount", *words, source, place)
    try:
        yield place
    finally:
        run("umount", place)


class Mortal:
    """A target that is killed and started again, on the same port."""

    def __init__(self, folder: Path) -> None:
        self._specs = [f"{folder}/lun:size=64M"]
        self._log = folder / "log"
        self._process = TargetProcess(self._specs, self._log)
        self._listen = self._process.listen
        self.url = f"{self._process.url}/0"

    def kill(self) -> None:
        self._process.kill()

    def start(self) -> None:
        self._process = TargetProcess(self._specs, self._log, self._listen)

    def end(self) -> None:
        if self._process.process.poll() is None:
            self._process.stop()
