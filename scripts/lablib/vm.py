"""Starts, watches and ends one guest: a virtual machine, or a kernel in user mode.

The guest has the host's own files, copy-on-write, and a directory that both host and guest may
write. The command's output comes through two pipes.
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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from lablib import user_mode, virtme
from lablib.host import need_host, path
from lablib.setups import TOP
from lablib.wish import Wish

# A guest takes 20 s to boot, on a busy machine a minute. Emulated kernels sometimes hang there.
BOOT_S = 240.0
_POLL_S = 0.05
_DRAIN_S = 1.0
_CONSOLE_LINES = 25
_CHUNK = 1 << 16


class Died(Exception):
    """The guest ended, or was ended, before the command did; the text says how."""


class NotBooted(Died):
    """The guest hangs before it has run anything of the lab: another guest may be started."""


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
        self._held = ExitStack()
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
        self._held.close()

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
            "LAB_USER_MODE": "1" if self._wish.kernel.user_mode else "",
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
        ends = [os.pipe() for _ in ("stdout", "stderr")]
        out, err = (write for _read, write in ends)
        self._outputs = {ends[0][0]: sys.stdout.fileno(), ends[1][0]: sys.stderr.fileno()}
        user = self._wish.kernel.user_mode
        if user:
            processor = self._held.enter_context(user_mode.processor())
            words = user_mode.words(self._wish, self.directory, out, err, processor)
        else:
            words = virtme.words(self._wish, self.directory, out, err)
        with self.console.open("ab") as console:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "--", *map(str, words)],
                stdin=subprocess.DEVNULL, stdout=console if user else subprocess.DEVNULL,
                stderr=console, pass_fds=(out, err), start_new_session=True, cwd="/",
                env={**os.environ, "PATH": path(), "PYTHONPATH": ""},
            )  # fmt: skip
        os.close(out)
        os.close(err)
        return process
