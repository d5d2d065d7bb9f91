"""Checks of the modules of the running kernel."""

from __future__ import annotations

from dataclasses import dataclass

from iserblk.doctor.finding import OK, SKIPPED, WARNING, Finding
from iserblk.doctor.machine import Machine


@dataclass(slots=True, frozen=True)
class Module:
    """A kernel module. ``purpose``: what does not work without it. ``wanted`` False: it is one
    choice of several, so its absence is no warning."""

    name: str
    purpose: str
    wanted: bool = True


NBD = Module("nbd", "/dev/nbdX (iserblk attach)")
FUSE = Module("fuse", "iserblk mount")
RDMA = (
    Module("rdma_cm", "connections by RDMA devices"),
    Module("ib_uverbs", "RDMA devices in userspace"),
    Module("rdma_ucm", "connections by RDMA devices in userspace"),
)
SOFTWARE_DEVICES = (
    Module("rdma_rxe", "Soft-RoCE, an RDMA device on any network card", wanted=False),
    Module("siw", "Soft-iWARP, an RDMA device on any network card", wanted=False),
)
SCTP = Module("sctp", "software iWARP over SCTP (rcap=iwarp-sctp)", wanted=False)

LOADED = "loaded"
BUILT_IN = "built in"
AVAILABLE = "available"
ABSENT = "absent"


def module_state(machine: Machine, name: str) -> str:
    """LOADED, BUILT_IN, AVAILABLE or ABSENT."""
    loaded = {line.split(" ", 1)[0] for line in machine.read("/proc/modules").splitlines()}
    if name in loaded:
        return LOADED
    directory = f"/lib/modules/{machine.release}"
    builtin = machine.read(f"{directory}/modules.builtin")
    # A module that is built in appears in /sys/module only if it has parameters.
    if machine.exists(f"/sys/module/{name}") or name in map(_name_of, builtin.splitlines()):
        return BUILT_IN
    files = machine.read(f"{directory}/modules.dep").splitlines()
    if name in (_name_of(line.partition(":")[0]) for line in files):
        return AVAILABLE
    return ABSENT


def _name_of(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0].replace("-", "_")


def check_modules(machine: Machine, has_device: bool) -> list[Finding]:
    """Check all modules. ``has_device``: there is an RDMA device, so its modules are needed."""
    findings = [_check(machine, module, has_device) for module in (*RDMA, *SOFTWARE_DEVICES, SCTP)]
    return [*findings, _check(machine, NBD, True), _check(machine, FUSE, True)]


def _check(machine: Machine, module: Module, needed: bool) -> Finding:
    name = f"module {module.name}"
    state = module_state(machine, module.name)
    if state in (LOADED, BUILT_IN):
        return Finding(name, OK, state)
    status = WARNING if module.wanted and needed else SKIPPED
    if state == AVAILABLE:
        return Finding(
            name,
            status,
            f"not loaded; needed for {module.purpose}",
            f"modprobe {module.name} (as root)",
        )
    text = f"kernel {machine.release} has no such module here; needed for {module.purpose}"
    if status == SKIPPED:
        return Finding(name, status, text)
    return Finding(
        name,
        status,
        text,
        "boot the distribution's full kernel (linux-image-amd64, not -cloud); in a container, load"
        " the module on the host",
    )
