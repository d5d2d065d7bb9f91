"""scripts/bench device: what needs no virtual machine."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from benchlib import device, device_guest, device_load, device_target, lab
from benchlib.device_load import Device, use_of
from benchlib.load import JOBS, JobFailed
from click.testing import CliRunner

READS, WRITES = JOBS[2], JOBS[3]
# A client that goes on until it is told to end, as fio does.
ENDLESS = [sys.executable, "-S", "-c", "import signal; signal.pause()"]


class Disk:
    """Stands in for /sys/block: each look finds ``step`` bytes more. Up to ``end`` bytes, if it has
    one."""

    def __init__(self, step: int, end: int | None = None) -> None:
        self._step = step
        self._end = end
        self._done = 4096 * 1000  # by those that were there before
        self.looks: list[tuple[str, bool]] = []

    def __call__(self, name: str, *, writes: bool) -> int:
        self.looks.append((name, writes))
        self._done += self._step
        return self._done if self._end is None else min(self._done, self._end)


def test_requests_are_counted_by_the_disk_once_the_client_is_at_work() -> None:
    disk = Disk(READS.depth * READS.block)
    found = use_of(ENDLESS, Device("sdx"), READS, 0.01, disk)
    assert (found.ios, found.bytes) == (READS.depth, READS.depth * READS.block)
    assert found.seconds >= 0.01
    assert found.server_seconds == 0
    # Four times the depth have been done before: one look a turn, and one at either end.
    assert disk.looks == [("sdx", False)] * 7


def test_writes_are_counted_as_such_and_the_server_has_its_part() -> None:
    disk = Disk(1 << 20)
    found = use_of(ENDLESS, Device("nbd0", os.getpid()), WRITES, 0.01, disk)
    assert found.ios == (1 << 20) // WRITES.block
    assert found.server_seconds >= 0
    assert {writes for _, writes in disk.looks} == {True}


@pytest.mark.parametrize(
    ("command", "disk", "words"),
    [
        (["sh", "-c", "echo no such disk >&2; exit 3"], Disk(0), "status 3: no such disk"),
        (["sh", "-c", "exit 3"], Disk(0), "status 3: it said nothing"),
        (ENDLESS, Disk(1 << 20, end=4096 * 1000 + (2 << 20)), "nothing was done"),
    ],
)
def test_a_client_that_does_nothing_has_failed(command: list[str], disk: Disk, words: str) -> None:
    with pytest.raises(JobFailed, match=words):
        use_of(command, Device("sdx"), READS, 0.01, disk)


def test_a_client_that_never_begins_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_load, "START_S", 0.0)
    with pytest.raises(JobFailed, match=f"no {4 * READS.depth * READS.block} bytes"):
        use_of(ENDLESS, Device("sdx"), READS, 0.01, Disk(0))


def test_every_subject_can_be_made_and_has_a_peer_of_its_transport() -> None:
    assert list(device_guest.OPENERS) == list(device.PEERS)
    for subject, peer in device.PEERS.items():
        assert device.PEERS[peer] == peer
        assert subject.partition("-")[0] in ("iserblk", "open")
        assert ("tcp" in subject) == ("tcp" in peer)


def test_rows_are_chosen_by_glob() -> None:
    every = device.rows(["*"])
    assert len(every) == 8 * len(device.PEERS)
    assert {row.job.name for row in every} >= {"4k-randread-d1", "4k-randwrite-d32-c4"}
    chosen = device.rows(["device/1m-*/*-tcp", "device/*-d1/open-iscsi-iser"])
    assert [row.name for row in chosen] == [
        "device/4k-randread-d1/open-iscsi-iser",
        "device/4k-randwrite-d1/open-iscsi-iser",
        *(
            f"device/1m-{pattern}-d8/{subject}"
            for pattern in ("read", "write")
            for subject in ("iserblk-tcp", "iserblk-nbdkit-tcp", "open-iscsi-tcp")
        ),
    ]


def test_list_prints_the_names_that_rows_takes() -> None:
    words = ["--list", "--rows", "device/1m-read-d8/*"]
    printed = CliRunner().invoke(device.command, words, standalone_mode=False).output.split()
    assert printed == [row.name for row in device.rows(["device/1m-read-d8/*"])]
    refused = CliRunner().invoke(device.command, ["--rows", "device/nothing/*"])
    assert refused.exit_code == 2
    assert "no row is called device/nothing/*" in refused.output


def test_each_transport_has_a_portal_and_each_subject_a_lun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAB_TPG", "/sys/kernel/config/target/iscsi/iqn.2026-11.lab:disk/tpgt_1")
    monkeypatch.setenv("LAB_ADDRESS", "10.9.9.1")
    monkeypatch.setenv("LAB_PORT", "3260")
    assert device_target.url("iscsi", 0) == "iscsi://10.9.9.1:3261/iqn.2026-11.lab:disk/2"
    assert device_target.url("iser", 1) == "iser://10.9.9.1:3260/iqn.2026-11.lab:disk/3"


def test_rates_and_processor_time_are_compared_by_transport() -> None:
    """A subject that failed has no ratio, and harms no other's."""

    def sample(subject: str, ios: int, cpu_seconds: float) -> dict[str, Any]:
        return {
            "job": "4k-randread-d32", "subject": subject, "ios": ios, "seconds": 2.0,
            "bytes": ios * 4096, "cpu_seconds": cpu_seconds, "server_seconds": 0.5,
        }  # fmt: skip

    samples: list[dict[str, Any]] = [
        sample(device.TCP, 300, 3.0),
        sample(device.OPEN_ISCSI_TCP, 400, 2.0),
        sample(device.ISER, 100, 1.0),
        sample(device.OPEN_ISCSI_ISER, 50, 1.0),
        {"job": "4k-randread-d32", "subject": device.TCP_NBDKIT, "failed": "it died"},
    ]
    table = lab.table_of(samples, device.PEERS.__getitem__)
    cells = [list(column.cells) for column in table.columns]
    assert cells[1] == [each["subject"] for each in samples]
    assert cells[4] == ["0.75", "1.00", "2.00", "1.00", ""]
    assert cells[5] == ["10.00", "5.00", "10.00", "20.00", ""]
    assert cells[6] == ["2.00", "1.00", "0.50", "1.00", ""]
    assert str(table.title).endswith("to open-iscsi-tcp, open-iscsi-iser")
