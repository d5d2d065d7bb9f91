"""All checks of this machine, and what they come to."""

from __future__ import annotations

from iserblk.doctor.finding import OK, SKIPPED, WARNING, Finding
from iserblk.doctor.kernel import check_modules
from iserblk.doctor.machine import Machine
from iserblk.doctor.programs import check_programs
from iserblk.doctor.rdma import check_rdma, devices
from iserblk.initiator.connecting import verbs


def check_machine(machine: Machine) -> list[Finding]:
    """In the order in which to read them."""
    has_device = bool(devices(machine))
    return [
        *check_modules(machine, has_device),
        *check_rdma(machine),
        _verbs(has_device),
        *check_programs(machine),
    ]


def _verbs(has_device: bool) -> Finding:
    """The provider's own word."""
    missing = verbs.provider.available()
    if missing is None:
        return Finding("verbs", OK, "RDMA devices can be used")
    return Finding("verbs", WARNING if has_device else SKIPPED, missing)


# What works → the findings that must be good for it.
_NEEDS = {
    "iwarp": (),
    "verbs": ("verbs",),
    "nbd": ("nbdkit",),
    "attach": ("nbdkit", "nbd-client", "/dev/nbdX"),
    "mount": ("FUSE", "pyfuse3"),
}


def what_works(findings: list[Finding]) -> dict[str, bool]:
    """iSER over software iWARP (always) and over RDMA devices; and the ways to use a LUN."""
    good = {finding.name for finding in findings if finding.status == OK}
    return {use: good.issuperset(needs) for use, needs in _NEEDS.items()}
