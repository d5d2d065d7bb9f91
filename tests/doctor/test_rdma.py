"""RDMA devices, their ports, addresses and limits."""

from __future__ import annotations

import os

import pytest

from iserblk.doctor import rdma
from iserblk.doctor.finding import OK, SKIPPED, WARNING
from iserblk.doctor.rdma import check_rdma
from tests.doctor.box import PORT, Box, named


def test_no_device(box: Box) -> None:
    (finding,) = check_rdma(box.machine)
    assert finding.status == SKIPPED
    assert "rdma link add" in finding.remedy


def test_a_good_device(box: Box) -> None:
    box.device()
    box.nodes()
    findings = check_rdma(box.machine)
    assert {finding.status for finding in findings} == {OK}
    text = named(findings, "device rxe0 port 1").text
    for words in (
        "RoCE, ACTIVE",
        "eth0 (MTU 1500: RDMA MTU 1024)",
        "fe80::5054:ff:fe12:3456 (RoCE v2)",
        "10.9.9.1 (RoCE v2)",
    ):
        assert words in text
    assert text.count("(RoCE v2)") == 2


@pytest.mark.parametrize(("mtu", "fitting"), [(9000, 4096), (4096, 2048), (1500, 1024), (576, 512)])
def test_rdma_mtu(mtu: int, fitting: int, box: Box) -> None:
    box.device(mtu=mtu)
    text = named(check_rdma(box.machine), "device rxe0 port 1").text
    assert f"RDMA MTU {fitting})" in text


def test_a_port_that_is_down(box: Box) -> None:
    box.device(state="1: DOWN")
    finding = named(check_rdma(box.machine), "device rxe0 port 1")
    assert finding.status == WARNING and "DOWN" in finding.text
    assert "ip link set eth0 up" in finding.remedy


def test_infiniband_without_a_subnet_manager(box: Box) -> None:
    box.device("mlx5_0", state="2: INIT", layer="InfiniBand", gids=())
    finding = named(check_rdma(box.machine), "device mlx5_0 port 1")
    assert finding.status == WARNING
    assert finding.text == "InfiniBand, INIT"
    assert "opensm" in finding.remedy


@pytest.mark.parametrize(
    ("gids", "words", "remedy"),
    [
        ((), "no GIDs", "IP address"),
        (
            (("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"),),
            "no RoCE v2 GID",
            "enable RoCE v2",
        ),
        ((("rubbish", "RoCE v2"),), "no GIDs", "IP address"),
    ],
)
def test_roce_needs_addresses(
    gids: tuple[tuple[str, str], ...], words: str, remedy: str, box: Box
) -> None:
    box.device(gids=gids)
    finding = named(check_rdma(box.machine), "device rxe0 port 1")
    assert finding.status == WARNING
    assert words in finding.text and remedy in finding.remedy


def test_iwarp_needs_no_gids(box: Box) -> None:
    gid = ("5254:0012:3456:0000:0000:0000:0000:0000", "IB/RoCE v1")
    box.device("siw0", node="4: RNIC", gids=(gid,), mtu=65536)
    finding = named(check_rdma(box.machine), "device siw0 port 1")
    assert finding.status == OK
    assert finding.text == "iWARP, ACTIVE; eth0 (MTU 65536)"


def test_device_nodes(box: Box) -> None:
    box.device()
    missing = named(check_rdma(box.machine), "/dev/infiniband")
    assert missing.status == WARNING
    assert "rdma_cm and /dev/infiniband/uverbs* missing" in missing.text
    assert "modprobe -a rdma_ucm" in missing.remedy
    box.nodes()
    assert named(check_rdma(box.machine), "/dev/infiniband").status == OK


def test_device_nodes_that_are_not_for_us(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.device()
    box.nodes()
    monkeypatch.setattr(os, "access", lambda path, mode: "uverbs" not in str(path))
    finding = named(check_rdma(box.machine), "/dev/infiniband")
    assert finding.status == WARNING
    assert "no permission to open /dev/infiniband/uverbs0" in finding.text
    assert "udev" in finding.remedy


@pytest.mark.parametrize(
    ("limit", "status", "words"),
    [
        (-1, OK, "no limit"),
        (rdma.MEMLOCK_WANTED, OK, "65536 KiB"),
        (8 << 20, WARNING, "8192 KiB of memory; an RDMA connection wants 64 MiB or more"),
    ],
)
def test_memlock(limit: int, status: str, words: str, box: Box) -> None:
    box.device()
    box.memlock = limit
    finding = named(check_rdma(box.machine), "memlock")
    assert finding.status == status and words in finding.text
    assert bool(finding.remedy) is (status != OK)


def test_files_that_cannot_be_read(box: Box) -> None:
    """Some attributes of sysfs are there, and answer with an error."""
    box.device()
    state = box.root / PORT.format(device="rxe0") / "state"
    state.unlink()
    state.mkdir()
    finding = named(check_rdma(box.machine), "device rxe0 port 1")
    assert finding.status == WARNING and "unknown" in finding.text
