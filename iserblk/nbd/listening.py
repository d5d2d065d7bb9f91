"""Where an NBD server listens: a Unix socket, TCP, or what systemd hands over.

Each yields listening sockets and an NBD URI for them, and raises in the words of the command line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from urllib.parse import quote

from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied
from iserblk.metrics.address import LONGEST_SOCKET_PATH

_BACKLOG = 1024  # connections that wait to be accepted: as many clients may come at once
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
_FIRST_FD = 3  # sd_listen_fds(3)


def handed_over() -> int:
    """How many sockets the service manager has handed to this process: sd_listen_fds(3)."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return 0
    text = os.environ.get("LISTEN_FDS", "")
    return int(text) if text.isascii() and text.isdigit() else 0


@contextlib.contextmanager
def listen_handed_over(count: int) -> Iterator[tuple[list[socket.socket], str]]:
    """The first ``count`` descriptors that systemd hands over. Raises BadArgument."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for fd in range(_FIRST_FD, _FIRST_FD + count):
            try:
                os.set_inheritable(fd, False)
                sock = stack.enter_context(socket.socket(fileno=fd))
                listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            except OSError as error:
                raise BadArgument(
                    f"LISTEN_FDS: descriptor {fd}: {error.strerror}; it must be a listening socket"
                ) from None
            if not listens or sock.type != socket.SOCK_STREAM or sock.family not in _FAMILIES:
                raise BadArgument(
                    f"LISTEN_FDS: descriptor {fd} is no listening Unix or TCP stream socket"
                )
            sockets.append(sock)
        yield sockets, uri_of(sockets[0])


@contextlib.contextmanager
def listen_unix(path: str) -> Iterator[tuple[list[socket.socket], str]]:
    if not path:
        raise BadArgument("--socket: the path is empty; write --socket PATH")
    # The kernel's own limit is on what it is told, and a relative path may be shorter.
    whole = os.path.abspath(path)
    told = whole if _fits(whole) else path
    if not _fits(told):
        raise BadArgument(
            f"--socket {path}: the path has {len(os.fsencode(path))} bytes, and that of a socket"
            f" has {LONGEST_SOCKET_PATH} at most: give a shorter path, or a relative one"
        )
    path = whole
    _remove_stale(path, told)
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.bind(told)
        except OSError as error:
            words = error.strerror or str(error)
            raise refusal(error)(f"--socket {path}: {words}") from None
        made = os.lstat(path)
        try:
            sock.listen(_BACKLOG)
            yield [sock], uri_of(sock)
        finally:
            # Perhaps it was removed, and another server listens at this path by now.
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(path)
                if (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino):
                    os.unlink(path)


def _fits(path: str) -> bool:
    return len(os.fsencode(path)) <= LONGEST_SOCKET_PATH


def _remove_stale(path: str, told: str) -> None:
    """A socket on which no process listens any more is in the way; anything else is not ours.
    ``told``: the path as the kernel takes it."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise BadArgument(f"--socket {path}: exists, and is no socket")
    except OSError:
        return  # not there, or not to be seen: bind says why
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)  # it would wait for room among those that are to be accepted
        try:
            probe.connect(told)
        except BlockingIOError:
            pass
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except OSError:
            return
        raise Busy(f"--socket {path}: another server listens there")


@contextlib.contextmanager
def listen_tcp(
    listen: str, example: str = "127.0.0.1:10809"
) -> Iterator[tuple[list[socket.socket], str]]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not number or int(port) > 0xFFFF:
        raise BadArgument(f"--listen {listen}: give HOST:PORT, e.g. {example} (port 0: any)")
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:  # the latter: no host could have that name
        words = getattr(error, "strerror", None) or error
        raise BadArgument(f"--listen {listen}: {words}") from None
    family, _, _, _, address = found[0]
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(_BACKLOG)
        except OSError as error:
            words = error.strerror
            if error.errno == errno.EADDRINUSE:
                words = "the port is in use; choose another, or 0"
            elif error.errno == errno.EADDRNOTAVAIL:
                words = "this machine has no such address (`ip address` lists those that it has)"
            raise refusal(error)(f"--listen {listen}: {words}") from None
        yield [sock], uri_of(sock)


def uri_of(sock: socket.socket) -> str:
    """The NBD URI of a listening socket. The path of a Unix socket is relative where it was too
    long otherwise."""
    bound = sock.getsockname()
    if sock.family == socket.AF_UNIX:
        return f"nbd+unix:///?socket={quote(os.fsencode(bound))}"
    host = f"[{bound[0]}]" if sock.family == socket.AF_INET6 else bound[0]
    return f"nbd://{host}:{bound[1]}"


def refusal(error: OSError) -> type[IserblkError]:
    denied = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), PermissionDenied)
    kinds: dict[int, type[IserblkError]] = {errno.EADDRINUSE: Busy, **denied}
    return kinds.get(error.errno or 0, BadArgument)
