"""The kernel's modules and devices."""

from __future__ import annotations

from iserblk.doctor import kernel
from iserblk.doctor.finding import SKIPPED, WARNING
from iserblk.doctor.kernel import check_modules, module_state
from tests.doctor.box import RELEASE, Box, named


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
