"""The server of a device as a process: ready, refused, and its end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from iserblk.nbd import messages as nbd
from iserblk.nbd.kernel.orders import LISTEN, PROGRAM, READY, error_of
from tests.support.target import END_S, TargetProcess


def started(path: Path, *words: str, how: str = LISTEN) -> tuple[subprocess.Popen[bytes], bytes]:
    """The process, and what it has reported."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as pipe:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", PROGRAM, str(path), str(write_end), how, *words],
            pass_fds=[write_end],
            stderr=subprocess.PIPE,
            cwd="/",
        )
        os.close(write_end)
        return process, pipe.read()


def ended(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    """Its status, and what it has said on stderr."""
    _, said = process.communicate(timeout=END_S)
    return process.returncode, said


def uses_an_export(path: Path) -> socket.socket:
    """A client that has come as far as the transmission."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(END_S)
    sock.connect(str(path))
    sock.recv(nbd.GREETING.size, socket.MSG_WAITALL)
    flags = nbd.CLIENT_FLAGS.pack(nbd.FIXED_NEWSTYLE | nbd.NO_ZEROES)
    sock.sendall(flags + nbd.OPTION.pack(nbd.OPTION_MAGIC, nbd.Option.EXPORT_NAME, 0))
    sock.recv(nbd.EXPORT_NAME_REPLY.size, socket.MSG_WAITALL)
    return sock


def test_it_ends_with_its_last_client(target: TargetProcess, tmp_path: Path) -> None:
    """Clients that only look do not count."""
    path = tmp_path / "socket"
    process, said = started(path, f"uri={target.url}/0", "metrics=off")
    assert said == READY
    with socket.socket(socket.AF_UNIX) as passer_by:
        passer_by.connect(str(path))
    first = uses_an_export(path)
    second = uses_an_export(path)
    first.close()
    assert process.poll() is None
    second.close()
    assert ended(process) == (0, b"")
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "status", "error"),
    [
        (["uri={url}/9"], 21, "no LUN 9"),
        (["uri={url}/0", "colour=blue"], 7, "unknown option 'colour'"),
        (["uri=iser://127.0.0.1:1/iqn.2026-11.example:a/0"], 4, "Connection refused"),
    ],
)
def test_it_says_why_it_cannot_serve(
    words: list[str], status: int, error: str, target: TargetProcess, tmp_path: Path
) -> None:
    process, said = started(
        tmp_path / "socket", *(word.format(url=target.url) for word in words), "metrics=off"
    )
    refused = error_of(said)
    assert error in str(refused)
    assert refused.exit_status == status
    assert ended(process) == (status, b"")


def test_a_socket_that_cannot_be_made(target: TargetProcess, tmp_path: Path) -> None:
    process, said = started(tmp_path / "absent" / "socket", f"uri={target.url}/0")
    assert "No such file or directory" in str(error_of(said))
    assert ended(process)[0] == 7
