"""Statuses, events and reasons in words; and whether RDMA is to be had at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from iserblk.rcap import verbs
from iserblk.rcap.verbs import statuses


def test_every_status_of_the_library_has_words() -> None:
    enums = pytest.importorskip("pyverbs.enums", reason="python3-pyverbs is not installed")
    theirs = {
        int(getattr(enums, name)): name
        for name in dir(enums)
        if name.startswith("IBV_WC_") and name.endswith(("_ERR", "SUCCESS"))
    }
    for code, name in theirs.items():
        if code in statuses.WC_STATUS:
            assert f"IBV_WC_{statuses.status(code).name}" == name
    assert {code for code in theirs if code <= 21} <= set(statuses.WC_STATUS)


def test_every_event_of_the_library_has_words() -> None:
    enums = pytest.importorskip("pyverbs.cm_enums", reason="python3-pyverbs is not installed")
    for name, value in vars(statuses).items():
        if isinstance(value, int) and name.isupper() and hasattr(enums, f"RDMA_CM_EVENT_{name}"):
            assert int(getattr(enums, f"RDMA_CM_EVENT_{name}")) == value
            assert value in statuses.CM_EVENT


@pytest.mark.parametrize(
    ("kind", "status", "expected"),
    [
        (statuses.REJECTED, 8, "no program listens on that port"),
        (statuses.REJECTED, 28, "refused by the target"),
        (statuses.REJECTED, 77, "reason 77"),
        (statuses.REJECTED, -111, "Connection refused"),
        (statuses.UNREACHABLE, -110, "timed out"),
        (statuses.ADDR_ERROR, -19, "No such device"),
        (statuses.ADDR_ERROR, 0, "no host there answers ARP"),
        (99, 0, "rdma_cm event 99"),
    ],
)
def test_failures(kind: int, status: int, expected: str) -> None:
    assert expected in statuses.failure(kind, status)


def test_an_unknown_status() -> None:
    assert "unknown" in statuses.status(99).words


def test_availability(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    devices, nodes = tmp_path / "class", tmp_path / "dev"
    monkeypatch.setattr(verbs, "DEVICES", devices)
    monkeypatch.setattr(verbs, "VERBS_DEVICES", nodes)
    monkeypatch.setattr(verbs, "CM_DEVICE", str(nodes / "rdma_cm"))
    looked: list[str] = []

    def missing(name: str) -> None:
        looked.append(name)

    monkeypatch.setattr("importlib.util.find_spec", missing)
    assert "no RDMA device" in str(verbs.available())
    devices.mkdir()
    assert "no RDMA device" in str(verbs.available())
    assert not looked  # each connection asks
    (devices / "rxe0").mkdir()
    assert "pyverbs is not installed" in str(verbs.available())
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    nodes.mkdir()
    assert "modprobe rdma_ucm" in str(verbs.available())
    (nodes / "rdma_cm").touch()
    assert "modprobe ib_uverbs" in str(verbs.available())
    (nodes / "uverbs0").touch()
    assert verbs.available() is None
    monkeypatch.setattr("os.access", lambda path, _mode: not path.endswith("uverbs0"))
    assert "no permission on" in str(verbs.available())


def test_asking_needs_no_pyverbs() -> None:
    program = (
        "import sys; from iserblk.rcap import verbs; verbs.available();"
        "from iserblk.rcap.verbs import queuepair, connecting;"
        "print([name for name in sys.modules if name.startswith('pyverbs')])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


def test_pyverbs_does_not_configure_our_logging() -> None:
    pytest.importorskip("pyverbs", reason="python3-pyverbs is not installed")
    program = (
        "import logging; from iserblk.rcap.verbs import api; api.gaps();"
        "print(logging.getLogger().handlers, logging.getLogger().level)"
    )
    shown = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert shown.strip() == f"[] {30}"
