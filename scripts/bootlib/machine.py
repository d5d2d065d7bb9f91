"""One boot of the machine: from QEMU's start to its end, by itself or killed."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from lablib.archive import Absent

from bootlib.agent import Agent, Failed
from bootlib.image import Disk

# Booting takes a minute or two by emulation. Emulated kernels sometimes hang there.
BOOT_S = 900.0
_POLL_S = 0.2
_LOOK_S = 5.0
_LINES = 15
_KERNEL_OPTIONS = (
    "root=/dev/vda", "rw", "console=ttyS0", "net.ifnames=0",
    # On a busy host the emulated timer is late: the kernel would give up, and measure the wrong
    # speed of the TSC, so that its clock would run too fast.
    "no_timer_check", "tsc=unstable",
    "mitigations=off", "no5lvl", "oops=panic", "panic=1",
    "systemd.show_status=false", "systemd.journald.forward_to_console=1",
    # What takes time in every boot, and has nothing to do here.
    *(f"systemd.mask={unit}" for unit in (
        "systemd-binfmt.service", "proc-sys-fs-binfmt_misc.automount", "systemd-pstore.service",
        "systemd-timesyncd.service", "systemd-random-seed.service", "getty@tty1.service",
        "dev-hugepages.mount", "dev-mqueue.mount", "sys-kernel-debug.mount",
        "sys-kernel-tracing.mount", "systemd-logind.service", "systemd-user-sessions.service",
        "systemd-update-utmp.service", "systemd-update-utmp-runlevel.service",
        "serial-getty@ttyS0.service", "modprobe@drm.service", "modprobe@efi_pstore.service",
        "systemd-tmpfiles-clean.timer", "ldconfig.service",
    )),
)  # fmt: skip


class NotBooted(Failed):
    """The guest hangs before its agent runs: it may be started again."""


class Machine:
    """A running guest. As a context manager: on exit it is gone, with what it needed."""

    def __init__(
        self, disk: Disk, overlay: Path, console: Path, ports: Iterable[tuple[str, Path]], kvm: bool
    ) -> None:
        """``overlay``: what this and earlier boots have changed of ``disk``; ``console``: is
        appended to; ``ports``: /dev/virtio-ports/NAME in the guest, and the files that what is
        written there is appended to. Raises Absent."""
        self.console = console
        self._read = console.stat().st_size if console.exists() else 0
        self._run = Path(tempfile.mkdtemp(prefix="iserblk-boot."))
        agent, control = self._run / "agent", self._run / "control"
        arguments = [
            "qemu-system-x86_64", "-machine", "pc", "-cpu", "host" if kvm else "max",
            "-accel", "kvm" if kvm else "tcg,thread=multi", "-smp", "2", "-m", "1G",
            "-nodefaults", "-display", "none", "-no-reboot",
            "-kernel", disk.kernel, "-initrd", disk.initrd, "-append", " ".join(_KERNEL_OPTIONS),
            "-drive", f"file={overlay},if=virtio,format=qcow2,cache=unsafe",
            "-netdev", "user,id=net0", "-device", "virtio-net-pci,netdev=net0,romfile=",
            "-chardev", f"file,id=console,path={console},append=on", "-serial", "chardev:console",
            "-qmp", f"unix:{control},server=on,wait=off",
            "-device", "virtio-serial-pci,id=ports",
            "-chardev", f"socket,id=agent,path={agent},server=on,wait=off",
            "-device", "virtserialport,bus=ports.0,chardev=agent,name=org.qemu.guest_agent.0",
            "-object", "rng-random,id=rng,filename=/dev/urandom",
            "-device", "virtio-rng-pci,rng=rng",
        ]  # fmt: skip
        for number, (name, file) in enumerate(ports):
            arguments += [
                "-chardev", f"file,id=port{number},path={file},append=on",
                "-device", f"virtserialport,bus=ports.0,chardev=port{number},name={name}",
            ]  # fmt: skip
        self.started = time.monotonic()
        try:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True,
            )  # fmt: skip
            self._await(control)
            self.agent = Agent(agent)
            self._control = socket.socket(socket.AF_UNIX)
            self._control.connect(str(control))
            self._order({"execute": "qmp_capabilities"})
        except FileNotFoundError:
            shutil.rmtree(self._run)
            raise Absent("qemu-system-x86_64 or setpriv is not installed") from None
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.agent.close()
        self._control.close()
        self.end()

    def boot(self) -> float:
        """Wait until the agent answers; returns the seconds since the start. Raises Failed."""
        while not self.agent.answers(_LOOK_S):
            if self.said("Kernel panic"):
                raise Failed(f"the kernel has panicked: {self.last_lines()}")
            if time.monotonic() - self.started > BOOT_S:
                raise NotBooted(f"not booted within {BOOT_S:.0f} s: {self.last_lines()}")
        return time.monotonic() - self.started

    def ended(self, limit_s: float, words: str) -> float:
        """Wait until the guest has ended by itself, with the kernel's ``words``; returns the
        seconds. Raises Failed."""
        start = time.monotonic()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"not ended after {limit_s:.0f} s: {self.last_lines()}") from None
        if not self.said(words):
            raise Failed(f"it ended in another way than `{words}`: {self.last_lines()}")
        return time.monotonic() - start

    def unplug(self) -> None:
        """Take the cable out of the network card."""
        self._order({"execute": "set_link", "arguments": {"name": "net0", "up": False}})

    def end(self) -> None:
        """Kill the guest, as a power failure would."""
        self._process.kill()
        self._process.communicate()
        shutil.rmtree(self._run, ignore_errors=True)

    def text(self) -> str:
        """What this boot has said on its console."""
        with self.console.open("rb") as file:
            file.seek(self._read)
            return file.read().decode(errors="replace").replace("\r", "")

    def said(self, words: str) -> bool:
        return words in self.text()

    def last_lines(self) -> str:
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        return " | ".join(lines[-_LINES:]) or "its console is silent"

    def _await(self, control: Path) -> None:
        while not control.exists():
            if self._process.poll() is not None:
                assert self._process.stderr is not None
                raise Absent(f"QEMU does not start: {self._process.stderr.read().strip()}")
            time.sleep(_POLL_S)

    def _order(self, order: object) -> None:
        """QMP. Its greeting and events come as lines of their own."""
        with suppress(BrokenPipeError):
            self._control.sendall(json.dumps(order).encode() + b"\n")
        self._control.settimeout(10)
        received = b""
        while b'"return"' not in received:
            data = self._control.recv(1 << 16)
            if not data or b'"error"' in data:
                raise Failed(f"QEMU refuses {order}: {data.decode(errors='replace')}")
            received += data
