"""Runs an NBD server of this project in this process, from the first login to the last flush."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import trio

from iserblk.disk.aio import open_disks
from iserblk.disk.ending import (
    LONGEST_S,
    EndOfUse,
    NotFlushed,
    all_unflushed,
    last_flush_failed,
    not_flushed,
)
from iserblk.disk.multipath.addresses import settle
from iserblk.disk.seam import NO_CLIENT, DirectDisk, LossCount, LunInfo
from iserblk.errors import IserblkError, WritesLost, first_error
from iserblk.loop import guest
from iserblk.loop.stopping import watch
from iserblk.loop.tasks import sleep
from iserblk.loop.until_told import UntilTold, until_told
from iserblk.nbd.client import PausedConnection
from iserblk.nbd.exports import Export
from iserblk.nbd.handshake import Tls
from iserblk.nbd.server import NbdServer, allow_descriptors

log = logging.getLogger(__name__)

_SIZES_S = 10.0


class Succession(Protocol):
    """A server takes the connections of its predecessor, another process, over; and gives them to
    its successor. All connections are of one client, which is told of each loss of writes once.

    ``inherits``: there is a predecessor. ``opens_last``: it has to end before the LUNs can be
    opened here. ``given``: a successor has the connections.
    """

    inherits: bool
    opens_last: bool

    @property
    def given(self) -> bool: ...

    async def take(self) -> list[PausedConnection]:
        """From now on they are this process's. Raises IserblkError when the predecessor keeps
        them."""
        ...

    def losses_before(self) -> LossCount:
        """Those that predecessors have counted. Call it after ``take``, if that is called."""
        ...

    def counted(self, count: LossCount) -> None:
        """There are so many by now. Raises nothing."""
        ...

    async def predecessor_ended(self) -> None:
        """Return when its process has ended."""
        ...

    async def offer(self, server: NbdServer, flush: Callable[[], Awaitable[None]]) -> None:
        """Body of a task: give the connections of ``server`` to a successor that asks for them,
        when ``flush`` has succeeded. Returns when they are given. Cancelled, it leaves them wholly
        here, or wholly there."""
        ...


def serve(
    urls: Sequence[str],
    options: Mapping[str, str],
    sockets: Sequence[socket.socket],
    ready: Callable[[], None],
    stopping: Callable[[], None],
    *,
    read_only: bool = False,
    tls: Tls = Tls.OFF,
    context: ssl.SSLContext | None = None,
    until_unused: bool = False,
    resized: Callable[[str, int], None] | None = None,
    succession: Succession | None = None,
    patient: bool = True,
    wished: Callable[[], bool] | None = None,
    forced: Callable[[], bool] = lambda: False,
    opened: Callable[[Sequence[LunInfo]], None] | None = None,
) -> int:
    """Serve the LUNs of ``urls`` at the listening ``sockets`` until SIGTERM, SIGINT or SIGHUP; with
    ``until_unused`` also until the last client has gone. Then what was received is answered, and
    everything is flushed; a signal of an impatient user (module ``endings``) ends that. How long a
    target is waited for then: see ``iserblk.disk.ending``. Returns the number of the first signal,
    or 0.

    ``ready`` is called once clients can connect, ``stopping`` at the first signal, both in the trio
    loop. ``resized`` is called, in another thread, with the name of an export and its new size in
    bytes; the target is asked for the size every ten seconds. ``succession``: of a server with one
    LUN, without TLS; once a successor has the clients, this one has no clients any more.
    ``patient``: see ``Export``. ``wished``: whether what uses the LUNs is about to end; called in
    another thread, every few seconds while requests wait. ``forced``: called at the first signal;
    True: nothing is waited for, nor flushed. ``opened`` is called with the LUNs before clients are
    served. Raises IserblkError when the LUNs cannot be opened, and NotFlushed when the last flush
    failed.
    """
    allow_descriptors()
    busy_poll_us = max(each.options.busy_poll_us for each in settle(urls, options))
    failed: list[str] = []
    unflushed: list[int | None] = []  # one element

    async def body(heard: UntilTold) -> int:
        served: Mapping[str, DirectDisk] = {}
        ending = EndOfUse()
        stop = trio.Event()
        is_ready = False

        async def end_on_signals() -> None:
            await heard.begun()
            stopping()
            if is_ready:
                ending.ask()
                if forced():
                    ending.give_up()
                stop.set()
                with trio.move_on_after(LONGEST_S):
                    await heard.lost_patience()
                if heard.endings.impatient:
                    log.error("told twice to end: not waiting for the target")
                else:
                    log.error("not done within %g s: not waiting for the target", LONGEST_S)
                failed[:] = [not_flushed(*each) for each in served.items() if each[1].dirty]
                unflushed[:] = [all_unflushed(served.values())]
            nursery.cancel_scope.cancel()

        async def end_when_unused(server: NbdServer) -> None:
            await server.wait_unused()
            stop.set()

        async def watch_sizes(exports: Mapping[str, Export]) -> None:
            assert resized is not None
            known = {name: export.size for name, export in exports.items()}
            while True:
                await sleep(_SIZES_S)
                for name, export in exports.items():
                    with contextlib.suppress(IserblkError):  # a lost target is asked again
                        await export.disk.refresh()
                    if export.size != known[name]:
                        known[name] = export.size
                        await trio.to_thread.run_sync(resized, name, export.size)

        def ask(wanted: bool) -> None:
            if not stop.is_set():
                ending.ask(wanted)

        async def flush(name: str, disk: DirectDisk) -> None:
            try:
                await disk.flush(disk.new_client())
            except WritesLost as error:
                failed.append(f"{name}: data is lost, and a client has not heard of it: {error}")
            except IserblkError as error:
                failed.append(last_flush_failed(name, disk, error))

        if heard.first:
            return heard.first
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_on_signals)
            taken = await _take(succession, before_opening=True)
            beside = taken is None  # the predecessor has the place of the metrics
            async with open_disks(urls, options, metrics_later=beside) as disks:
                served, ending = disks.disks, disks.ending
                if opened is not None:
                    opened([disk.info for disk in served.values()])
                exports = {
                    name: Export(name, disk, read_only, patient=patient)
                    for name, disk in served.items()
                }
                server = NbdServer(exports, disks.default, busy_poll_us, tls, context)
                if taken is None:
                    taken = await _take(succession, before_opening=False)
                client = _OnlyClient(succession, exports[disks.default]) if succession else None
                async with server.serving(sockets, taken or ()):
                    if until_unused:
                        nursery.start_soon(end_when_unused, server)
                    if resized is not None:
                        nursery.start_soon(watch_sizes, exports)
                    if wished is not None:
                        nursery.start_soon(watch, ending.waits, wished, ask)
                    is_ready = True
                    ready()
                    async with trio.open_nursery() as offering:
                        if succession is not None:
                            metrics = disks.serve_metrics if beside else None
                            export = exports[disks.default]
                            offering.start_soon(_offer, succession, server, export, metrics)
                        await stop.wait()
                        ending.ask()
                        offering.cancel_scope.cancel()
                if client is not None:
                    client.ended()
                with trio.move_on_after(LONGEST_S) as limit:
                    async with trio.open_nursery() as flushes:  # targets that are away: all at once
                        for name, disk in served.items():
                            if disk.dirty:  # one without a write cache is sent nothing
                                flushes.start_soon(flush, name, disk)
                if limit.cancelled_caught:
                    failed[:] = [not_flushed(*each) for each in served.items() if each[1].dirty]
                unflushed[:] = [all_unflushed(served.values())]
                if client is not None and not failed:
                    client.is_flushed()
            nursery.cancel_scope.cancel()
        return heard.first

    try:
        with until_told() as heard:
            told = guest.run(partial(body, heard))
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    if failed:
        raise NotFlushed("; ".join(failed), *unflushed)
    return told


class _OnlyClient:
    """The client of all connections, with ``succession``: its losses outlive the server."""

    def __init__(self, succession: Succession, export: Export) -> None:
        self._succession = succession
        self._disk = export.disk
        self._client = export.disk.only_client(succession.losses_before(), self._changed)
        export.only_client = self._client
        self._changed()

    def _changed(self) -> None:
        if not self._succession.given:
            self._succession.counted(self._client.count)

    def ended(self) -> None:
        """The last flush is to follow. Until it has succeeded, a successor, if there is one, has to
        count with a loss."""
        if self._succession.given:
            self._client.told(self._client.count.losses)  # the successor tells
        elif self._disk.dirty:
            losses, told = self._client.count
            self._succession.counted(LossCount(losses + 1, told))
        self._client.ended()

    def is_flushed(self) -> None:
        self._changed()


async def _take(
    succession: Succession | None, *, before_opening: bool
) -> list[PausedConnection] | None:
    """The predecessor's connections, empty without one; None: later, when the LUNs are open."""
    if succession is None or not succession.inherits:
        return []
    if before_opening and not succession.opens_last:
        return None
    taken = await succession.take()
    if before_opening:
        await succession.predecessor_ended()
    return taken


async def _offer(
    succession: Succession,
    server: NbdServer,
    export: Export,
    serve_metrics: Callable[[], None] | None,
) -> None:
    """Body of a task. ``serve_metrics``: to be called when the predecessor has ended."""

    async def flush() -> None:
        if export.disk.dirty:
            await export.disk.flush(NO_CLIENT)

    if serve_metrics is not None:
        await succession.predecessor_ended()
        try:
            serve_metrics()
        except IserblkError as error:
            log.warning("%s", error)
    await succession.offer(server, flush)
