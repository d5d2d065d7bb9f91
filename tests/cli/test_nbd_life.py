"""``iserblk nbd``, our server, from its start to its end: signals, absent targets, systemd."""

from __future__ import annotations

import errno
import fcntl
import signal
import socket
import ssl
import subprocess
import termios
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from iserblk.nbd.client import MANY
from tests.cli.commands import COMMAND, bad, environment, serving
from tests.contract.nbd_servers import libnbd
from tests.support import nbd_client
from tests.support.certificates import Authority
from tests.support.nbd_client import Reply, write
from tests.support.nbdkit import need, run
from tests.support.target import END_S, TargetProcess, running_target
from tests.support.until import until, until_blocking

nbd = libnbd()
MIB = 1 << 20
SIZE = 16 * MIB


@pytest.fixture
def target(tmp_path: Path) -> Iterator[TargetProcess]:
    spec = f"{tmp_path}/lun:size={SIZE}"
    with running_target([spec], tmp_path / "target.log") as running:
        yield running


def connected(uri: str) -> Any:
    client = nbd.NBD()
    client.connect_uri(uri)
    return client


def in_flight(client: Any, count: int) -> list[int]:
    """Cookies of writes that have left. With ``count`` below eight all are received at once."""
    data = nbd.Buffer.from_bytearray(bytearray(b"x" * 4096))
    return [client.aio_pwrite(data, number * 4096) for number in range(count)]


def answered(client: Any, cookies: list[int]) -> bool:
    """Wait until all have succeeded."""
    waiting = set(cookies)
    while waiting:
        waiting -= {cookie for cookie in waiting if client.aio_command_completed(cookie)}
        if waiting:
            client.poll(-1)
    return True


def unreceived(fd: int) -> int:
    """Of what was sent to a Unix socket, how much its other end has not received."""
    left = array("i", [1])
    fcntl.ioctl(fd, termios.TIOCOUTQ, left)
    return left[0]


def arrived(client: Any) -> bool:
    """Wait until the server has received all that was sent (over a Unix socket)."""
    until_blocking(lambda: not unreceived(client.aio_get_fd()))
    return True


