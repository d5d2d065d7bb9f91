"""What is told of a machine, and of versions."""

from __future__ import annotations

import platform

import trio

from iserblk import __version__, forms
from iserblk.doctor.about import about, versions
from iserblk.doctor.machine import Machine
from tests.doctor.box import RELEASE, Box


def test_a_machine(box: Box) -> None:
    box.put("etc/os-release", 'NAME="Debian"\nPRETTY_NAME="Debian GNU/Linux 13 (trixie)"\n')
    box.put("proc/meminfo", "MemTotal:  1024 kB\nMemFree: 1 kB\nMemAvailable:   512 kB\n")
    box.put("proc/cpuinfo", "processor : 0\nmodel name\t: A Processor\n\nprocessor : 1\n")
    box.put("proc/uptime", "3661.20 100.00\n")
    box.put("proc/sys/kernel/hostname", "storage-1\n")
    box.put("sys/class/dmi/id/sys_vendor", "QEMU\n")
    box.put("run/.containerenv")
    box.device("rxe0")
    found = about(box.machine)
    assert (found.host, found.distribution) == ("storage-1", "Debian GNU/Linux 13 (trixie)")
    assert (found.kernel, found.architecture) == (RELEASE, platform.machine())
    assert (found.memory, found.available, found.uptime) == (1 << 20, 1 << 19, 3661)
    assert (found.processor, found.virtual, found.container) == ("A Processor", "QEMU", "podman")
    assert found.rdma_devices == ("rxe0",) and found.processors > 0
    assert found.fields()["rdma_devices"] == ["rxe0"]


def test_a_machine_that_tells_nothing(box: Box) -> None:
    found = about(box.machine)
    assert (found.distribution, found.memory, found.uptime) == ("", 0, 0)
    assert found.host == platform.node()


def test_versions_here() -> None:
    found = dict(versions(Machine()))
    assert found["iserblk"] == __version__
    assert found["Python"] == platform.python_version()
    assert found["trio"] == trio.__version__
    assert found["data path"] == (f"plain: {forms.why_plain}" if forms.why_plain else "compiled")


def test_programs_and_packages(box: Box) -> None:
    """The version is the first number that a program names; one that fails has none that is
    known."""
    script = "#!/bin/sh\necho 'fusermount3 version: 3.14.0'\n"
    box.put("bin/fusermount3", script).chmod(0o755)
    box.put("opt/bin/nbdkit", "#!/bin/sh\nexit 1\n").chmod(0o755)
    script = "#!/bin/sh\nprintf 'installed rdma-core 44.0-2\\nconfig-files nbdkit 1\\n'\n"
    box.put("usr/bin/dpkg-query", script).chmod(0o755)
    found = dict(versions(box.machine))
    assert (found["fusermount3"], found["nbdkit"], found["systemctl"]) == ("3.14.0", "", None)
    packages = {name: version for name, version in found.items() if name.startswith("package ")}
    assert packages == {"package rdma-core": "44.0-2"}
