"""``iserblk exporter``: the metrics of all LUNs on the machine, at one port for Prometheus."""

from __future__ import annotations

from pathlib import Path

import click

from iserblk.cli.command import Command
from iserblk.cli.notify import ready, tell_systemd
from iserblk.cli.running import run
from iserblk.limited_log import limited_lines
from iserblk.metrics.address import parse_address, words
from iserblk.metrics.joining import Joined
from iserblk.metrics.places import Source, directories, in_directory, named
from iserblk.metrics.records import Recorded
from iserblk.metrics.serving import serve_document
from iserblk.nbd.listening import listen_tcp

LISTEN = "127.0.0.1:13260"


@click.command("exporter", cls=Command)
@click.argument("addresses", metavar="[ADDRESS…]", nargs=-1)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=LISTEN,
    show_default=True,
    help="Where Prometheus asks; port 0: any free port.",
)
@click.option(
    "--directory",
    "given",
    metavar="DIR",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Look for sockets in DIR, and not where attach, mount and nbd make them. May be repeated.",
)
def command(addresses: tuple[str, ...], listen: str, given: tuple[Path, ...]) -> None:
    """Serve the metrics of all LUNs that are in use on this machine, until a signal ends it.

    Root's exporter has those of all users, another user's its own. ADDRESS: a further value of
    metrics=. Prints `ready URL` once Prometheus can ask. There is no authentication: every client
    that reaches the port can read the metrics.
    """
    further = named([parse_address(each, "ADDRESS") for each in addresses])

    def sources() -> list[Source]:
        found = [in_directory(each) for each in given or directories()]
        return [further, *(each for each in found if each is not None)]

    with listen_tcp(listen, LISTEN) as (sockets, _):
        host, port = sockets[0].getsockname()[:2]

        async def body() -> None:
            ready(f"http://{words((host, port))}/metrics")
            try:
                await serve_document(sockets[0], Joined(sources).document)
            finally:
                tell_systemd("STOPPING=1")

        with limited_lines(), Recorded("exporter", words((host, port))):
            run(body)