def connects(path: Path) -> bool:
    """The server takes connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0.2)
        try:
            probe.connect(str(path))
            return probe.recv(8) == b"NBDMAGIC"
        except OSError:
            return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_in_flight_is_answered_first(
    target: TargetProcess, tmp_path: Path, number: signal.Signals
) -> None:
    with serving("nbd", target.url, "--socket", tmp_path / "s", log=tmp_path / "log") as server:
        client = connected(server.url)
        target.pause()
        cookies = in_flight(client, 5)
        assert arrived(client)
        server.process.send_signal(number)
        until_blocking(lambda: not connects(tmp_path / "s"))
        target.resume()
        assert answered(client, cookies)
        server.process.communicate(timeout=END_S)
        assert server.process.returncode == 128 + number
    assert (tmp_path / "log").read_text() == ""
    assert (tmp_path / "lun").read_bytes()[: 5 * 4096] == b"x" * 5 * 4096


def test_told_again_at_once_it_waits_for_the_target(target: TargetProcess, tmp_path: Path) -> None:
    """timeout(1) sends its signal twice, for example."""
    log = tmp_path / "log"
    with serving("nbd", target.url, "--socket", tmp_path / "s", log=log) as server:
        client = connected(server.url)
        client.pwrite(b"x" * 4096, MIB)
        target.pause()
        try:
            cookies = in_flight(client, 5)
            assert arrived(client)
            server.process.send_signal(signal.SIGTERM)
            until_blocking(lambda: not connects(tmp_path / "s"))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                server.process.send_signal(number)
        finally:
            target.resume()
        assert answered(client, cookies)
        server.process.communicate(timeout=END_S)
        assert server.process.returncode == 143
    assert log.read_text() == ""


def test_told_again_later_it_does_not_wait_for_the_target(
    target: TargetProcess, tmp_path: Path
) -> None:
    """And says what was not flushed."""
    log = tmp_path / "log"
    with serving("nbd", target.url, "--socket", tmp_path / "s", log=log) as server:
        client = connected(server.url)
        client.pwrite(b"x" * 4096, MIB)
        target.pause()
        try:
            in_flight(client, 5)
            assert arrived(client)
            server.process.send_signal(signal.SIGTERM)
            until_blocking(lambda: not connects(tmp_path / "s"))
            assert server.process.poll() is None

            def told_again() -> bool:
                server.process.send_signal(signal.SIGTERM)
                return "told twice to end" in log.read_text()

            until_blocking(told_again)  # for as long as a user has patience
        finally:
            target.resume()
        server.process.communicate(timeout=END_S)
        assert server.process.returncode == 1
    assert not (tmp_path / "s").exists()
    assert log.read_text().splitlines() == [
        "iserblk: told twice to end: not waiting for the target",
        "iserblk: lun0: not flushed: 4096 bytes written since the last flush may be lost",
    ]


async def test_requests_behind_those_that_wait_for_an_absent_target(
    target: TargetProcess, tmp_path: Path
) -> None:
    """At the end: what was received fails, and what was not has no answer. Both are said."""
    log = tmp_path / "log"
    words = ("nbd", f"{target.url}/0?io-timeout=2", "--socket", tmp_path / "s")
    with serving(*words, log=log) as server:
        async with await nbd_client.connected(tmp_path / "s") as client:
            await client.send(write(b"before", 0, 50))
            assert await client.reply() == Reply(0, 50)
            target.kill()
            await client.send(b"".join(write(b"x", 0, number) for number in range(MANY)))
            fd = client.stream.socket.fileno()  # type: ignore[attr-defined]
            await until(lambda: not unreceived(fd))
            await client.send(write(b"x", 0, 99))
            server.process.send_signal(signal.SIGTERM)
            found = await client.replies(dict.fromkeys(range(MANY), 0))
            assert {reply.error for reply in found.values()} == {errno.EIO}
            assert await client.end() == b""
        server.process.communicate(timeout=END_S)
        assert server.process.returncode == 1
    said = log.read_text().splitlines()
    about_clients = [line for line in said if line.startswith("iserblk: NBD client: ")]
    # One was with the session, which tells of it itself; the others waited for that one.
    assert len(about_clients) == MANY - 1 + 1
    assert sum("command 0x88 did not end within 2 s" in line for line in said) == 1
    assert sum("requests that it has not received" in line for line in about_clients) == 1
    assert said[-1].startswith("iserblk: lun0: the last flush failed, data may be lost: 512 u")


@pytest.mark.parametrize("more", [(), ("--nbdkit",)], ids=["own", "nbdkit"])
def test_a_target_that_is_away_at_the_end(
    target: TargetProcess, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """What was not flushed may be lost: that is said, and is the exit status."""
    if more:
        need("nbdkit")
    log = tmp_path / "log"
    words = ("nbd", f"{target.url}/0?io-timeout=1", "--socket", tmp_path / "s", *more)
    with serving(*words, log=log) as server:
        client = connected(server.url)
        client.pwrite(b"x" * 4096, 0)
        if more:
            client.shutdown()  # nbdkit waits for clients that are idle
        target.kill()
        server.process.send_signal(signal.SIGTERM)
        server.process.communicate(timeout=END_S)
        assert server.process.returncode == 1
    said = log.read_text().splitlines()[-1]
    assert "iserblk: lun0: the last flush failed, data may be lost: 4096 unflushed bytes: " in said


def test_a_target_that_is_away_and_was_only_read(target: TargetProcess, tmp_path: Path) -> None:
    words = ("nbd", f"{target.url}/0?io-timeout=1", "--socket", tmp_path / "s")
    with serving(*words, log=tmp_path / "log") as server:
        connected(server.url).pread(4096, 0)
        target.kill()
        assert server.end(signal.SIGTERM) == 143


def test_requests_wait_for_a_target_that_is_restarted(
    target: TargetProcess, tmp_path: Path
) -> None:
    """So does a client that connects meanwhile."""
    words = ("nbd", f"{target.url}/0?io-timeout=60", "--socket", tmp_path / "s")
    with serving(*words, log=tmp_path / "log") as server:
        client = connected(server.url)
        client.pwrite(b"before", 0)
        target.kill()
        cookies = in_flight(client, 5)
        late = nbd.NBD()
        late.aio_connect_unix(str(tmp_path / "s"))
        assert arrived(client)
        with running_target(
            [f"{tmp_path}/lun:size={SIZE}"], tmp_path / "target.log", target.listen
        ):
            assert answered(client, cookies)
            while late.aio_is_connecting():
                late.poll(-1)
            assert late.get_size() == SIZE
            assert late.pread(4096, 4096) == b"x" * 4096
            for each in (client, late):
                each.shutdown()
            assert server.end(signal.SIGTERM) == 143


def test_a_killed_server_leaves_a_socket_that_the_next_replaces(
    target: TargetProcess, tmp_path: Path
) -> None:
    path = tmp_path / "s"
    words = ("nbd", target.url, "--socket", path)
    with serving(*words, log=tmp_path / "log") as server:
        connected(server.url).pwrite(b"x", 0)
        server.process.kill()
        server.process.wait()
    assert path.exists()
    with serving(*words, log=tmp_path / "log") as server:
        assert connected(server.url).pread(1, 0) == b"x"
        assert server.end(signal.SIGTERM) == 143
    assert not path.exists()


def test_read_only(target: TargetProcess, tmp_path: Path) -> None:
    words = ("nbd", target.url, "--socket", tmp_path / "s", "--read-only")
    with serving(*words, log=tmp_path / "log") as server:
        client = connected(server.url)
        assert client.is_read_only()
        client.set_strict_mode(0)
        for call in (
            lambda: client.pwrite(b"x" * 512, 0),
            lambda: client.trim(4096, 0),
            lambda: client.zero(4096, 0),
        ):
            with pytest.raises(nbd.Error) as caught:
                call()  # type: ignore[no-untyped-call]
            assert caught.value.errno == "EPERM"
        assert client.pread(4096, 0) == bytes(4096)
        client.shutdown()
        assert server.end(signal.SIGTERM) == 143


# --- systemd -------------------------------------------------------------------------------------


@contextmanager
def activated(log: Path, listens: list[str], *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """The command, as a socket unit would start it when a client connects."""
    need("systemd-socket-activate")
    options = [word for listen in listens for word in ("-l", listen)]
    passed = [f"-E{name}" for name in ("PATH", "PYTHONPATH", "HOME") if name in environment()]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            ["systemd-socket-activate", *options, *passed, *COMMAND, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=environment(),
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("server", [(), ("--nbdkit",)])
def test_socket_activation(target: TargetProcess, tmp_path: Path, server: tuple[str, ...]) -> None:
    """The client whose connection has started the server is served, too."""
    need("nbdinfo", *(["nbdkit"] if server else []))
    path, log = tmp_path / "s", tmp_path / "log"
    with activated(log, [str(path)], "nbd", target.url, *server) as process:
        until_blocking(path.exists)
        uri = f"nbd+unix:///?socket={path}"
        assert run("nbdinfo", "--size", uri).strip() == str(SIZE)
        assert process.stdout is not None
        assert process.stdout.readline().decode().strip() == f"ready {uri}"
        process.terminate()
        assert process.wait(END_S) == 143
    assert path.exists()  # it is systemd's


def test_two_sockets_of_systemd(target: TargetProcess, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with activated(tmp_path / "log", [*map(str, paths)], "nbd", target.url) as process:
        until_blocking(lambda: all(path.exists() for path in paths))
        clients = [connected(f"nbd+unix:///?socket={path}") for path in paths]
        clients[0].pwrite(b"by a", 0)
        assert clients[1].pread(4, 0) == b"by a"
        for client in clients:
            client.shutdown()
        process.terminate()
        assert process.wait(END_S) == 143


def test_a_socket_of_systemd_and_another_place(target: TargetProcess, tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = ("nbd", target.url, "--socket", tmp_path / "t")
    with (
        activated(log, [str(tmp_path / "s")], *words) as process,
        socket.socket(socket.AF_UNIX) as client,
    ):
        until_blocking(lambda: not client.connect_ex(str(tmp_path / "s")))
        assert process.wait(END_S) == 7
    assert "or a socket unit of systemd" in log.read_text().splitlines()[-1]


# --- what is refused -----------------------------------------------------------------------------


def test_options_that_do_not_go_together(target: TargetProcess, tmp_path: Path) -> None:
    words = ("nbd", target.url, "--socket", tmp_path / "s")
    assert "--threads is for nbdkit: add --nbdkit" in bad(7, *words, "--threads", "4")
    assert "--filter is for nbdkit: add --nbdkit" in bad(7, *words, "--filter", "log")
    for option in (("--tls-certificates", tmp_path), ("--tls-psk", "x"), ("--tls-verify-peer",)):
        assert "without --tls: add" in bad(7, *words, *option)
    assert "give either" in bad(7, *words, "--tls", "on")
    both = ("--tls-certificates", tmp_path, "--tls-psk", "x")
    assert "give either" in bad(7, *words, "--tls", "on", *both)
    assert "it has no ca-cert.pem" in bad(7, *words, "--tls", "on", "--tls-certificates", tmp_path)
    assert "'maybe'" in bad(7, *words, "--tls", "maybe")
    assert not (tmp_path / "s").exists()


@pytest.mark.skipif(
    hasattr(ssl.SSLContext, "set_psk_server_callback"), reason="this Python has pre-shared keys"
)
def test_pre_shared_keys_where_python_has_none(target: TargetProcess, tmp_path: Path) -> None:
    words = ("nbd", target.url, "--socket", tmp_path / "s", "--tls", "require", "--tls-psk")
    assert "this Python has no pre-shared keys" in bad(27, *words, tmp_path / "keys")


def test_tls_in_a_process_of_its_own(target: TargetProcess, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    options = ("--tls", "require", "--tls-certificates", authority.server(tmp_path / "server"))
    words = ("nbd", target.url, "--socket", tmp_path / "s", *options, "--tls-verify-peer")
    with serving(*words, log=tmp_path / "log") as server:
        client = nbd.NBD()
        client.set_tls(nbd.TLS_REQUIRE)
        client.set_tls_certificates(str(authority.client(tmp_path / "client")))
        client.connect_unix(str(tmp_path / "s"))
        client.pwrite(b"secret", 0)
        assert client.pread(6, 0) == b"secret"
        client.shutdown()
        assert server.end(signal.SIGTERM) == 143
