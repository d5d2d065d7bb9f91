"""``iserblk nbd``: runs nbdkit with the plugin of this project, in the foreground.

The listening socket is made here and handed over as systemd does it (sd_listen_fds(3)). So port 0
is possible, and errors of the address have our own texts. nbdkit ends when this process ends, even
if this process is killed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import click

from iserblk.cli.notify import ready, tell_systemd
from iserblk.cli.options import connection, connection_options
from iserblk.credentials import Handed, handed_on
from iserblk.disk.blocking import open_disks
from iserblk.errors import BadArgument, Busy, IserblkError, PermissionDenied
from iserblk.metrics.address import default_option, words
from iserblk.nbd.kernel.programs import PLUGIN, nbdkit_environment, nbdkit_program

# LISTEN_PID must be nbdkit's pid: the shell has that pid already, because exec keeps it.
_HAND_OVER = 'exec 3<&0 </dev/null; export LISTEN_FDS=1 LISTEN_PID=$$; exec "$@"'
_BACKLOG = 128
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 60.0


@click.command("nbd")
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@click.option("--socket", "path", metavar="PATH", help="Listen on a Unix socket.")
@click.option("--listen", metavar="HOST:PORT", help="Listen on TCP; port 0: any free port.")
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    default=32,
    show_default=True,
    help="Requests that one client may have in flight.",
)
@connection_options
def command(
    urls: tuple[str, ...],
    path: str | None,
    listen: str | None,
    threads: int,
    **options: str | None,
) -> None:
    """Export the LUNs of URL… over NBD, until SIGTERM or SIGINT.

    Prints `ready NBD-URI` once clients can connect. The exports are called lun0, lun1, …; the
    default export is that of the first URL. There is no authentication: every client that reaches
    the socket can read and write.
    """
    if (path is None) == (listen is None):
        raise click.UsageError("Give either --socket PATH or --listen HOST:PORT.")
    given = connection(options)
    nbdkit = nbdkit_program()
    # Errors of the URLs are found here, because nbdkit has one exit status for all errors.
    open_disks(urls, given).close()
    listening = _unix(path) if path is not None else _tcp(listen or "")
    with listening as (sock, uri), _handed(sock, urls, given) as handed:
        arguments = [nbdkit, "--exit-with-parent", "--threads", str(threads)]
        plugin = ["python", str(PLUGIN), *(f"uri={url}" for url in handed.urls)]
        plugin += [f"{name}={value}" for name, value in handed.options.items()]
        status = _serve(sock, arguments, plugin, uri, handed.descriptors)
    sys.exit(status)


@contextlib.contextmanager
def _handed(sock: socket.socket, urls: tuple[str, ...], given: dict[str, str]) -> Iterator[Handed]:
    """URLs and options for nbdkit, without secrets. By default metrics are served at a Unix socket
    whose name comes from the address of ``sock``."""
    bound = sock.getsockname()
    place = bound if sock.family == socket.AF_UNIX else words((bound[0], bound[1]))
    with handed_on(urls, {**default_option(place), **given}) as handed:
        yield handed


def _serve(
    sock: socket.socket, arguments: list[str], plugin: list[str], uri: str, descriptors: list[int]
) -> int:
    """Run nbdkit until it ends, with ``descriptors``; returns the exit status."""
    told = 0

    def end(number: int, _frame: FrameType | None) -> None:
        nonlocal told
        told = number
        child.terminate()

    with tempfile.TemporaryDirectory(prefix="iserblk-") as scratch:
        pid_file = Path(scratch) / "pid"
        child = subprocess.Popen(
            ["/bin/sh", "-c", _HAND_OVER, "sh", *arguments, "--pidfile", str(pid_file), *plugin],
            stdin=sock.fileno(),
            env=nbdkit_environment(),
            pass_fds=descriptors,
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        try:
            if _wait_for(pid_file, child):
                ready(uri)
            child.wait()
        finally:
            _end(child)
    tell_systemd("STOPPING=1")
    if told:
        return 128 + told
    if child.returncode:
        raise IserblkError(f"nbdkit ended with status {child.returncode}")
    return 0


def _wait_for(pid_file: Path, child: subprocess.Popen[bytes]) -> bool:
    """True once nbdkit takes connections, False when it ended before that. Raises IserblkError
    after ``_START_TIMEOUT_S``."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while child.poll() is None:
        if pid_file.exists():
            return True
        if time.monotonic() > deadline:
            raise IserblkError(f"nbdkit is not ready after {_START_TIMEOUT_S:g} s")
        time.sleep(0.01)
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """End nbdkit if it still runs: it flushes first; after ``_END_TIMEOUT_S`` it is killed."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


@contextlib.contextmanager
def _unix(path: str) -> Iterator[tuple[socket.socket, str]]:
    path = os.path.abspath(path)
    _remove_stale(path)
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.bind(path)
        except OSError as error:
            words = error.strerror or str(error)
            raise refusal(error)(f"--socket {path}: {words}") from None
        try:
            sock.listen(_BACKLOG)
            yield sock, f"nbd+unix:///?socket={quote(os.fsencode(path))}"
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _remove_stale(path: str) -> None:
    """Remove a socket at ``path`` on which no process listens. Raises BadArgument if ``path`` is
    something else, Busy if a server listens there."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise BadArgument(f"--socket {path}: exists, and is no socket")
    except OSError:
        return  # does not exist, or cannot be looked at: then bind raises
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        except OSError:
            return
        else:
            raise Busy(f"--socket {path}: another server listens there")


@contextlib.contextmanager
def _tcp(listen: str) -> Iterator[tuple[socket.socket, str]]:
    host, colon, port = listen.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = port.isascii() and port.isdigit() and len(port) <= 5
    if not colon or not host or not number or int(port) > 0xFFFF:
        raise BadArgument(f"--listen {listen}: give HOST:PORT, e.g. 127.0.0.1:10809 (port 0: any)")
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
            raise refusal(error)(f"--listen {listen}: {error.strerror}") from None
        bound = sock.getsockname()
        shown = f"[{bound[0]}]" if family == socket.AF_INET6 else bound[0]
        yield sock, f"nbd://{shown}:{bound[1]}"


def refusal(error: OSError) -> type[IserblkError]:
    denied = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), PermissionDenied)
    kinds: dict[int, type[IserblkError]] = {errno.EADDRINUSE: Busy, **denied}
    return kinds.get(error.errno or 0, BadArgument)
