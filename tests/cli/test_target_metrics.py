"""Metrics of ``iserblk target``: where they are served, to whom, and who cannot spoil them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.iscsi import bhs, pdu
from iserblk.metrics.serving import CLIENTS
from iserblk.scsi import luns
from tests.cli.commands import Server, bad, good, good_json, iserblk, serving
from tests.iscsi import logins
from tests.support.ports import free_port
from tests.support.target import IQN
from tests.support.until import until_blocking

KIB = 1 << 10


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path, for names of sockets."""
    with tempfile.TemporaryDirectory(prefix="iserblk.") as directory:
        yield Path(directory)


@contextlib.contextmanager
def target(
    tmp_path: Path, *words: object, iqn: str = IQN, lun: str = "lun", run: Path | None = None
) -> Iterator[Server]:
    """``run``: the directory below which users other than root have their sockets."""
    changes = {"XDG_RUNTIME_DIR": str(run)} if run is not None else {}
    spec = f"{tmp_path}/{lun}:size=1M"
    with serving(
        "target", "--listen", "127.0.0.1:0", "--iqn", iqn, "--lun", spec, *words,
        log=tmp_path / "log", **changes,
    ) as server:  # fmt: skip
        yield server


def stats(place: object) -> dict[str, object]:
    found = good_json("stats", place)
    assert found["luns"] == []
    (one,) = found["targets"]
    assert isinstance(one, dict)
    return one


def unfolded(report: str) -> str:
    """A report with its titles in one line each."""
    return report.replace("\n    ", " ")


def logged_in(url: str, pairs: logins.Pairs) -> socket.socket:
    """A session over TCP, past its unit attention."""
    host, _, port = url.split("/")[2].rpartition(":")
    sock = socket.create_connection((host, int(port)))
    head, data = logins.request([("InitiatorName", "iqn.x:y"), ("TargetName", IQN), *pairs])
    sock.sendall(head + data + bytes(-len(data) & 3))
    answer(sock)
    ready = pdu.ScsiCommand(
        flags=bhs.FLAG_FINAL, lun=bytes(8), itt=1, edtl=0, cmd_sn=100, exp_stat_sn=0, cdb=bytes(16)
    )
    sock.sendall(ready.pack())
    answer(sock)
    return sock


def answer(sock: socket.socket) -> None:
    head = sock.recv(48, socket.MSG_WAITALL)
    sock.recv(int.from_bytes(head[5:8]) + 3 & ~3, socket.MSG_WAITALL)


def test_at_a_socket_while_a_peer_holds_memory(tmp_path: Path) -> None:
    place = tmp_path / "metrics"
    with target(tmp_path, "--metrics", place) as server:
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        before = stats(place)
        assert (before["target"], before["url"]) == (IQN, server.url)
        assert (before["pid"], before["where"]) == (server.process.pid, str(place))
        assert (before["sessions"], before["memory_bytes"]) == (0, 0)
        assert before["largest_addresses"] == []
        with logged_in(server.url, [("InitialR2T", "No"), ("ImmediateData", "Yes")]) as peer:
            write = pdu.ScsiCommand(
                flags=bhs.FLAG_WRITE, lun=luns.encode(0), itt=2, edtl=64 * KIB, cmd_sn=101,
                exp_stat_sn=0, cdb=(b"\x2a" + bytes(7) + b"\x80").ljust(16, b"\0"),
            )  # fmt: skip
            command = bytearray(write.pack())
            bhs.LENGTHS.pack_into(command, bhs.LENGTHS_OFFSET, 512)
            peer.sendall(command + bytes(512))
            until_blocking(lambda: stats(place)["memory_bytes"] == 64 * KIB)
            held = stats(place)
            assert held["largest_addresses"] == [{"address": "127.0.0.1", "memory_bytes": 64 * KIB}]
            assert (held["session_memory_bytes"], held["in_flight"]) == (64 * KIB, 1)
            shown = good("stats", place)
            assert all(len(each) <= 80 or len(each.split()) == 1 for each in shown.splitlines())
            lines = [" ".join(each.split()) for each in unfolded(shown).splitlines()]
            assert lines[0] == f"{place}: target {server.url}"
            assert any(each.startswith("memory for peers 64.0 KiB of 1.0 GiB,") for each in lines)
            assert "address 127.0.0.1 64.0 KiB" in lines and "sessions 1" in lines
        until_blocking(lambda: not stats(place)["memory_bytes"])
        assert server.end(signal.SIGTERM) == 143
    assert not place.exists()


