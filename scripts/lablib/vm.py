"""Starts, watches and ends one virtual machine.

virtme-ng boots the kernel on the host's own root file system, copy-on-write. The lab adds two
virtio ports for the command's output, and a directory that both host and guest may write.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from lablib.host import need_host, path
from lablib.kernel import Kernel
from lablib.setups import TOP

_GUEST = Path(__file__).resolve().parent / "guest"
# Directories that the guest may change in its own memory; guest/main.sh adds the checkout and home.
_OVERLAYS = ("/etc", "/lib", "/home", "/opt", "/srv", "/usr", "/var", "/tmp")
# A guest takes 20 s to boot, on a busy machine a minute. Emulated kernels sometimes hang there.
BOOT_S = 240.0
_POLL_S = 0.05
_DRAIN_S = 1.0
_CONSOLE_LINES = 25
_CHUNK = 1 << 16
_MOST_PORTS = 3  # of one device, with number 0, which is the console's
# virtme-run is called as a module: the script in .venv/bin names its interpreter by where the
# checkout was when it was installed.
_VIRTME = "import sys; from virtme.commands.run import main; sys.exit(main())"


class Died(Exception):
    """The guest ended, or was ended, before the command did; the text says how."""


class NotBooted(Died):
    """The guest hangs before it has run anything of the lab: another guest may be started."""


@dataclass(frozen=True)
class Wish:
    """What a machine is to be like."""

    kernel: Kernel
    setup: str = "none"
    kvm: bool = False
    cpus: int = 2
    in_turn: bool = False
    """Emulated processors share one thread of the host, and run one after the other."""
    memory: str = "2G"
    mtu: int = 65536
    network: bool = False
    forwards: tuple[tuple[int, int], ...] = ()
    """Ports of the host's loopback, and those of the guest that they lead to."""
    results: Path | None = None
    """A directory that the guest may write, at the same path."""
    variables: Mapping[str, str] = field(default_factory=dict)


