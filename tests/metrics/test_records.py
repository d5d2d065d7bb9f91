"""Records of processes: of which there are some, and what becomes of the others."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from iserblk.errors import RemoteProtocolError
from iserblk.metrics import records
from iserblk.metrics.records import Recorded, RecordedLun, parse_record_untrusted, running, started

LUN = RecordedLun("iser://host:3260/iqn.2026-11.example:disk/0", 4096, True, ("naa.6001",))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are, instead of the directories of this machine."""
    path = tmp_path / "iserblk"
    monkeypatch.setattr(records, "directory", lambda: path)
    monkeypatch.setattr(records, "directories", lambda: [path])
    monkeypatch.setattr(records, "of_others", list)
    return path


def test_a_record_comes_and_goes_with_its_process(directory: Path) -> None:
    assert running() == []
    with Recorded("nbd", "/run/s") as recorded:
        (found,) = running()
        assert (found.record, found.uid) == (recorded.record, os.geteuid())
        assert found.record.words == f"process {os.getpid()} (iserblk nbd at /run/s)"
        recorded.use([LUN])
        (found,) = running()
        assert found.record.luns == (LUN,)
        (path,) = directory.iterdir()
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert running() == [] and list(directory.iterdir()) == []


def test_that_of_a_killed_process_goes(directory: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    try:
        with Recorded("mount", "/mnt"):
            (path,) = directory.iterdir()
            text = path.read_text()
        values = json.loads(text) | {"pid": process.pid}
        left = directory / f"{process.pid}.{started(process.pid)}.process"
        left.write_text(json.dumps(values))
        later = directory / f"{process.pid}.{started(process.pid) + 1}.process"  # its number again
        later.write_text(json.dumps(values))
        assert [found.record.pid for found in running()] == [process.pid]
        assert left.exists() and not later.exists()
    finally:
        process.kill()
        process.wait()
    assert running() == [] and not left.exists()


# A process with a record in the directory that is named.
HELD = """
import sys
from pathlib import Path
from iserblk.metrics import records
records.directory = lambda: Path(sys.argv[1])
with records.Recorded("nbd", "/run/s") as recorded:
    recorded.use([records.RecordedLun("iser://host:3260/iqn.2026-11.example:disk/0", 4096, True)])
    print(flush=True)
    sys.stdin.read()
"""


def test_that_of_a_process_that_is_not_seen(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs in another namespace of processes, or /proc hides it from this one's unit: its lock
    tells. Another user's lock, who may only read the file, tells nothing."""
    monkeypatch.setattr(records, "started", lambda _pid: 0)
    with subprocess.Popen(
        [sys.executable, "-c", HELD, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (found,) = running()
        assert found.record.pid == process.pid and found.record.luns[0].writes
        (path,) = directory.iterdir()
        process.kill()
        process.wait()
        with path.open("rb") as file:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 0, 0))
            assert running() == [] and list(directory.iterdir()) == []


def test_a_record_of_many_luns_can_be_read(directory: Path) -> None:
    many = [
        RecordedLun(
            f"iser://host:3260/iqn.2026-11.example:disk/{lun}", lun, True, ("naa." + "6" * 32,)
        )
        for lun in range(16_384)
    ]
    with Recorded("nbd") as recorded:
        recorded.use(many[:1024])
        (found,) = running()
        assert found.record.luns == tuple(many[:1024])
        recorded.use(many)
        (found,) = running()
        kept = found.record.luns
        assert len(kept) > 4096 and kept == tuple(many[: len(kept)])


def test_a_link_in_its_way_is_not_followed(directory: Path, tmp_path: Path) -> None:
    directory.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("content")
    part = directory / f".{os.getpid()}.{started(os.getpid())}.process"
    part.symlink_to(victim)
    with Recorded("nbd"):
        assert len(running()) == 1
    assert victim.read_text() == "content"


def test_files_that_are_no_records(directory: Path, tmp_path: Path) -> None:
    directory.mkdir()
    name = f"{os.getpid()}.{started(os.getpid())}.process"
    good = json.dumps({"pid": os.getpid(), "command": "nbd", "where": "", "began": 0, "luns": []})
    for text in ("", "{}", good[:-1], "[" * 100_000, good.replace('"nbd"', "7"), " " * (1 << 21)):
        (directory / name).write_text(text)
        assert running() == []
    (directory / name).write_text(good)
    assert len(running()) == 1
    (directory / name).write_text(good.replace(f'"pid": {os.getpid()}', '"pid": 1'))
    assert running() == []  # it speaks of another process
    (directory / name).unlink()
    (tmp_path / "elsewhere").write_text(good)
    (directory / name).symlink_to(tmp_path / "elsewhere")
    assert running() == []
    (directory / name).unlink()
    os.mkfifo(directory / name)
    assert running() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives files to other users")
def test_those_of_another_user_than_the_directory_do_not_count(directory: Path) -> None:
    with Recorded("nbd", "/run/s"):
        (path,) = directory.iterdir()
        os.chown(path, 1234, 1234)
        assert running() == []
        os.chown(directory, 1234, 1234)
        assert [found.uid for found in running()] == [1234]


def test_where_there_is_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process works without."""
    (tmp_path / "file").touch()
    for where in (None, tmp_path / "file", tmp_path / "missing" / "iserblk"):
        monkeypatch.setattr(records, "directory", lambda where=where: where)
        with Recorded("nbd") as recorded:
            recorded.use([LUN])
    assert recorded.record.luns == (LUN,)
    assert recorded.record.words == f"process {os.getpid()} (iserblk nbd)"


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"pid": -1}', '{"pid": 1e999}'])
def test_what_cannot_be_parsed(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        parse_record_untrusted(text)


def test_when_a_process_has_started() -> None:
    assert started(os.getpid()) > 0
    assert started(1 << 30) == 0


def test_a_process_that_has_ended_and_is_not_waited_for() -> None:
    """The server of a device that was killed, whose parent is an attach in the foreground."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert started(process.pid) == 0
