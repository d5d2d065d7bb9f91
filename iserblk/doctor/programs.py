"""Checks of the programs, packages and device nodes that the front-ends use."""

from __future__ import annotations

from iserblk import forms
from iserblk.doctor.finding import OK, WARNING, Finding
from iserblk.doctor.kernel import ABSENT, NBD, module_state
from iserblk.doctor.machine import Machine
from iserblk.installation import HERE, no_pyfuse3, no_pyverbs

_NBDKIT = "iserblk nbd --nbdkit and iserblk attach --nbdkit"


def check_programs(machine: Machine) -> list[Finding]:
    return [
        data_path(forms.why_plain),
        _nbdkit(machine),
        _nbd_devices(machine),
        _fuse(machine),
        _pyfuse3(machine),
        _pyverbs(machine),
        _drivers(machine),
    ]


def data_path(why_plain: str) -> Finding:
    """``why_plain``: see ``iserblk.forms``."""
    if not why_plain:
        return Finding("data path", OK, "compiled")
    remedy = "unset ISERBLK_PLAIN" if why_plain == forms.UNWANTED else HERE.compiled()
    text = f"runs as it is written, because {why_plain}: each request takes more processor time"
    return Finding("data path", WARNING, text, remedy)


def _nbdkit(machine: Machine) -> Finding:
    if machine.program("nbdkit") is None:
        return Finding(
            "nbdkit",
            WARNING,
            f"nbdkit is missing; {_NBDKIT} need it",
            HERE.programs("nbdkit and nbdkit-plugin-python"),
        )
    plugins = [
        path
        for pattern in ("lib/*/nbdkit/plugins", "lib/nbdkit/plugins", "lib64/nbdkit/plugins")
        for path in machine.entries("/usr", f"{pattern}/nbdkit-python-plugin.so")
    ]
    if not plugins:
        return Finding(
            "nbdkit",
            WARNING,
            f"nbdkit has no Python plugin; {_NBDKIT} need it",
            HERE.programs("nbdkit-plugin-python"),
        )
    return Finding("nbdkit", OK, "installed, with its Python plugin")


def _nbd_devices(machine: Machine) -> Finding:
    names = [name for name in machine.names("/sys/block", "nbd*") if name[3:].isdigit()]
    if not names:
        if module_state(machine, NBD.name) == ABSENT:
            remedy = "use iserblk nbd: it needs no module, and serves qemu, nbdcopy and fio"
        else:
            remedy = "modprobe nbd (as root)"
        return Finding(
            "/dev/nbdX", WARNING, "there are no NBD devices; iserblk attach needs one", remedy
        )
    free = [name for name in names if not machine.read(f"/sys/block/{name}/pid")]
    text = f"{len(names)} devices, {len(free)} of them free"
    if not free:
        return Finding(
            "/dev/nbdX",
            WARNING,
            text,
            "detach a device with iserblk detach; or detach all, then (as root) modprobe -r nbd,"
            " modprobe nbd nbds_max=64",
        )
    if not machine.may_use(f"/dev/{free[0]}"):
        return Finding(
            "/dev/nbdX",
            WARNING,
            f"{text}; this user may not open them",
            "iserblk attach needs root",
        )
    return Finding("/dev/nbdX", OK, text)


def _fuse(machine: Machine) -> Finding:
    if not machine.exists("/dev/fuse"):
        return Finding(
            "FUSE",
            WARNING,
            "/dev/fuse is missing; iserblk mount needs it",
            "modprobe fuse (as root); in a container, add the device /dev/fuse",
        )
    if not machine.may_use("/dev/fuse"):
        return Finding(
            "FUSE",
            WARNING,
            "this user may not open /dev/fuse; iserblk mount needs it",
            "chmod 666 /dev/fuse (as root)",
        )
    if machine.program("fusermount3") is None:
        return Finding(
            "FUSE",
            WARNING,
            "fusermount3 is missing; iserblk mount needs it",
            HERE.programs("fuse3"),
        )
    return Finding("FUSE", OK, "/dev/fuse and fusermount3 can be used")


def _pyfuse3(machine: Machine) -> Finding:
    if not machine.has_package("pyfuse3"):
        text = "pyfuse3 is missing; iserblk mount needs it"
        return Finding("pyfuse3", WARNING, text, no_pyfuse3())
    return Finding("pyfuse3", OK, "installed")


def _pyverbs(machine: Machine) -> Finding:
    if not machine.has_package("pyverbs"):
        return Finding(
            "pyverbs",
            WARNING,
            "pyverbs is missing; iSER over RDMA devices needs it",
            no_pyverbs(),
        )
    return Finding("pyverbs", OK, "installed")


def _drivers(machine: Machine) -> Finding:
    """The userspace drivers that libibverbs loads, one for each kind of device."""
    names = [name.removesuffix(".driver") for name in machine.names("/etc/libibverbs.d")]
    if not names:
        return Finding(
            "RDMA drivers",
            WARNING,
            "libibverbs has none; iSER over RDMA devices needs them",
            HERE.programs("ibverbs-providers"),
        )
    return Finding("RDMA drivers", OK, f"libibverbs knows {', '.join(names)}")
