"""Which processes are iserblk's, and which variables concern it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from iserblk.doctor.machine import Machine
from iserblk.doctor.processes import hidden, processes, variables
from tests.doctor.box import Box
from tests.support.until import until_blocking


def run(box: Box, pid: int, *words: str, environ: str = "A=1\0B=x=y\0wrong\0") -> None:
    box.put(f"proc/{pid}/cmdline", "".join(f"{word}\0" for word in words))
    box.put(f"proc/{pid}/environ", environ)


@pytest.mark.parametrize(
    "words",
    [
        ("iserblk", "nbd"),
        ("/usr/bin/python3", "-P", "/usr/bin/iserblk", "attach", "iser://h/x"),
        ("python", "-m", "iserblk.cli", "info"),
        ("sudo", "-E", "iserblk", "mount"),
        ("nbdkit", "-U", "/s", "python", "/usr/lib/nbd_plugin/iserblk.py", "uri=x"),
        ("/sbin/mount.iserblk", "iser://h/x", "/mnt"),
    ],
)
def test_ours(words: tuple[str, ...], box: Box) -> None:
    run(box, 1_000_000_001, *words)
    (found,) = processes(box.machine)
    assert (found.pid, found.words, found.uid) == (1_000_000_001, words, os.geteuid())
    assert found.environment == {"A": "1", "B": "x=y"}
    assert found.directory == "/"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("vim", "/etc/iserblk/disk.conf"),
        ("grep", "-r", "a", "b", "c", "d", "e", "f", "g", "h", "iserblk"),
        ("kworker/iser",),
    ],
)
def test_not_ours(words: tuple[str, ...], box: Box) -> None:
    run(box, 1_000_000_001, *words)
    assert processes(box.machine) == []


def test_in_the_order_of_their_numbers_without_this_one(box: Box) -> None:
    for pid in (1_000_000_010, 1_000_000_009, os.getpid()):
        run(box, pid, "iserblk", "info")
    box.put("proc/1000000011x/cmdline", "iserblk\0")
    assert [each.pid for each in processes(box.machine)] == [1_000_000_009, 1_000_000_010]


def test_a_process_of_this_machine() -> None:
    words = ["iserblk", "-c", "input()", "info"]
    with subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE) as process:
        try:  # its command line is there a moment after it was started
            until_blocking(lambda: process.pid in [each.pid for each in processes(Machine())])
            (found,) = [each for each in processes(Machine()) if each.pid == process.pid]
        finally:
            process.kill()
    assert found.words == ("iserblk", "-c", "input()", "info")
    assert found.directory == os.getcwd() and found.environment is not None


def test_variables() -> None:
    environment = {
        "LIBISCSI_CHAP_PASSWORD": "hush",
        "LIBISCSI_CHAP_TARGET_PASSWORD": "hush",
        "LIBISCSI_CHAP_USERNAME": "alice",
        "ISERBLK_PLAIN": "1",
        "SHELL": "/bin/sh",
    }
    assert dict(variables(environment)) == {
        "LIBISCSI_CHAP_PASSWORD": None,
        "LIBISCSI_CHAP_TARGET_PASSWORD": None,
        "LIBISCSI_CHAP_USERNAME": "alice",
        "ISERBLK_PLAIN": "1",
    }


def test_processes_that_are_hidden(box: Box) -> None:
    assert not hidden(Machine())
    box.put("proc/self/cmdline")
    assert hidden(box.machine)
    box.put("proc/1/cmdline")
    assert not hidden(box.machine)
