"""``iserblk nbd``: LUNs over NBD; by our own server, or by nbdkit."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import click

from iserblk.cli.background import Ground, background_options
from iserblk.cli.command import Command, Rare
from iserblk.cli.notify import tell_systemd
from iserblk.cli.options import connection, connection_options
from iserblk.disk.writers import is_shared, note_use
from iserblk.errors import BadArgument
from iserblk.metrics.address import default_option, words
from iserblk.metrics.records import Recorded
from iserblk.named.resolving import Resolved, resolve
from iserblk.nbd import nbdkit, tls
from iserblk.nbd.handshake import Tls
from iserblk.nbd.listening import handed_over, listen_handed_over, listen_tcp, listen_unix
from iserblk.nbd.serving import Terms, serve

_NAME = "iserblk-nbd"  # in syslog
_REQUESTS = 32  # of one client of nbdkit, by default


@click.command("nbd", cls=Command)
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@click.option("--socket", "path", metavar="PATH", help="Listen on a Unix socket.")
@click.option("--listen", metavar="HOST:PORT", help="Listen on TCP; port 0: any free port.")
@click.option("--read-only", is_flag=True, help="Refuse all writes.")
@click.option(
    "--tls",
    "tls_mode",
    type=click.Choice([each.value for each in Tls]),
    default=Tls.OFF.value,
    show_default=True,
    help="on: clients may use TLS; require: they must.",
)
@click.option(
    "--tls-certificates",
    metavar="DIR",
    help="Directory with ca-cert.pem, server-cert.pem, server-key.pem and perhaps ca-crl.pem.",
)
@click.option(
    "--tls-verify-peer", is_flag=True, help="Clients must have a certificate of that CA.", cls=Rare
)
@click.option(
    "--tls-psk",
    metavar="FILE",
    help="Pre-shared keys in place of certificates: lines user:key, in hexadecimal digits.",
    cls=Rare,
)
@click.option(
    "--nbdkit",
    "by_nbdkit",
    is_flag=True,
    help="Serve by nbdkit with the plugin of iserblk.",
    cls=Rare,
)
@click.option(
    "--filter",
    "filters",
    metavar="NAME",
    multiple=True,
    help="A filter of nbdkit; repeatable.",
    cls=Rare,
)
@click.option(
    "--threads",
    type=click.IntRange(1, 1024),
    help=f"With --nbdkit: requests that one client may have in flight. Default {_REQUESTS}.",
    cls=Rare,
)
@background_options(_NAME)
@connection_options
def command(
    urls: tuple[str, ...],
    path: str | None,
    listen: str | None,
    read_only: bool,
    tls_mode: str,
    tls_certificates: str | None,
    tls_verify_peer: bool,
    tls_psk: str | None,
    by_nbdkit: bool,
    filters: tuple[str, ...],
    threads: int | None,
    background: bool,
    pidfile: str | None,
    **options: str | None,
) -> None:
    """Export the LUNs of URL… over NBD, until SIGTERM, SIGINT or SIGHUP. The command stays in the
    foreground, unless --background is given.

    Prints `ready NBD-URI` once clients can connect. The exports are called lun0, lun1, …; the
    default export is that of the first URL. Without --tls there is no authentication: every client
    that reaches the socket can read and write.
    """
    given = connection(options)
    if (path is not None) + (listen is not None) + (handed_over() > 0) != 1:
        raise click.UsageError(
            "Give either --socket PATH or --listen HOST:PORT, or a socket unit of systemd."
        )
    if not by_nbdkit and (filters or threads is not None):
        name = "--filter" if filters else "--threads"
        raise BadArgument(f"{name} is for nbdkit: add --nbdkit")
    security = _Tls(Tls(tls_mode), tls_certificates, tls_verify_peer, tls_psk)
    security.check()
    if background and handed_over():
        raise BadArgument("--background: systemd hands its sockets to what it starts: leave it out")
    with Ground(_NAME, background, pidfile).serving() as ready:
        if by_nbdkit:
            words = ["--threads", str(threads or _REQUESTS)]
            words += [f"--filter={name}" for name in filters] + security.words()
            resolved = resolve(urls, given)
            nbdkit.check(resolved.urls, given, filters)
            with _listening(path, listen, by_nbdkit) as (sockets, uri):
                exports = _Exports(resolved, given, read_only, sockets[0])
                status = exports.by_nbdkit(sockets[0], words, lambda: ready(uri), background)
        else:
            context = security.context()
            resolved = resolve(urls, given)
            with _listening(path, listen) as (sockets, uri):
                exports = _Exports(resolved, given, read_only, sockets[0])
                terms = Terms(tls=security.mode, context=context)
                status = exports.serve(sockets, terms, lambda: ready(uri))
    sys.exit(status)


class _Exports:
    """What is served. ``sock``: the first socket, by which metrics and records name the server."""

    def __init__(
        self, resolved: Resolved, given: Mapping[str, str], read_only: bool, sock: socket.socket
    ) -> None:
        self._urls = resolved.urls
        self._read_only = read_only or resolved.read_only
        self._place = _place(sock)
        self._options = {**default_option(self._place), **given}

    def by_nbdkit(
        self, sock: socket.socket, given: list[str], ready: Callable[[], None], logs: bool
    ) -> int:
        """Returns nbdkit's exit status."""
        read_only = ["--read-only"] if self._read_only else []
        with Recorded("nbd", self._place):
            status = nbdkit.serve(
                sock, self._urls, self._options, given + read_only, ready, logs=logs
            )
        tell_systemd("STOPPING=1")
        return status

    def serve(
        self, sockets: Sequence[socket.socket], terms: Terms, ready: Callable[[], None]
    ) -> int:
        """Returns the exit status."""
        writes = not self._read_only
        shared = is_shared(self._urls, self._options)
        with Recorded("nbd", self._place) as recorded:
            opened = partial(note_use, recorded, writes=writes, shared=shared)
            terms = replace(terms, read_only=self._read_only, opened=opened)
            number = serve(
                self._urls,
                self._options,
                sockets,
                ready,
                lambda: tell_systemd("STOPPING=1"),
                terms,
            )
        return 128 + number


