"""A process that leaves its terminal."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import logging, sys
from iserblk import background
background.SYSLOG = sys.argv[1]
logging.basicConfig(level=logging.INFO)
print("said", flush=True)
background.log_to_syslog("iserblk-test")
logging.warning("logged")
background.release_streams()
print("not said", flush=True)
print("not said", file=sys.stderr)
sys.stdin.read()
"""


@pytest.mark.parametrize("there", [True, False])
def test_logs_go_to_syslog_and_nothing_to_the_terminal(there: bool, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        if there:
            syslog.bind(str(tmp_path / "log"))
        with subprocess.Popen(
            [sys.executable, "-c", CODE, str(tmp_path / "log")],
            stdin=subprocess.PIPE,  # which stays open: the process ends all the same
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None and process.stderr is not None
            assert (process.stdout.read(), process.stderr.read()) == ("said\n", "")
            assert process.wait() == 0
            if there:
                line = syslog.recv(4096)
                assert f"iserblk-test[{process.pid}]: logged".encode() in line
