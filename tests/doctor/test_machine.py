"""The checks of this machine, on directories that look like machines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from iserblk.doctor import kernel, rdma
from iserblk.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding
from iserblk.doctor.kernel import check_modules, module_state
from iserblk.doctor.machine import Machine
from iserblk.doctor.programs import check_programs
from iserblk.doctor.rdma import check_rdma
from iserblk.doctor.report import check_machine, what_works
from iserblk.initiator.connecting import verbs
from tests.support.fabric import Fabric

RELEASE = "6.1.0-example"
PORT = "sys/class/infiniband/{device}/ports/1"
NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"


class Box:
    """A machine made of files. ``machine``: what the checks see of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memlock = -1
        self.packages: set[str] = set()

    @property
    def machine(self) -> Machine:
        return Machine(
            self.root, RELEASE, self.memlock, "/opt/bin:relative", self.packages.__contains__
        )

    def put(self, path: str, text: str = "") -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def program(self, path: str) -> None:
        self.put(path).chmod(0o755)

    def device(
        self,
        name: str = "rxe0",
        *,
        node: str = "1: CA",
        state: str = "4: ACTIVE",
        layer: str = "Ethernet",
        gids: tuple[tuple[str, str], ...] = (
            ("fe80:0000:0000:0000:5054:00ff:fe12:3456", "RoCE v2"),
            ("0000:0000:0000:0000:0000:ffff:0a09:0901", "RoCE v2"),
        ),
        mtu: int = 1500,
    ) -> None:
        port = PORT.format(device=name)
        self.put(f"sys/class/infiniband/{name}/node_type", f"{node}\n")
        self.put(f"{port}/state", f"{state}\n")
        self.put(f"{port}/link_layer", f"{layer}\n")
        for index, (gid, kind) in enumerate((*gids, (NO_GID, ""))):
            self.put(f"{port}/gids/{index}", f"{gid}\n")
            self.put(f"{port}/gid_attrs/types/{index}", f"{kind}\n")
            self.put(f"{port}/gid_attrs/ndevs/{index}", "eth0\n" if kind else "")
        self.put("sys/class/net/eth0/mtu", f"{mtu}\n")

    def nodes(self) -> None:
        self.put("dev/infiniband/rdma_cm")
        self.put("dev/infiniband/uverbs0")


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


# --- modules ------------------------------------------------------------------------------------


def test_states_of_a_module(box: Box) -> None:
    box.put("proc/modules", "rdma_cm 131072 2 - Live 0x0\nib_uverbs 172032 1 - Live 0x0\n")
    box.put("sys/module/fuse/version")
    box.put(f"lib/modules/{RELEASE}/modules.builtin", "kernel/drivers/infiniband/rdma-ucm.ko\n")
    box.put(f"lib/modules/{RELEASE}/modules.dep", "kernel/block/nbd.ko.xz: kernel/x.ko\n")
    states = {name: module_state(box.machine, name) for name in ("rdma_cm", "fuse", "rdma_ucm")}
    assert states == {
        "rdma_cm": kernel.LOADED,
        "fuse": kernel.BUILT_IN,
        "rdma_ucm": kernel.BUILT_IN,
    }
    assert module_state(box.machine, "nbd") == kernel.AVAILABLE
    assert module_state(box.machine, "x") == kernel.ABSENT  # needed by another, not there itself


def test_modules_that_are_not_loaded(box: Box) -> None:
    box.put(f"lib/modules/{RELEASE}/modules.dep", "kernel/nbd.ko:\nkernel/rdma_rxe.ko.zst:\n")
    findings = check_modules(box.machine, False)
    nbd = named(findings, "module nbd")
    assert (nbd.status, nbd.remedy) == (WARNING, "modprobe nbd (as root)")
    rxe = named(findings, "module rdma_rxe")
    assert (rxe.status, rxe.remedy) == (SKIPPED, "modprobe rdma_rxe (as root)")
    fuse = named(findings, "module fuse")
    assert fuse.status == WARNING
    assert RELEASE in fuse.text and "full kernel" in fuse.remedy


def test_rdma_modules_are_needed_where_there_is_a_device(box: Box) -> None:
    assert named(check_modules(box.machine, False), "module rdma_ucm").status == SKIPPED
    assert named(check_modules(box.machine, True), "module rdma_ucm").status == WARNING
    assert named(check_modules(box.machine, True), "module siw").status == SKIPPED


# --- RDMA devices -------------------------------------------------------------------------------


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
    assert "modprobe rdma_ucm" in missing.remedy
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


# --- programs and packages ----------------------------------------------------------------------


