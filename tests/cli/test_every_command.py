"""Every command against a real target, and mistakes in its arguments."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.cli.commands import COMMAND, bad, environment
from tests.support.fuse import need_fuse
from tests.support.target import IQN

# --- info --------------------------------------------------------------------------------------


# --- copy --------------------------------------------------------------------------------------


# --- trim, bench -------------------------------------------------------------------------------


# --- nbd ---------------------------------------------------------------------------------------


# --- mount, umount -----------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["mount {url} place", "mount -f {url} place", "umount place"])
def test_in_a_directory_that_is_gone(words: str, url: str, tmp_path: Path) -> None:
    need_fuse()
    gone = tmp_path / "gone"
    gone.mkdir()
    command = shlex.join([*COMMAND, *words.format(url=url).split()])
    done = subprocess.run(
        ["sh", "-c", f"rmdir {shlex.quote(str(gone))}; exec {command}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=gone,
        env=environment(),
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("iserblk: place: the current directory is gone"), done.stderr


# --- URLs, portals, targets, LUNs --------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("disk", 7, "no scheme"),
        ("http://host/x", 7, "unknown scheme"),
        ("iser:///iqn.2026-11.example:a", 7, "no host"),
        ("iser://host", 7, "names no target"),
        ("iser://host/", 7, "names no target"),
        ("iser://host:99999/iqn.2026-11.example:a", 7, "port"),
        ("iser://host:x/iqn.2026-11.example:a", 7, "port"),
        ("iser://[::1/iqn.2026-11.example:a", 7, "without ]"),
        ("iser://host/disk", 7, "no iSCSI name"),
        ("iser://host/iqn.2026-11.example:a/x", 7, "LUN 'x'"),
        ("iser://host/iqn.2026-11.example:a/99999", 7, "LUN '99999'"),
        ("iser://host/iqn.2026-11.example:a/0?frob=1", 7, "unknown option"),
        ("iser://host/iqn.2026-11.example:a/0?io-timeout=x", 7, "io-timeout"),
        ("iser://host/iqn.2026-11.example:a/0?io-timeout=5&io-timeout=5", 7, "given twice"),
        ("iser://host/iqn.2026-11.example:a/0?", 7, "empty option"),
        ("iser://user%hush@no.such.host.invalid/iqn.2026-11.example:a", 23, "no.such.host"),
        ("iser://u%hush@host/iqn.2026-11.example:a?target-password=hush", 7, "both secrets"),
        ("iser://hush@host/iqn.2026-11.example:a", 7, "without a secret"),
        ("iscsi://host/iqn.2026-11.example:a?rcap=verbs", 27, "means TCP"),
        ("iser://host/iqn.2026-11.example:a?data_digest=crc32c", 27, "no iSCSI digests over iSER"),
        ("iser://host/iqn.2026-11.example:a/0?header=13", 7, "say 28 or 12"),
        ("iscsi://host/iqn.2026-11.example:a/0?hello=yes", 27, "leave it out"),
        ("iscsi://host/iqn.2026-11.example:a?style=cm", 27, "means TCP"),
        ("iser://host/iqn.2026-11.example:a/0?style=stream&rcap=verbs", 27, "style=stream"),
        ("iser://no.such.host.invalid/iqn.2026-11.example:a", 23, "no.such.host.invalid"),
    ],
)
def test_bad_urls(text: str, status: int, words: str) -> None:
    line = bad(status, "info", text)
    assert words in line
    assert "hush" not in line


@pytest.mark.skipif(os.path.exists("/dev/infiniband"), reason="this machine has RDMA devices")
def test_verbs_without_a_device() -> None:
    line = bad(27, "info", "iser://host/iqn.2026-11.example:a/0?rcap=verbs")
    assert "rcap=verbs: " in line and "or say rcap=iwarp" in line


def test_no_such_target_or_lun(url: str) -> None:
    portal = url.split("/")[2]
    assert f"{portal}: no target {IQN}x" in bad(21, "info", f"{url}x")
    assert "no LUN 7" in bad(21, "info", f"{url}/7")


def test_nobody_listens() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and does not listen
        port = reserved.getsockname()[1]
        assert f"127.0.0.1:{port}" in bad(4, "info", f"iser://127.0.0.1:{port}/{IQN}")


def test_something_else_listens() -> None:
    """A server that speaks first, as SSH and SMTP servers do, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        bad(4, "info", f"iser://127.0.0.1:{port}/{IQN}")
        thread.join()
