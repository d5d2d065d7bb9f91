"""Runs all checks of this machine, and tells which uses of iserblk will work."""

from __future__ import annotations

from iserblk.doctor.finding import OK, SKIPPED, WARNING, Finding
from iserblk.doctor.kernel import check_modules
from iserblk.doctor.machine import Machine
from iserblk.doctor.programs import check_programs
from iserblk.doctor.rdma import check_rdma, devices
from iserblk.initiator.connecting import verbs


def check_machine(machine: Machine) -> list[Finding]:
    """All findings about this machine, in the order in which to show them."""
    has_device = bool(devices(machine))
    return [
        *check_modules(machine, has_device),
        *check_rdma(machine),
        _verbs(has_device),
        *check_programs(machine),
    ]


def _verbs(has_device: bool) -> Finding:
    """What the verbs provider itself says."""
    missing = verbs.provider.available()
    if missing is None:
        return Finding("verbs", OK, "RDMA devices can be used")
    return Finding("verbs", WARNING if has_device else SKIPPED, missing)


# Use → the findings that must be OK for it.
_NEEDS = {
    "iwarp": (),
    "verbs": ("verbs",),
    "nbd": (),
    "attach": ("/dev/nbdX",),
    "mount": ("FUSE", "pyfuse3"),
}


def what_works(findings: list[Finding]) -> dict[str, bool]:
    """Which uses work: "iwarp" and "nbd" (always), "verbs" (iSER over RDMA devices), "attach",
    "mount"."""
    good = {finding.name for finding in findings if finding.status == OK}
    return {use: good.issuperset(needs) for use, needs in _NEEDS.items()}
