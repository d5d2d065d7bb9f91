"""What a report says of the machine, and of the versions of what iserblk uses there."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

from iserblk import __version__, forms
from iserblk.doctor import rdma
from iserblk.doctor.machine import Machine
from iserblk.installation import HERE

_PATIENCE_S = 10.0  # for a program to name its version
# Packages of Python: the modules tell, where a distribution installs no version.
_PYTHON = (
    *("trio", "outcome", "click", "rich", "prometheus_client", "crc32c", "mypy_extensions"),
    *("pyfuse3", "pyverbs", "grpc", "google.protobuf"),
)
_PROGRAMS = (
    ("nbdkit", ("--version",)),
    ("fusermount3", ("--version",)),
    ("systemctl", ("--version",)),
)
_PACKAGES = (  # of Debian
    *("iserblk", "python3-pyverbs", "rdma-core", "libibverbs1", "ibverbs-providers"),
    *("nbdkit", "nbdkit-plugin-python", "fuse3", "open-iscsi"),
)
_DISTRIBUTIONS = {"grpc": "grpcio", "google.protobuf": "protobuf"}
_NUMBER = re.compile(r"(?<!\w)\d[\w.+~:-]*")


@dataclass(slots=True, frozen=True)
class About:
    """The machine. ``memory``: bytes; ``uptime``: seconds; both 0 if that is not known.
    ``processors``: those that this process may use. ``container``: what this process runs in, ""
    if that is not known, or nothing. ``virtual``: the machine's maker, of a virtual machine."""

    host: str
    distribution: str
    kernel: str
    architecture: str
    processors: int
    processor: str
    memory: int
    available: int
    uptime: int
    container: str
    virtual: str
    rdma_devices: tuple[str, ...]

    def fields(self) -> dict[str, object]:
        return {**asdict(self), "rdma_devices": list(self.rdma_devices)}


def about(machine: Machine) -> About:
    memory = _table(machine.read("/proc/meminfo"), ":")
    processor = _table(machine.read("/proc/cpuinfo").partition("\n\n")[0], ":")
    uptime = machine.read("/proc/uptime").partition(".")[0]
    return About(
        machine.read("/proc/sys/kernel/hostname") or platform.node(),
        _table(machine.read("/etc/os-release"), "=").get("PRETTY_NAME", "").strip("\"'"),
        machine.release,
        platform.machine(),
        len(os.sched_getaffinity(0)),
        processor.get("model name", "") or processor.get("Hardware", ""),
        _kibibytes(memory.get("MemTotal", "")),
        _kibibytes(memory.get("MemAvailable", "")),
        int(uptime) if uptime.isdigit() else 0,
        _container(machine),
        machine.read("/sys/class/dmi/id/sys_vendor"),
        tuple(rdma.devices(machine)),
    )


def _table(text: str, separator: str) -> dict[str, str]:
    pairs = [line.partition(separator) for line in text.splitlines()]
    return {name.strip(): value.strip() for name, _, value in pairs}


def _kibibytes(text: str) -> int:
    number = text.removesuffix(" kB")
    return int(number) << 10 if number.isdigit() else 0


def _container(machine: Machine) -> str:
    if machine.exists("/run/.containerenv"):
        return "podman"
    if machine.exists("/.dockerenv"):
        return "docker"
    if machine.exists("/var/run/secrets/kubernetes.io"):
        return "Kubernetes"
    return machine.read("/run/systemd/container")


def versions(machine: Machine) -> list[tuple[str, str | None]]:
    """Names and versions; a version is None where there is no such thing here, and "" where there
    is, and its version is not known."""
    found: list[tuple[str, str | None]] = [
        ("iserblk", __version__),
        ("data path", f"plain: {forms.why_plain}" if forms.why_plain else "compiled"),
        ("installation", HERE.kind),
        ("Python", platform.python_version()),
    ]
    packages = _packages(machine)
    for module in _PYTHON:
        found.append((_DISTRIBUTIONS.get(module, module), _of_module(machine, module, packages)))
    for program, words in _PROGRAMS:
        path = machine.program(program)
        version = None if path is None else _first_number(_said([str(machine.path(path)), *words]))
        found.append((program, version))
    found += [(f"package {name}", version) for name, version in packages.items()]
    return found


def _of_module(machine: Machine, module: str, packages: dict[str, str]) -> str | None:
    try:
        return metadata.version(_DISTRIBUTIONS.get(module, module))
    except metadata.PackageNotFoundError:
        pass
    try:
        there = machine.has_package(module)
    except ModuleNotFoundError:  # of what it is in
        there = False
    return packages.get(f"python3-{module}", "") if there else None


def _packages(machine: Machine) -> dict[str, str]:
    """Those of Debian that are installed."""
    if (path := machine.program("dpkg-query")) is None:
        return {}
    form = "${db:Status-Status} ${Package} ${Version}\\n"
    said = _said([str(machine.path(path)), "-W", f"-f={form}", *_PACKAGES])
    rows = [line.split(" ") for line in said.splitlines()]
    found = {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}
    return {name: found[name] for name in _PACKAGES if name in found}


def _said(words: Sequence[str]) -> str:
    """What a program prints; "" if it cannot be run, or does not end."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def _first_number(text: str) -> str:
    found = _NUMBER.search(text.partition("\n")[0])
    return found[0] if found is not None else ""