class Machine:
    """A running guest. A context manager: on exit it is gone, with its directory."""

    def __init__(self, wish: Wish, command: Sequence[str]) -> None:
        """Start the guest; ``command`` runs once the set-up is ready. Raises Absent."""
        need_host()
        self._wish = wish
        self.directory = Path(tempfile.mkdtemp(prefix="iserblk-lab."))
        self.console = self.directory / "console"
        self.started = time.monotonic()
        self._status = self.directory / "status"
        self._booted = False
        self._write_orders(command)
        self._outputs: dict[int, int] = {}
        self._process = self._start()

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()
        if self._wish.results is not None and self.console.exists():
            shutil.copyfile(self.console, self._wish.results / "console")
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def setup(self) -> str:
        return self._wish.setup

    @property
    def results_variable(self) -> dict[str, str]:
        return {"LAB_RESULTS": str(self._wish.results)} if self._wish.results else {}

    @property
    def age_s(self) -> float:
        """Seconds since the guest was started."""
        return time.monotonic() - self.started

    def ready(self) -> dict[str, str] | None:
        """The variables of the set-up; None until it is ready."""
        try:
            text = (self.directory / "ready").read_text()
        except FileNotFoundError:
            return None
        return dict(line.split("=", 1) for line in text.splitlines())

    def wait(self, limit_s: float, *, until: Callable[[], bool] = lambda: False) -> int | None:
        """Pass the command's output on until the command ends; returns its exit status.

        Returns None as soon as ``until()`` is true. Raises Died if the guest ends before the
        command, if its set-up fails, or after ``limit_s`` seconds, counted from the guest's start;
        NotBooted if the guest has not booted after BOOT_S.
        """
        with selectors.DefaultSelector() as selector:
            for source in self._outputs:
                selector.register(source, selectors.EVENT_READ)
            while True:
                self._forward(selector, _POLL_S)
                if self._status.exists():
                    status = self._status.read_text().strip()
                    if status:
                        return self._finish(selector, status)
                if until():
                    return None
                if self._process.poll() is not None and not self._status.exists():
                    self._forward(selector, 0)
                    raise Died(self._obituary("the guest died"))
                if self.age_s > limit_s:
                    raise Died(self._obituary(f"the guest was ended after {limit_s:.0f} s"))
                self._booted = self._booted or (self.directory / "booted").exists()
                if not self._booted and self.age_s > BOOT_S:
                    raise NotBooted(
                        self._obituary(f"the guest has not booted within {BOOT_S:.0f} s")
                    )

    def end(self) -> None:
        """Kill the guest: it has nothing that needs an orderly shutdown."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for source in self._outputs:
            os.close(source)
        self._outputs.clear()

    def _finish(self, selector: selectors.BaseSelector, status: str) -> int:
        # The guest wrote all output before its status: the rest of the output is in the pipes.
        deadline = time.monotonic() + _DRAIN_S
        while self._forward(selector, 0) and time.monotonic() < deadline:
            pass
        if not status.isdigit():
            raise Died(self._obituary(status))
        return int(status)

    def _forward(self, selector: selectors.BaseSelector, timeout_s: float) -> bool:
        if not selector.get_map():
            time.sleep(timeout_s)
            return False
        ready = selector.select(timeout_s)
        for key, _events in ready:
            data = os.read(key.fd, _CHUNK)
            if not data:
                selector.unregister(key.fd)
                continue
            view = memoryview(data)
            while view:
                view = view[os.write(self._outputs[key.fd], view) :]
        return bool(ready)

    def _obituary(self, how: str) -> str:
        said = (
            self.console.read_text(errors="replace").splitlines() if self.console.exists() else []
        )
        panic = [line for line in said if "Kernel panic" in line or "BUG: " in line]
        tail = said[-_CONSOLE_LINES:]
        lines = [how + (f": {panic[0].strip()}" if panic else "")]
        lines += [f"  console: {line}" for line in tail] or ["  its console was silent"]
        return "\n".join(lines)

    def _write_orders(self, command: Sequence[str]) -> None:
        variables = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": path(),
            "LAB_SETUP": self._wish.setup,
            "LAB_RUN": str(self.directory),
            "LAB_MTU": str(self._wish.mtu),
            "LAB_NETWORK": "1" if self._wish.network or self._wish.forwards else "",
            "LAB_TOP": str(TOP),
            "LAB_MODULES": str(self._wish.kernel.modules),
            "LAB_CWD": os.getcwd(),
            **self.results_variable,
            **self._wish.variables,
        }
        # Null-terminated, because a value may contain any other byte.
        (self.directory / "environment").write_bytes(
            b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in variables.items())
        )
        (self.directory / "command").write_bytes(
            b"".join(os.fsencode(word) + b"\0" for word in command)
        )

    def _start(self) -> subprocess.Popen[bytes]:
        wish = self._wish
        ends = [os.pipe() for _ in ("stdout", "stderr")]
        out, err = (write for _read, write in ends)
        self._outputs = {ends[0][0]: sys.stdout.fileno(), ends[1][0]: sys.stderr.fileno()}
        writable = [self.directory, *([wish.results] if wish.results else [])]
        arguments = [
            *([] if wish.kvm else ["--disable-kvm", f"--kopt={_EMULATED_KERNEL}"]),
            *("--mods=auto", "--force-9p", "--kimg", wish.kernel.image, "--cpus", wish.cpus),
            *("--memory", wish.memory, "--name", "lab", "--show-boot-console"),
            *(f"--overlay-rwdir={path}" for path in _OVERLAYS if Path(path).is_dir()),
            *(f"--rwdir={path}" for path in writable),
            *(f"--kopt={option}" for option in _KERNEL_OPTIONS),
            *(f"--qemu-opt={option}" for option in self._devices(out, err)),
            f"--script-sh=exec bash {_GUEST / 'main.sh'} {self.directory}",
        ]
        with self.console.open("ab") as console:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--",
                 sys.executable, "-P", "-c", _VIRTME, *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=console,
                pass_fds=(out, err), start_new_session=True, cwd="/",
                env={**os.environ, "PATH": path(), "PYTHONPATH": ""},
            )  # fmt: skip
        os.close(out)
        os.close(err)
        return process

    def _devices(self, out: int, err: int) -> list[str]:
        options = [] if self._wish.kvm else ["-cpu", _EMULATED_CPU, *_FEW_DESCRIPTORS]
        if self._wish.in_turn and not self._wish.kvm:
            options += ["-accel", _IN_TURN]
        options += [
            *("-fsdev", "local,id=lab-root,path=/,security_model=none,readonly=on,multidevs=remap"),
            *("-device", "virtio-9p-pci,fsdev=lab-root,mount_tag=lab.root"),
            *("-device", "virtio-serial-pci,id=lab"),
        ]
        for name, descriptor in (("out", out), ("err", err)):
            options += [
                *("-chardev", f"file,id=lab-{name},path=/proc/self/fd/{descriptor}"),
                *("-device", f"virtserialport,bus=lab.0,name=lab.{name},chardev=lab-{name}"),
            ]
        if self._wish.network or self._wish.forwards:
            forwards = "".join(
                f",hostfwd=tcp:127.0.0.1:{host}-10.0.2.15:{guest}"
                for host, guest in self._wish.forwards
            )
            options += [
                *("-netdev", f"user,id=lab-net{forwards}"),
                *("-device", "virtio-net-pci,netdev=lab-net,romfile="),
            ]
        return options


# An emulated processor works through a string instruction (rep movs, rep stos) step by step. Where
# it has these features the kernel and the C library copy with them, a byte a step: two to six times
# slower than with other loops.
_EMULATED_CPU = "max,-erms,-fsrm"
_EMULATED_KERNEL = "clearcpuid=rep_good"
# With a thread for each processor every atomic instruction is one of the host, too, and who waits
# for a lock burns the time of the thread that has it. With one thread a guest takes a fifth to a
# third less (docs/lab.md).
_IN_TURN = "tcg,thread=single"
# Each queue of a device has a descriptor that qemu's main loop waits for, and a device of serial
# ports has 64 queues: with virtme-ng's seven devices a wake-up looked at 450 of them, which took a
# quarter of the guest's processor time. What the guest asks for is done at once instead.
_FEW_DESCRIPTORS = (
    *("-global", "virtio-pci.ioeventfd=off"),
    *("-global", f"virtio-serial-device.max_ports={_MOST_PORTS}"),
)
_KERNEL_OPTIONS = (
    "ignore_loglevel",
    "oops=panic",  # a damaged kernel is of no use; without this it goes on without one task
    "net.ifnames=0",
    "no_timer_check",  # on a busy host the emulated timer is late, and the kernel gives up
    "tsc=reliable",  # other clocks are emulated devices, and slow to read
    "mitigations=off",
    "no5lvl",
    "init_on_alloc=0",  # else each page is written once more
    f"PATH={_GUEST / 'bin'}:/sbin:/usr/sbin:/bin:/usr/bin",  # virtme-ng's init adds to it
)