class _Tls(NamedTuple):
    """The options of TLS."""

    mode: Tls
    certificates: str | None
    verify_peer: bool
    psk: str | None

    def check(self) -> None:
        """Raises BadArgument."""
        if self.mode is Tls.OFF and (self.certificates or self.verify_peer or self.psk):
            raise BadArgument("--tls-… without --tls: add --tls require, or --tls on")
        if self.mode is not Tls.OFF and (self.certificates is None) == (self.psk is None):
            raise BadArgument("--tls: give either --tls-certificates DIR or --tls-psk FILE")

    def words(self) -> list[str]:
        """Of nbdkit's command line."""
        if self.mode is Tls.OFF:
            return []
        given = ["--tls", self.mode.value]
        given += [f"--tls-certificates={self.certificates}"] if self.certificates else []
        given += [f"--tls-psk={self.psk}"] if self.psk else []
        return given + (["--tls-verify-peer"] if self.verify_peer else [])

    def context(self) -> ssl.SSLContext | None:
        """Of our own server."""
        if self.mode is Tls.OFF:
            return None
        if self.psk is not None:
            return tls.by_keys(self.psk)
        return tls.by_certificates(self.certificates or "", self.verify_peer)


@contextlib.contextmanager
def _listening(
    path: str | None, listen: str | None, by_nbdkit: bool = False
) -> Iterator[tuple[list[socket.socket], str]]:
    count = handed_over()
    if count > 1 and by_nbdkit:
        raise BadArgument(f"--nbdkit takes one socket of systemd, and there are {count}")
    if count:
        opened = listen_handed_over(count)
    else:
        opened = listen_unix(path) if path is not None else listen_tcp(listen or "")
    with opened as found:
        yield found


def _place(sock: socket.socket) -> str:
    """What metrics are named by."""
    bound = sock.getsockname()
    if sock.family != socket.AF_UNIX:
        return words((bound[0], bound[1]))
    return os.path.abspath(bound) if isinstance(bound, str) and bound else bound
