"""``iserblk serve``: files as the LUNs of a target whose name is made from them."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import click

from iserblk.cli.background import Ground, background_options
from iserblk.cli.command import Command
from iserblk.cli.notify import tell_systemd
from iserblk.cli.target import NAME, serve_config
from iserblk.errors import BadArgument, Busy, PermissionDenied
from iserblk.names import machine_id
from iserblk.target.config import DEFAULT_PORTAL, TargetConfig
from iserblk.target.lunspec import LunSpec, file_spec
from iserblk.target.ports import Listen, parse_listen
from iserblk.url import may_be_url, parse_place

_PREFIX = "iqn.2026-11.io.github.iserblk"
_MOST_OF_FILE = 40  # characters of a target's name
# What errors of files say of the options of ``--lun``, and what that is here.
_SIZE = re.compile(r"`size=([^`]*)`")
_READ_ONLY = "`ro`"
# Places outside of this machine's network, which no packet is sent to: they show by which address
# this machine is seen.
_ELSEWHERE = {"0.0.0.0": "192.0.2.1", "::": "2001:db8::1"}


@click.command("serve", cls=Command)
@click.argument("files", metavar="FILE…", nargs=-1, required=True)
@click.option(
    "--size",
    metavar="SIZE",
    help="Create a FILE that does not exist, or enlarge a smaller one, e.g. 10G. It occupies no"
    " more than what is written to it.",
)
@click.option("--read-only", is_flag=True, help="Refuse all writes.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help=f"Address to listen on; port 0: any free port. Default: {DEFAULT_PORTAL}, which is for"
    " this machine alone, or another port of 127.0.0.1 while that is in use.",
)
@background_options(NAME)
def command(
    files: tuple[str, ...],
    size: str | None,
    read_only: bool,
    listen: str | None,
    background: bool,
    pidfile: str | None,
) -> None:
    """Serve each FILE, or block device, as a LUN, over iSER and Traditional iSCSI. The command
    stays in the foreground, unless --background is given.

    Prints the URL of each LUN once clients can connect, in the order of the files; with iscsi:// in
    place of iser:// it is that of Traditional iSCSI. The target's name is made from the files and
    from this machine: it is the same at every start. SIGTERM, SIGINT and SIGHUP end the target; all
    that was written is in the files then.

    Every client that reaches the address can read and write. `iserblk target` has accounts, a name
    of your choice, and all other options.
    """
    with _in_our_words():
        specs = [_spec(each, size, read_only) for each in files]
        config = TargetConfig(
            iqn=name_for(files),
            portals=[_portal(listen)],
            luns=dict(enumerate(specs)),
        )
        ground = Ground(NAME, background, pidfile, None)
        serve_config(lambda: config, False, ground, lambda url: announce(url, len(specs)))


def name_for(files: Sequence[str]) -> str:
    """The name of the target that has these files as its LUNs: of these files, in this order, on
    this machine alone, as initiators take LUNs of one target's name for the same."""
    paths = [os.path.realpath(each) for each in files]
    machine = machine_id() or socket.gethostname()  # hashed: the ID itself must not be sent
    words = "\n".join(["iserblk serve", machine, *paths])
    digest = hashlib.sha256(os.fsencode(words)).hexdigest()[:8]
    stem, _ = os.path.splitext(os.path.basename(paths[0]))
    readable = re.sub("[^a-z0-9.]+", "-", stem.lower())[:_MOST_OF_FILE].strip("-.") or "disk"
    return f"{_PREFIX}:{readable}-{digest}"


def _spec(file: str, size: str | None, read_only: bool) -> LunSpec:
    if may_be_url(file):
        raise BadArgument(
            "serve: FILE is a file or block device; `iserblk target --lun URL` serves a LUN of"
            " another target"
        )
    if not file:
        raise BadArgument("serve: the name of a file is empty")
    options = {} if size is None else {"size": size}
    return file_spec(file, {**options, **({"ro": ""} if read_only else {})}, file)


@contextmanager
def _in_our_words() -> Iterator[None]:
    """Errors of files name the options of this command, which are others than those of --lun."""
    try:
        yield
    except (BadArgument, PermissionDenied, Busy) as error:
        said = _SIZE.sub(lambda found: f"`{f'--size {found[1]}'.rstrip()}`", str(error))
        raise type(error)(said.replace(_READ_ONLY, "`--read-only`")) from None


def _portal(listen: str | None) -> Listen:
    return Listen(DEFAULT_PORTAL, or_another=True) if listen is None else parse_listen(listen)


def announce(url: str, count: int) -> None:
    """Print the URL of each LUN. One that listens on all addresses is told by the address by which
    other machines see this one."""
    place = parse_place(url)
    if place.host in _ELSEWHERE:
        seen = _seen_as(place.host)
        host = f"[{seen}]" if ":" in seen else seen
        url = f"{place.scheme}://{host}:{place.port}/{place.iqn}"
    for lun in range(count):
        click.echo(f"{url}/{lun}")
    tell_systemd("READY=1")


def _seen_as(any_address: str) -> str:
    family = socket.AF_INET6 if ":" in any_address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE[any_address], 9))
        return str(probe.getsockname()[0])
    return "::1" if family == socket.AF_INET6 else "127.0.0.1"
