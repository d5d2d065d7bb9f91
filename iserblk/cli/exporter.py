"""``iserblk exporter``: the metrics of all LUNs on the machine, at one port: for Prometheus, and as
a page for browsers."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import click
import trio

from iserblk.cli.command import Command
from iserblk.cli.notify import ready, tell_systemd
from iserblk.cli.running import run
from iserblk.cli.states import KILLED, SILENT, WRONG
from iserblk.cli.watch.history import Look, Seen, Silent
from iserblk.cli.watch.page import POLICY, page
from iserblk.cli.watch.sampling import Sampling
from iserblk.limited_log import limited_lines
from iserblk.loop.clock import monotonic, since_epoch
from iserblk.metrics.address import parse_address, words
from iserblk.metrics.joining import NO_ANSWER, NO_PROCESS, Answer, Joined
from iserblk.metrics.places import Source, directories, in_directory, named
from iserblk.metrics.records import Recorded
from iserblk.metrics.serving import Page, serve_document
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
@click.option(
    "--name",
    "names",
    metavar="NAME",
    multiple=True,
    help="A further host name by which browsers and collectors ask. May be repeated.",
)
def command(
    addresses: tuple[str, ...], listen: str, given: tuple[Path, ...], names: tuple[str, ...]
) -> None:
    """Serve the metrics of all LUNs that are in use on this machine, until a signal ends it: at
    /metrics for Prometheus, and at / a page for browsers, which shows what `iserblk top` does.

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
        here = socket.gethostname()
        known = {each.lower() for each in (here, listen.rpartition(":")[0], *names)}

        async def body() -> None:
            joined = Joined(sources)
            sampling = Sampling(partial(_look, joined))

            async def made(query: bytes) -> bytes:
                history = await sampling.current()
                return await trio.to_thread.run_sync(page, history, query, here)

            ready(f"http://{words((host, port))}/metrics")
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(sampling.run)
                    await serve_document(
                        sockets[0], joined.document, None, Page(made, POLICY), known
                    )
            finally:
                tell_systemd("STOPPING=1")

        with limited_lines(), Recorded("exporter", words((host, port))):
            run(body, host=True)


async def _look(joined: Joined) -> Look:
    return look_of(await joined.answers())


def look_of(answers: Iterable[Answer]) -> Look:
    """What the page shows of these answers, which came just now."""
    luns: list[Seen] = []
    silent = []
    targets = sessions = 0
    for each in answers:
        place = each.place
        if each.reading is None:
            silent.append(Silent(place.uid, place.where, _state(each.why)))
            continue
        reading = each.reading
        luns += [
            Seen(place.where, place.uid, reading.pid, each.at, lun, reading.command)
            for lun in reading.luns
        ]
        targets += len(reading.targets)
        sessions += sum(target.sessions for target in reading.targets)
    return Look(
        monotonic(), since_epoch(), tuple(luns), tuple(silent),
        targets=targets, sessions=sessions,
    )  # fmt: skip


def _state(why: str) -> str:
    if why.startswith(NO_PROCESS):
        return KILLED
    return SILENT if why == NO_ANSWER else WRONG
