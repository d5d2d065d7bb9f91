"""Where an NBD server listens: Unix sockets, TCP, and what systemd hands over."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import IO

import pytest

from iserblk.errors import BadArgument, Busy
from iserblk.nbd import listening
from tests.support.target import ROOT


def opened(context: AbstractContextManager[object]) -> None:
    with context:
        pass


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.EROFS, 13), (errno.EPERM, 13), (errno.EACCES, 13), (errno.EADDRINUSE, 28)],
)
def test_a_place_that_it_may_not_listen_in_is_no_bad_argument(number: int, status: int) -> None:
    """Directories that do not allow a socket, a read-only file system among them."""
    assert listening.refusal(OSError(number, "")).exit_status == status


# --- Unix sockets --------------------------------------------------------------------------------


def test_a_socket_is_there_while_it_is_used(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening.listen_unix(str(path)) as ((sock,), uri):
        assert uri == f"nbd+unix:///?socket={path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            sock.accept()[0].close()
    assert not path.exists()


def test_the_socket_of_a_successor_stays(tmp_path: Path) -> None:
    """The path was removed, and another server listens there when this one ends."""
    path = tmp_path / "s"
    with listening.listen_unix(str(path)):
        path.unlink()
        with socket.socket(socket.AF_UNIX) as successor:
            successor.bind(str(path))
            opened_at = path.stat().st_ino
    assert path.stat().st_ino == opened_at


def test_a_relative_path_is_absolute_in_the_uri(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with listening.listen_unix("s") as (_, uri):
        assert uri == f"nbd+unix:///?socket={tmp_path}/s"


def test_a_relative_path_works_where_the_whole_one_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sun_path has room for 107 bytes. The URI is for clients in the same directory."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.chdir(deep)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind("s")  # is replaced
    with listening.listen_unix("s") as ((sock,), uri):
        assert uri == "nbd+unix:///?socket=s"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("s")
            sock.accept()[0].close()
        with pytest.raises(Busy, match="another server listens there"):
            opened(listening.listen_unix("s"))
        monkeypatch.chdir("/")
    assert not (deep / "s").exists()
    with pytest.raises(BadArgument, match="107 at most: give a shorter path, or a relative one"):
        opened(listening.listen_unix(str(deep / "s")))


@pytest.mark.parametrize("name", [b"a b?c=d&e#f%41", "zoë".encode(), b"\xff\xfe", b"\n"])
def test_any_name_is_quoted(tmp_path: Path, name: bytes) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/" + name)
    with listening.listen_unix(path) as (_, uri):
        quoted = uri.removeprefix(f"nbd+unix:///?socket={tmp_path}/")
        assert quoted.isascii() and quoted.isprintable()
        assert not set(quoted) & set(" ?=&#\n")


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening.listen_unix(str(path)) as ((sock,), _):
        assert sock.getsockname() == str(path)


def test_another_server_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening.listen_unix(str(path)):
        with pytest.raises(Busy, match="another server listens there"):
            opened(listening.listen_unix(str(path)))
        assert path.exists()


def test_another_server_that_is_too_busy_to_accept_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as client:
        other.bind(str(path))
        other.listen(0)
        client.connect(str(path))  # fills its backlog
        with pytest.raises(Busy, match="another server listens there"):
            opened(listening.listen_unix(str(path)))
        assert path.exists()


def test_a_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("of a user")
    with pytest.raises(BadArgument, match="no socket"):
        opened(listening.listen_unix(str(path)))
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(BadArgument, match="no socket"):
        opened(listening.listen_unix(str(tmp_path / "link")))
    assert path.read_text() == "of a user"


# --- TCP -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", ":", "10809", "host", ":10809", "[]:1", "h:", "h:-1", "h:65536", "h:١", "h:1x", "h:9" * 9],
)
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(BadArgument, match="--listen"):
        opened(listening.listen_tcp(text))


def test_any_port_of_both_families() -> None:
    with listening.listen_tcp("127.0.0.1:0") as ((sock,), uri):
        assert uri == f"nbd://127.0.0.1:{sock.getsockname()[1]}"
    try:
        socket.socket(socket.AF_INET6).close()
        with closing(socket.create_server(("::1", 0), family=socket.AF_INET6)):
            pass
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listening.listen_tcp("[::1]:0") as ((sock,), uri):
        assert uri == f"nbd://[::1]:{sock.getsockname()[1]}"


def test_a_port_in_use() -> None:
    with listening.listen_tcp("127.0.0.1:0") as (_, uri), pytest.raises(Busy, match="in use"):
        opened(listening.listen_tcp(uri.removeprefix("nbd://")))


# --- what systemd hands over ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pid", "count", "found"),
    [
        ("own", "2", 2),
        ("own", "0", 0),
        ("own", "x", 0),
        ("own", "٣", 0),
        ("own", "-1", 0),
        ("1", "2", 0),
        ("", "2", 0),
    ],
)
def test_how_many(monkeypatch: pytest.MonkeyPatch, pid: str, count: str, found: int) -> None:
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()) if pid == "own" else pid)
    monkeypatch.setenv("LISTEN_FDS", count)
    assert listening.handed_over() == found


def test_nothing_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LISTEN_PID", raising=False)
    monkeypatch.delenv("LISTEN_FDS", raising=False)
    assert listening.handed_over() == 0


TAKE = """
import os
import sys
from iserblk.errors import BadArgument
from iserblk.nbd.listening import listen_handed_over
numbers = [int(word) for word in sys.argv[1:]]
for at, number in enumerate(numbers):
    os.dup2(number, 3 + at)
try:
    with listen_handed_over(len(numbers) or 1) as (sockets, uri):
        print(len(sockets), uri, *[each.get_inheritable() for each in sockets])
except BadArgument as error:
    print("refused:", error)
"""


def taken(*given: socket.socket | IO[str]) -> str:
    """What a process says that gets descriptors from 3 on."""
    numbers = [fcntl.fcntl(each.fileno(), fcntl.F_DUPFD, 100) for each in given]
    try:
        done = subprocess.run(
            [sys.executable, "-c", TAKE, *map(str, numbers)],
            capture_output=True,
            text=True,
            check=True,
            pass_fds=numbers,
            cwd=ROOT,
        )
    finally:
        for number in numbers:
            os.close(number)
    return done.stdout.strip()


def test_sockets_are_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as local, socket.create_server(("127.0.0.1", 0)) as tcp:
        local.bind(str(tmp_path / "s"))
        local.listen()
        assert taken(local, tcp) == f"2 nbd+unix:///?socket={tmp_path}/s False False"
        assert taken(tcp) == f"1 nbd://127.0.0.1:{tcp.getsockname()[1]} False"


def test_an_abstract_socket() -> None:
    name = f"\0iserblk-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        assert taken(local) == f"1 nbd+unix:///?socket=%00{name[1:]} False"


def test_what_is_no_listening_socket(tmp_path: Path) -> None:
    no_stream = "refused: LISTEN_FDS: descriptor 3 is no listening Unix or TCP stream socket"
    with (
        socket.socket(socket.AF_UNIX) as silent,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets,
    ):
        packets.bind(str(tmp_path / "s"))
        packets.listen()
        assert taken(silent) == no_stream
        assert taken(datagrams).startswith("refused: LISTEN_FDS: descriptor 3")
        assert taken(packets) == no_stream
    with (tmp_path / "file").open("w") as file:
        assert "descriptor 3: Socket operation on non-socket" in taken(file)
    assert "descriptor 3: Bad file descriptor" in taken()
