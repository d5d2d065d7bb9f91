"""Runs an NBD server of this project in this process, from the first login to the last flush."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from iserblk.disk.aio import TrioDiskSet, open_disks
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
        """There are so many by now; a successor that has the connections is told. Raises
        nothing."""
        ...

    async def predecessor_ended(self, lost: Callable[[int], object]) -> None:
        """Return when its process has ended. ``lost`` is called with the number of losses that it
        hears of until then, and that ``losses_before`` has not returned yet."""
        ...

    async def offer(self, server: NbdServer, flush: Callable[[], Awaitable[None]]) -> None:
        """Body of a task: give the connections of ``server`` to a successor that asks for them,
        when ``flush`` has succeeded. Returns when they are given. Cancelled, it leaves them wholly
        here, or wholly there."""
        ...


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How a server serves. ``tls``, ``context``: see ``NbdServer``.

    ``until_unused``: end when the last client has gone. ``resized`` is called, in another thread,
    with the name of an export and its new size in bytes; the target is asked for the size every ten
    seconds. ``succession``: of a server with one LUN, without TLS; once a successor has the
    clients, this server has no clients any more. ``patient``: see ``Export``. ``wished``: whether
    what uses the LUNs is about to end; called in another thread, every few seconds while requests
    wait. ``forced``: called at the first signal; True: nothing is waited for, nor flushed.
    ``opened`` is called with the LUNs before clients are served.
    """

    read_only: bool = False
    tls: Tls = Tls.OFF
    context: ssl.SSLContext | None = None
    until_unused: bool = False
    resized: Callable[[str, int], None] | None = None
    succession: Succession | None = None
    patient: bool = True
    wished: Callable[[], bool] | None = None
    forced: Callable[[], bool] = lambda: False
    opened: Callable[[Sequence[LunInfo]], None] | None = None


def serve(
    urls: Sequence[str],
    options: Mapping[str, str],
    sockets: Sequence[socket.socket],
    ready: Callable[[], None],
    stopping: Callable[[], None],
    terms: Terms | None = None,
) -> int:
    """Serve the LUNs of ``urls`` at the listening ``sockets`` until SIGTERM, SIGINT or SIGHUP, or
    the end of ``terms``. Then what was received is answered, and everything is flushed; a signal of
    an impatient user (module ``endings``) ends that. How long a target is waited for then: see
    ``iserblk.disk.ending``. Returns the number of the first signal, or 0.

    ``ready`` is called once clients can connect, ``stopping`` at the first signal, both in the trio
    loop. Raises IserblkError when the LUNs cannot be opened, and NotFlushed when the last flush
    failed.
    """
    allow_descriptors()
    try:
        with until_told() as heard:
            life = Life(urls, options, ready, stopping, terms or Terms(), heard)
            told = guest.run(partial(life.run, sockets))
    except BaseExceptionGroup as group:
        raise first_error(group) from None
    if life.failed:
        raise NotFlushed("; ".join(life.failed.values()), *life.unflushed)
    return told