def test_nothing_is_installed(box: Box) -> None:
    findings = check_programs(box.machine)
    assert {finding.status for finding in findings} == {WARNING}
    assert all(finding.remedy for finding in findings)
    assert what_works(findings) == {
        "iwarp": True,
        "verbs": False,
        "nbd": False,
        "attach": False,
        "mount": False,
    }


def install(box: Box) -> None:
    for path in ("opt/bin/nbdkit", "usr/sbin/nbd-client", "bin/fusermount3"):
        box.program(path)
    box.put("usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-python-plugin.so")
    box.put("etc/libibverbs.d/rxe.driver", "driver rxe\n")
    for path in ("dev/fuse", "dev/nbd0", "dev/nbd1", "sys/block/nbd0/pid", "sys/block/nbd1/dev"):
        box.put(path, "77\n")
    box.packages = {"pyfuse3", "pyverbs"}


def test_everything_is_installed(box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "provider", Fabric())
    install(box)
    box.device()
    box.nodes()
    for module in ("nbd", "fuse", "rdma_cm", "ib_uverbs", "rdma_ucm"):
        box.put(f"sys/module/{module}/refcnt", "1\n")
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    findings = check_machine(box.machine)
    assert {finding.status for finding in findings} <= {OK, SKIPPED}
    assert set(what_works(findings).values()) == {True}
    assert named(findings, "/dev/nbdX").text == "2 devices, 1 of them free"
    assert named(findings, "RDMA drivers").text == "libibverbs knows rxe"
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("gone", "name", "words", "broken"),
    [
        ("opt/bin/nbdkit", "nbdkit", "missing", {"nbd", "attach"}),
        (
            "usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-python-plugin.so",
            "nbdkit",
            "no Python plugin",
            {"nbd", "attach"},
        ),
        ("usr/sbin/nbd-client", "nbd-client", "missing", {"attach"}),
        ("dev/fuse", "FUSE", "/dev/fuse is missing", {"mount"}),
        ("bin/fusermount3", "FUSE", "fusermount3 is missing", {"mount"}),
        ("etc/libibverbs.d/rxe.driver", "RDMA drivers", "libibverbs has none", set()),
    ],
)
def test_what_stops_working(
    gone: str,
    name: str,
    words: str,
    broken: set[str],
    box: Box,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verbs, "provider", Fabric())
    install(box)
    (box.root / gone).unlink()
    findings = check_machine(box.machine)
    finding = named(findings, name)
    assert finding.status == WARNING and words in finding.text and finding.remedy
    assert {use for use, works in what_works(findings).items() if not works} == broken


def test_nbd_devices(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.put(f"lib/modules/{RELEASE}/modules.dep", "kernel/nbd.ko:\n")
    finding = named(check_programs(box.machine), "/dev/nbdX")
    assert finding.remedy == "modprobe nbd (as root)"
    box.put("sys/block/nbd0/pid", "77\n")
    box.put("sys/block/nbd0p1/dev", "43:1\n")  # a partition is no device of its own
    finding = named(check_programs(box.machine), "/dev/nbdX")
    assert (finding.status, finding.text) == (WARNING, "1 devices, 0 of them free")
    box.put("sys/block/nbd1/dev", "43:32\n")
    box.put("dev/nbd1")
    assert named(check_programs(box.machine), "/dev/nbdX").status == OK
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = named(check_programs(box.machine), "/dev/nbdX")
    assert (finding.status, finding.remedy) == (WARNING, "iserblk attach needs root")


@pytest.mark.parametrize(("device", "status"), [(True, WARNING), (False, SKIPPED)])
def test_the_word_of_the_provider(
    device: bool, status: str, box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a problem only where there is a device."""
    fabric = Fabric()
    fabric.missing = "no luck with verbs"
    monkeypatch.setattr(verbs, "provider", fabric)
    if device:
        box.device()
    finding = named(check_machine(box.machine), "verbs")
    assert (finding.status, finding.text) == (status, "no luck with verbs")


def test_files_that_cannot_be_read(box: Box) -> None:
    """Some attributes of sysfs are there, and answer with an error."""
    box.device()
    state = box.root / PORT.format(device="rxe0") / "state"
    state.unlink()
    state.mkdir()
    finding = named(check_rdma(box.machine), "device rxe0 port 1")
    assert finding.status == WARNING and "unknown" in finding.text


def test_no_finding_of_a_machine_is_an_error(box: Box) -> None:
    """Software iWARP works anywhere."""
    assert ERROR not in {finding.status for finding in check_machine(box.machine)}
