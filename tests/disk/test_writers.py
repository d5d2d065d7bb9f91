"""Two processes of this machine that write to one LUN: who is warned, and of whom."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iserblk.disk.writers import is_shared, note_use, warn_of_writers
from iserblk.metrics import records
from iserblk.metrics.records import Found, Record, Recorded, RecordedLun
from tests.support.fake_disk import lun_info

NAA = ("naa.60014050000000000000000000000001",)
LUN = lun_info(0, identifiers=NAA)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are, instead of the directories of this machine."""
    monkeypatch.setattr(records, "directory", lambda: tmp_path)
    monkeypatch.setattr(records, "directories", lambda: [tmp_path])
    monkeypatch.setattr(records, "of_others", list)
    return tmp_path


def other(
    monkeypatch: pytest.MonkeyPatch,
    *,
    pid: int = 4711,
    command: str = "mount",
    where: str = "/mnt/a",
    url: str = LUN.url,
    size: int = LUN.size,
    writes: bool = True,
    identifiers: tuple[str, ...] = NAA,
) -> None:
    """Another process has the LUN."""
    record = Record(pid, command, where, 0, (RecordedLun(url, size, writes, identifiers),))
    monkeypatch.setattr("iserblk.disk.writers.running", lambda: [Found(record, 0)])


def test_the_second_writer_is_warned_and_told_of_the_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, directory: Path
) -> None:
    other(monkeypatch)
    with Recorded("nbd", "/run/s") as recorded:
        note_use(recorded, [LUN])
    (line,) = caplog.messages
    assert line.startswith(f"{LUN.url}: written to by process 4711 (iserblk mount at /mnt/a), too:")
    assert "shared=yes" in line
    assert list(directory.iterdir()) == []


def test_by_another_way(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Another portal, or another target name."""
    other(monkeypatch, url="iser://elsewhere/iqn.2026-11.example:b/7")
    warn_of_writers([LUN])
    assert len(caplog.messages) == 1


def test_without_a_name_of_its_own_the_address_tells(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other(monkeypatch, identifiers=())
    warn_of_writers([lun_info(0, identifiers=())])
    assert len(caplog.messages) == 1
    other(monkeypatch, identifiers=(), url="iser://elsewhere/iqn.2026-11.example:b/7")
    warn_of_writers([lun_info(0, identifiers=())])
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"writes": False},
        {"pid": os.getpid()},
        {"identifiers": ("naa.60014050000000000000000000000002",)},
        {"command": "attach", "where": "/dev/nbd0"},
    ],
    ids=["a reader", "this process, by several ways", "another LUN", "the predecessor"],
)
def test_who_is_no_second_writer(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """(A test that logs a warning and does not say so fails.)"""
    other(monkeypatch, **changes)  # type: ignore[arg-type]
    with Recorded("attach", "/dev/nbd0") as recorded:
        note_use(recorded, [LUN])


def test_a_server_that_lost_its_socket_to_another_is_no_predecessor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other(monkeypatch, command="nbd", where="/run/s")
    with Recorded("nbd", "/run/s") as recorded:
        note_use(recorded, [LUN])
    assert len(caplog.messages) == 1


def test_a_predecessor_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    other(monkeypatch)
    warn_of_writers([LUN], pid=4711)


def test_who_is_not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads only, knows of the other, or may not write."""
    other(monkeypatch)
    with Recorded("nbd", "/run/s") as recorded:
        note_use(recorded, [LUN], writes=False)
        assert [each.writes for each in recorded.record.luns] == [False]
        note_use(recorded, [LUN], shared=True)
        note_use(recorded, [lun_info(0, identifiers=NAA, read_only=True)])
        assert [each.writes for each in recorded.record.luns] == [False]


def test_two_that_begin_at_once_do_not_both_miss_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a process writes to is recorded before it looks at others."""
    seen: list[tuple[RecordedLun, ...]] = []

    def look() -> list[Found]:
        seen.extend(found.record.luns for found in records.running())
        return []

    monkeypatch.setattr("iserblk.disk.writers.running", look)
    with Recorded("nbd", "/run/s") as recorded:
        note_use(recorded, [LUN])
    assert seen == [(RecordedLun(LUN.url, LUN.size, True, NAA),)]


def test_shared() -> None:
    url = "iser://host/iqn.2026-11.example:disk/0"
    assert is_shared([url], {"shared": "yes"}) and is_shared([f"{url}?shared=yes"], {})
    assert not is_shared([url], {})