class Life:
    """One server, from the first login to the last flush; see ``serve``, which runs it in a process
    of its own. ``heard``: what tells it to end. ``served``: the LUNs, by name, once they are open.
    ``failed``: what was not flushed, in words, by LUN; ``unflushed``: the bytes of that, one
    element."""

    def __init__(
        self,
        urls: Sequence[str],
        options: Mapping[str, str],
        ready: Callable[[], None],
        stopping: Callable[[], None],
        terms: Terms,
        heard: UntilTold,
    ) -> None:
        self.failed: dict[str, str] = {}
        self.unflushed: list[int | None] = []
        self._urls = urls
        self._options = options
        self._busy_poll_us = max(each.options.busy_poll_us for each in settle(urls, options))
        self._ready = ready
        self._stopping = stopping
        self._terms = terms
        self._heard = heard
        self.served: Mapping[str, DirectDisk] = {}
        self._exports: Mapping[str, Export] = {}
        self._ending = EndOfUse()
        self._stop = trio.Event()
        self._is_ready = False

    async def run(self, sockets: Sequence[socket.socket]) -> int:
        """``sockets``: see ``serve``, as for the result. Raises IserblkError, perhaps in exception
        groups, when the LUNs cannot be opened or a predecessor keeps its connections; Cancelled,
        with nothing flushed."""
        if self._heard.first:
            return self._heard.first
        succession = self._terms.succession
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_on_signals, nursery.cancel_scope)
            taken = await _take(succession, before_opening=True)
            beside = taken is None  # the predecessor has the place of the metrics
            async with open_disks(self._urls, self._options, metrics_later=beside) as disks:
                server, export = self._open(disks)
                if taken is None:
                    taken = await _take(succession, before_opening=False)
                client = _OnlyClient(succession, export) if succession else None
                metrics = disks.serve_metrics if beside else None
                try:
                    async with server.serving(sockets, taken or ()):
                        await self._serve(server, client, metrics, nursery)
                finally:  # cancelled, there is no last flush
                    if client is not None:
                        client.ended()
                await self._flush()
                if client is not None and not self.failed:
                    client.is_flushed()
            nursery.cancel_scope.cancel()
        return self._heard.first

    def _open(self, disks: TrioDiskSet) -> tuple[NbdServer, Export]:
        """A server of these disks, and its default export."""
        terms = self._terms
        self.served, self._ending = disks.disks, disks.ending
        if terms.opened is not None:
            terms.opened([disk.info for disk in self.served.values()])
        exports = {
            name: Export(name, disk, terms.read_only, patient=terms.patient)
            for name, disk in self.served.items()
        }
        self._exports = exports
        server = NbdServer(exports, disks.default, self._busy_poll_us, terms.tls, terms.context)
        return server, exports[disks.default]

    async def _serve(
        self,
        server: NbdServer,
        client: _OnlyClient | None,
        metrics: Callable[[], None] | None,
        nursery: trio.Nursery,
    ) -> None:
        """Until the server is to end. ``client``: what a successor takes over. ``metrics``: see
        ``_OnlyClient.offer``."""
        terms = self._terms
        if terms.until_unused:
            nursery.start_soon(self._end_when_unused, server)
        if terms.resized is not None:
            nursery.start_soon(self._watch_sizes, terms.resized)
        if terms.wished is not None:
            nursery.start_soon(watch, self._ending.waits, terms.wished, self._ask)
        self._is_ready = True
        self._ready()
        async with trio.open_nursery() as offering:
            if client is not None:
                offering.start_soon(client.offer, server, metrics)
            await self._stop.wait()
            self._ending.ask()
            offering.cancel_scope.cancel()

    # -- what ends it -----------------------------------------------------------------------------

    async def _end_on_signals(self, everything: trio.CancelScope) -> None:
        heard = self._heard
        await heard.begun()
        self._stopping()
        if self._is_ready:
            self._ending.ask()
            if self._terms.forced():
                self._ending.give_up()
            self._stop.set()
            with trio.move_on_after(LONGEST_S):
                await heard.lost_patience()
            if heard.endings.impatient:
                log.error("told twice to end: not waiting for the target")
            else:
                log.error("not done within %g s: not waiting for the target", LONGEST_S)
            self._give_up()
            self._count_unflushed()
        everything.cancel()

    async def _end_when_unused(self, server: NbdServer) -> None:
        await server.wait_unused()
        self._stop.set()

    def _ask(self, wanted: bool) -> None:
        if not self._stop.is_set():
            self._ending.ask(wanted)

    async def _watch_sizes(self, resized: Callable[[str, int], None]) -> None:
        known = {name: export.size for name, export in self._exports.items()}
        while True:
            await sleep(_SIZES_S)
            for name, export in self._exports.items():
                with contextlib.suppress(IserblkError):  # a lost target is asked again
                    await export.disk.refresh()
                if export.size != known[name]:
                    known[name] = export.size
                    await trio.to_thread.run_sync(resized, name, export.size)

    # -- the last flush ---------------------------------------------------------------------------

    async def _flush(self) -> None:
        with trio.move_on_after(LONGEST_S) as limit:
            async with trio.open_nursery() as flushes:  # targets that are away: all at once
                for name, disk in self.served.items():
                    if disk.dirty:  # one without a write cache is sent nothing
                        flushes.start_soon(self._flush_one, name, disk)
        if limit.cancelled_caught:
            self._give_up()
        self._count_unflushed()

    async def _flush_one(self, name: str, disk: DirectDisk) -> None:
        try:
            await disk.flush(disk.new_client())
        except WritesLost as error:
            self.failed[name] = f"{name}: data is lost, and a client has not heard of it: {error}"
        except IserblkError as error:
            self.failed[name] = last_flush_failed(name, disk, error)

    def _give_up(self) -> None:
        for name, disk in self.served.items():
            if disk.dirty:  # where its last flush has ended, that has told more
                self.failed.setdefault(name, not_flushed(name, disk))

    def _count_unflushed(self) -> None:
        self.unflushed[:] = [all_unflushed(self.served.values())]


class _OnlyClient:
    """The client of all connections, with ``succession``: its losses outlive the server."""

    def __init__(self, succession: Succession, export: Export) -> None:
        self._succession = succession
        self._disk = export.disk
        self._client = export.disk.only_client(succession.losses_before(), self._changed)
        export.only_client = self._client
        self._changed()

    def _changed(self) -> None:
        self._succession.counted(self._client.count)

    async def offer(self, server: NbdServer, serve_metrics: Callable[[], None] | None) -> None:
        """Body of a task. ``serve_metrics``: to be called when the predecessor has ended."""
        if serve_metrics is not None:
            await self._succession.predecessor_ended(self._client.lost_elsewhere)
            try:
                serve_metrics()
            except IserblkError as error:
                log.warning("%s", error)
        await self._succession.offer(server, self._flush)

    async def _flush(self) -> None:
        if self._disk.dirty:
            await self._disk.flush(NO_CLIENT)

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

    def count(_losses: int = 0) -> None:  # if the LUN cannot be opened here, another server tells
        succession.counted(succession.losses_before())

    if before_opening:
        count()
        await succession.predecessor_ended(count)
    return taken
