"""Network namespaces of a test: hosts and routers on one machine, and what is on their links."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import TypeVar

import pytest

from tests.support import setns
from tests.support.programs import SLOW_S, run

T = TypeVar("T")

_numbers = count()
_NOTHING_MORE_S = 0.5


class Host:
    """One namespace. ``within``: words to put before a command that is to run in it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.within = ["nsenter", f"--net=/run/netns/{name}", "--"]

    def ip(self, *words: str) -> None:
        run("ip", "-netns", self.name, *words)

    def sysctl(self, name: str, value: int) -> None:
        run(*self.within, "sysctl", "-qw", f"{name}={value}")

    def call(self, function: Callable[[], T]) -> T:
        """Call the function in a thread whose sockets are in this namespace."""
        results: list[T] = []
        errors: list[BaseException] = []

        def enter() -> None:
            try:
                setns.enter(self.name)
                results.append(function())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


def make_host(stack: ExitStack, role: str) -> Host:
    """A namespace that is removed with ``stack``. Skips the test where there are none."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    name = f"iserblk-test-{os.getpid()}-{next(_numbers)}-{role}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    stack.callback(run, "ip", "netns", "delete", name)
    host = Host(name)
    host.ip("link", "set", "lo", "up")
    return host


def link(one: Host, other: Host, net: str, mtu: int = 1500) -> None:
    """Join two hosts: ``net``.1 and ``net``.2, on links that are called ``to-`` and their net."""
    name = f"to-{net}"
    peer = ["type", "veth", "peer", "name", name, "mtu", str(mtu), "netns", other.name]
    run("ip", "link", "add", name, "mtu", mtu, "netns", one.name, *peer)
    for host, number in ((one, 1), (other, 2)):
        host.ip("address", "add", f"{net}.{number}/24", "dev", name)
        host.ip("link", "set", name, "up")


@contextmanager
def captured(host: Host, net: str, file: Path) -> Iterator[None]:
    """Write to ``file`` all packets on the host's link to ``net`` while the block runs. They are
    whole: of SCTP tshark decodes nothing else. The buffer (KiB) has a thousand of them, because an
    emulated machine is slow to take them."""
    command = [*host.within, "tcpdump", "-i", f"to-{net}", "-U", "--immediate-mode"]
    command += ["-s", "65535", "-B", "65536", "-w", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        while "listening on" not in line:
            assert line, "tcpdump ended"
            line = process.stderr.readline()
        yield
        # tcpdump ends at once when it is told, whatever it has not taken yet.
        size = -1
        while size != (size := file.stat().st_size):
            time.sleep(_NOTHING_MORE_S)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=SLOW_S)


def counted(file: Path, matching: str) -> int:
    """How many packets of a capture match a filter of tcpdump's. (tshark is slow to start.)"""
    text = run("tcpdump", "-r", str(file), "-nn", "-t", "-q", matching)
    return len(text.splitlines())


def decoded(file: Path, fields: list[str], *options: str) -> list[list[str]]:
    """The fields of each packet, by tshark's own decoders."""
    wanted = [word for field in fields for word in ("-e", field)]
    text = run("tshark", "-r", file, "-n", *options, "-T", "fields", *wanted)
    return [line.split("\t") for line in text.splitlines()]


def need(*programs: str) -> None:
    """Skip the test where a program is missing."""
    for program in programs:
        if subprocess.run(["which", program], capture_output=True, check=False).returncode:
            pytest.skip(f"{program} is not installed: run scripts/setup --tests")