def test_by_default_they_are_found_by_the_targets_name(tmp_path: Path) -> None:
    """And of two targets of a name by that of the first."""
    iqn = f"iqn.2026-11.example:{tmp_path.name}"

    def shown(*words: str) -> str:
        done = iserblk("stats", *words, XDG_RUNTIME_DIR=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        return unfolded(done.stdout)

    with target(tmp_path, iqn=iqn, run=tmp_path) as server:
        assert shown(iqn).startswith(f"{iqn}: target {server.url}\n")
        assert f"{iqn}: target {server.url}\n" in shown()
        with target(tmp_path, iqn=iqn, lun="other", run=tmp_path) as other:
            assert other.url != server.url
            assert f"target {server.url}\n" in shown(iqn)
            other.end(signal.SIGTERM)
        server.end(signal.SIGTERM)
    assert iserblk("stats", iqn, XDG_RUNTIME_DIR=str(tmp_path)).returncode == 7


def test_what_a_killed_target_left_is_replaced(tmp_path: Path) -> None:
    place = tmp_path / "metrics"
    with target(tmp_path, "--metrics", place) as server:
        server.kill()
    assert place.exists()
    with target(tmp_path, "--metrics", place) as server:
        assert stats(place)["pid"] == server.process.pid


def test_where_they_are_not_served(tmp_path: Path) -> None:
    iqn = f"iqn.2026-11.example:{tmp_path.name}"
    with target(tmp_path, "--metrics", "off", iqn=iqn, run=tmp_path):
        assert iserblk("stats", iqn, XDG_RUNTIME_DIR=str(tmp_path)).returncode == 7
    words = ["target", "--iqn", IQN, "--lun", f"{tmp_path}/lun:size=1M", "--listen", "127.0.0.1:0"]
    line = bad(7, *words, "--metrics", "192.0.2.1:9100")
    assert line.startswith("iserblk: --metrics '192.0.2.1:9100': metrics are served on the loopb")
    assert "give the whole path" in bad(7, *words, "--metrics", "here")
    (tmp_path / "file").touch()
    assert "is no socket; give another path" in bad(7, *words, "--metrics", tmp_path / "file")
    place = tmp_path / "metrics"
    with target(tmp_path, "--metrics", place, lun="other"):
        assert "a process serves there already" in bad(28, *words, "--metrics", place)


def test_the_key_of_the_file(tmp_path: Path) -> None:
    """It takes a restart to change it."""
    place, file = tmp_path / "metrics", tmp_path / "target.toml"
    text = (
        f'iqn = "{IQN}"\nmetrics = "{place}"\nportal = [{{ listen = "127.0.0.1:0" }}]\n'
        '[lun.0]\nfile = "lun"\nsize = "1M"\n'
    )
    file.write_text(text)
    log = tmp_path / "log"
    with serving("target", "--config", file, log=log) as server:
        assert stats(place)["target"] == IQN
        assert [each["lun"] for each in stats(place)["luns"]] == [0]  # type: ignore[attr-defined]
        file.write_text(text.replace(str(place), "off"))
        server.process.send_signal(signal.SIGHUP)
        until_blocking(lambda: "restart the target to change metrics" in log.read_text())
        file.write_text(text.replace("lun.0", "lun.3"))
        server.process.send_signal(signal.SIGHUP)
        until_blocking(
            lambda: [each["lun"] for each in stats(place)["luns"]] == [3]  # type: ignore[attr-defined]
        )
        server.end(signal.SIGTERM)


def test_clients_that_ask_nothing_or_take_nothing(tmp_path: Path) -> None:
    """They keep neither another client nor an initiator out, and have a few descriptors at most."""
    place = ("127.0.0.1", free_port())
    with (
        target(tmp_path, "--metrics", f"{place[0]}:{place[1]}") as server,
        contextlib.ExitStack() as open_,
    ):
        descriptors = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        messages = [b"", b"G", b"GET /metrics HTTP/1.0\r\n\r\n", bytes(8000)]
        for number in range(10 * CLIENTS):
            client = open_.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect(place)
            with contextlib.suppress(OSError):  # it has given way already
                client.sendall(messages[number % len(messages)])
        for _ in range(3):
            assert stats(f"{place[0]}:{place[1]}")["target"] == IQN
            assert good_json("info", server.url)["disks"][0]["lun"] == 0
        now = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        assert now <= descriptors + CLIENTS + 2
        server.end(signal.SIGTERM)
