"""The files that iserblk writes and reads again, cut at each byte of each write, and left between
any two steps: their reader finds the old content or the new one, or says in one line what is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from iserblk.csi.volumes import Records, Volume
from iserblk.disk.seam import LossCount
from iserblk.disk.wish import Wish
from iserblk.errors import IserblkError
from iserblk.metrics import records
from iserblk.metrics.records import Recorded, RecordedLun, running
from iserblk.named import files as named
from iserblk.named.files import Named
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.owed import Owed
from iserblk.nbd.kernel.state import Home, State, write_pid
from iserblk.pidfile import Pidfile, read_pid
from iserblk.secret import Secret
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.store.lunfile import open_file
from iserblk.target.store.statefile import MODES_SUFFIX, SUFFIX, StateFile
from tests.crash.steps import Steps, Tree
from tests.target.fake_store import FakeStore

Step = Callable[[Path], object]
URL = "iser://192.0.2.1/iqn.2026-11.example:disk/0"
SAVED = [
    json.dumps(
        {
            "version": 1,
            "type": 7,
            "holder": None,
            "registrations": [
                {"initiator": "iqn.2026-11.example:host", "isid": "800000000001", "port": port,
                 "key": "0x8"}
                for port in range(count)
            ],
        }
    ).encode()
    for count in (1, 3)
]  # fmt: skip


class Subject(NamedTuple):
    """``old`` makes what is there before; ``new`` changes it, which is recorded; ``read`` reads it,
    as the next start does. ``durable``: it has to outlive a failure of the power (what is in /run
    does not). ``mixed``: parts of what is read may be old, and others new. ``refusal``: of
    ``read``, in one line."""

    old: Step
    new: Step
    read: Callable[[Path], Any]
    durable: bool = False
    mixed: bool = False
    refusal: str = ""


def _nothing(_directory: Path) -> None:
    pass


def _save_state(content: bytes | None, suffix: str = SUFFIX) -> Step:
    def save(directory: Path) -> None:
        state = StateFile.beside(str(directory / "lun"), suffix)
        state.load()
        step = state.to_save(content)
        assert step is not None
        step()

    return save


def _unit(directory: Path) -> LogicalUnit:
    return LogicalUnit(
        FakeStore(1 << 20),
        serial="S",
        state=StateFile.beside(str(directory / "lun")),
        modes=StateFile.beside(str(directory / "lun"), MODES_SUFFIX),
    )


def _reservations(directory: Path) -> bytes | None:
    return _unit(directory).reservations.snapshot()


def _write_cache(directory: Path) -> bool:
    return _unit(directory).saved_write_cache


def _named(number: int, secret: str = "", *, replace: bool = True) -> Step:
    def save(directory: Path) -> None:
        chap = named.secret_path("disk")
        words = (f"io-timeout={number}", *((f"chap-secret-file={chap}",) if secret else ()))
        lines = [Secret(f"host:{secret}")] if secret else []
        named.save(Named("disk", (URL,), words=words), lines, replace=replace)

    return save


def _delete_named(_directory: Path) -> None:
    named.delete(named.load("disk"))


def _read_named(directory: Path) -> tuple[str | None, str | None]:
    assert named.misnamed() == []
    chap = directory / "disk.chap"
    secret = chap.read_text() if chap.exists() else None
    return (named.load("disk").text() if named.names() else None), secret


def _use(count: int) -> Step:
    def use(directory: Path) -> None:
        Recorded("mount", "/mnt").use(
            [RecordedLun(f"{URL}{number}", 4096, True) for number in range(count)]
        )

    return use


def _running(directory: Path) -> list[int]:
    return [len(each.record.luns) for each in running()]


VOLUME = Volume("v", (URL,), {"io-timeout": "60"}, "/staging", "mount", "ext4")


def _volume(**changes: Any) -> Step:
    def put(directory: Path) -> None:
        Records(directory).put(dataclasses.replace(VOLUME, **changes))

    return put


def _volume_secret(lines: str) -> Step:
    return lambda directory: Records(directory).put_secret(VOLUME, lines)


def _read_secret(directory: Path) -> str | None:
    path = Records(directory).secret(VOLUME)
    return path.read_text() if path.exists() else None


def _owe(losses: int, told: int) -> Step:
    return lambda directory: Owed(directory / "owed").write(LossCount(losses, told))


def _home(directory: Path) -> Home:
    return Home(Device("nbd0", Directories(run=directory)))


def _state(**changes: Any) -> Step:
    def change(directory: Path) -> None:
        _home(directory).directory.mkdir(exist_ok=True)
        _home(directory).change(State(**{"url": URL, "io_timeout": 30.0, "changed": 1, **changes}))

    return change


def _udev(serial: str) -> Step:
    def tell(directory: Path) -> None:
        _home(directory).directory.mkdir(exist_ok=True)
        _home(directory).tell_udev({"ID_ISERBLK": serial, "ID_WWN": "0x6001"})

    return tell


def _read_udev(directory: Path) -> str | None:
    path = directory / "nbd0" / "udev"
    return path.read_text() if path.exists() else None


def _pidfile(directory: Path) -> None:
    pidfile = Pidfile(str(directory / "pid"))
    pidfile.__enter__()
    pidfile.write()


def _leave(count: int | None) -> Step:
    return lambda directory: Wish(directory / "ending").leave(count)


def _lun_file(directory: Path) -> None:
    open_file(str(directory / "lun"), size=1 << 16).close()


def _read_lun_file(directory: Path) -> int:
    with closing(open_file(str(directory / "lun"), size=1 << 16)) as store:
        return store.size


def _read_lun_file_without_size(directory: Path) -> int:
    with closing(open_file(str(directory / "lun"))) as store:
        return store.size


SUBJECTS = {
    "reservations, first": Subject(_nothing, _save_state(SAVED[0]), _reservations, True),
    "reservations, others": Subject(_save_state(SAVED[0]), _save_state(SAVED[1]), _reservations,
                                    True),
    "reservations, none": Subject(_save_state(SAVED[1]), _save_state(None), _reservations, True),
    "mode parameters": Subject(_save_state(b"wce=1\n", MODES_SUFFIX),
                               _save_state(b"wce=0\n", MODES_SUFFIX), _write_cache, True),
    "named LUN, first": Subject(_nothing, _named(1, replace=False), _read_named, True),
    "named LUN, another": Subject(_named(1), _named(2), _read_named, True),
    "named LUN with a secret, first": Subject(
        _nothing, _named(1, "hush-hush-hush", replace=False), _read_named, True, True
    ),
    "named LUN with another secret": Subject(
        _named(1, "hush-hush-hush"), _named(2, "another-secret"), _read_named, True, True
    ),
    "named LUN, removed": Subject(_named(1, "hush-hush-hush"), _delete_named, _read_named, True,
                                  True),
    "record of a process": Subject(_use(1), _use(3), _running),
    "record of a volume, first": Subject(_nothing, _volume(), lambda d: Records(d).get("v")),
    "record of a volume": Subject(_volume(), _volume(device="/dev/nbd0", formatting=True),
                                  lambda d: Records(d).get("v")),
    "secret of a volume": Subject(_volume_secret("host:hush-hush-hush\n"),
                                  _volume_secret("host:another-secret\n"), _read_secret),
    "losses, first": Subject(_nothing, _owe(1, 0), lambda d: Owed(d / "owed").read()),
    "losses, more": Subject(_owe(12, 3), _owe(345, 12), lambda d: Owed(d / "owed").read()),
    "losses, told": Subject(_owe(12, 3), _owe(12, 12), lambda d: Owed(d / "owed").read()),
    "state of a device": Subject(_state(), _state(backend="lun0", isid="00", reserved=True),
                                 lambda d: _home(d).state()),
    "properties for udev, first": Subject(_nothing, _udev("36001405"), _read_udev),
    "properties for udev": Subject(_udev("36001405"), _udev("3600140599"), _read_udev),
    "number of a process": Subject(lambda d: write_pid(d / "server.pid", 12),
                                   lambda d: write_pid(d / "server.pid", 4711),
                                   lambda d: read_pid(d / "server.pid")),
    "PID file": Subject(_nothing, _pidfile, lambda d: read_pid(d / "pid")),
    "what was left unflushed": Subject(_nothing, _leave(1 << 20),
                                       lambda d: Wish(d / "ending").left),
    "what was left unflushed, unknown": Subject(_nothing, _leave(None),
                                                lambda d: Wish(d / "ending").left),
    "file of a LUN": Subject(_nothing, _lun_file, _read_lun_file, True),
    "file of a LUN, without its size": Subject(_nothing, _lun_file, _read_lun_file_without_size,
                                               True, refusal="`size="),
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "directory"
    found.mkdir()
    monkeypatch.setenv("ISERBLK_CONFIG_DIR", str(found))
    monkeypatch.setattr(records, "directory", lambda: found)
    monkeypatch.setattr(records, "directories", lambda: [found])
    monkeypatch.setattr(records, "of_others", list)
    return found


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)  # what is damaged is told: other tests show how
    yield
    logging.disable(logging.NOTSET)


def read(subject: Subject, directory: Path) -> object:
    """What the reader makes of it; its refusal is a string."""
    try:
        return subject.read(directory)
    except IserblkError as error:
        words = str(error)
        assert subject.refusal and subject.refusal in words and "\n" not in words, words
        return "refused"


def wrong(subject: Subject, found: Any, old: Any, new: Any) -> bool:
    if found == "refused":
        return False
    if subject.mixed:
        return any(
            each not in (before, after) for each, before, after in zip(found, old, new, strict=True)
        )
    return bool(found not in (old, new))


def recorded(
    subject: Subject, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Steps, Any, Any]:
    """The steps, and what is read before and after them."""
    subject.old(directory)
    with monkeypatch.context() as patched:
        steps = Steps(directory, patched)
        subject.new(directory)
    new = read(subject, directory)
    steps.before.make(directory)
    old = read(subject, directory)
    assert steps.steps and new != "refused" and (old != new or subject.read is _read_lun_file)
    return steps, old, new


def tried(
    subject: Subject, directory: Path, states: Iterator[tuple[str, Tree]], old: Any, new: Any
) -> int:
    count = 0
    made: set[str] = set()
    for words, tree in states:
        if str(tree) in made:
            continue
        made.add(str(tree))
        tree.make(directory)
        found = read(subject, directory)
        assert not wrong(subject, found, old, new), f"{words}: {tree}: {found!r}"
        count += 1
    return count


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_process_that_is_killed(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    subject = SUBJECTS[name]
    steps, old, new = recorded(subject, directory, monkeypatch)
    *_, (_, last) = steps.killed()
    last.make(directory)
    assert read(subject, directory) == new, "the steps are not all that was done"
    assert tried(subject, directory, steps.killed(), old, new) > 1


@pytest.mark.parametrize("name", [name for name, each in SUBJECTS.items() if each.durable])
def test_a_power_failure(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """While it is written; and afterwards it is all there."""
    subject = SUBJECTS[name]
    steps, old, new = recorded(subject, directory, monkeypatch)
    assert tried(subject, directory, steps.power_failed(), old, new) > 1
    assert tried(subject, directory, steps.power_failed(len(steps.steps)), new, new) >= 1


# -- and the shim itself -----------------------------------------------------------------------


def _in_place(content: str) -> Step:
    return lambda directory: (directory / "file").write_text(content) and None


def _renamed(content: str) -> Step:
    def write(directory: Path) -> None:
        part = directory / "file.new"
        part.write_text(content)
        part.rename(directory / "file")

    return write


def _read_file(directory: Path) -> str:
    return (directory / "file").read_text()


def test_what_is_written_in_place_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(_in_place("old"), _in_place("new content"), _read_file)
    steps, old, new = recorded(subject, directory, monkeypatch)
    with pytest.raises(AssertionError, match=r"step 0 \(truncate"):
        tried(subject, directory, steps.killed(), old, new)


def test_what_is_renamed_without_a_flush_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it is right; after a power failure, it may be empty."""
    subject = Subject(_renamed("old"), _renamed("new content"), _read_file)
    steps, old, new = recorded(subject, directory, monkeypatch)
    assert [each.kind for each in steps.steps] == ["create", "write", "rename"]
    assert tried(subject, directory, steps.killed(), old, new) == 14
    with pytest.raises(AssertionError, match="0 bytes of 11"):
        tried(subject, directory, steps.power_failed(), old, new)


def test_what_is_named_without_a_flush_of_the_directory_is_found(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(directory: Path) -> None:
        with (directory / "file.new").open("wb") as file:
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
        (directory / "file.new").replace(directory / "file")

    subject = Subject(_renamed("old"), write, _read_file)
    steps, old, new = recorded(subject, directory, monkeypatch)
    assert tried(subject, directory, steps.power_failed(), old, new) > 2
    with pytest.raises(AssertionError, match="0 names of 2"):
        tried(subject, directory, steps.power_failed(len(steps.steps)), new, new)
