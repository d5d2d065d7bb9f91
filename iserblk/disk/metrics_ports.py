"""The places where the metrics of disks are served (``metrics=``), and what is told there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import trio

from iserblk.commands.command import QUEUED
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.multipath.addresses import Address
from iserblk.disk.multipath.paths import Paths
from iserblk.initiator.session.deadlines import Ladder
from iserblk.initiator.session.session import Session
from iserblk.loop.clock import monotonic, since_epoch
from iserblk.metrics.address import parse_address
from iserblk.metrics.counting import OPERATIONS
from iserblk.metrics.process import read_process
from iserblk.metrics.reading import (
    ConnectionReading,
    LunReading,
    PathReading,
    ProcessReading,
    of_row,
)
from iserblk.metrics.serving import Listener, Look, serve


class Measured(NamedTuple):
    """A disk, the deadlines of its session, and the ways of this session, where it has several."""

    core: DiskCore
    ladder: Ladder
    paths: Paths | None = None


class MetricsPorts:
    """The listeners that serve the metrics of some URLs. Several URLs may name the same place."""

    def __init__(self, addresses: Sequence[Address]) -> None:
        """Raises as ``open``."""
        self._idle: dict[str, Listener] = {}
        self._scopes: list[trio.CancelScope] = []
        self.open(addresses)

    def open(self, addresses: Sequence[Address]) -> None:
        """Open the listeners that are not open yet; they answer no client before ``start``. Raises
        Busy, PermissionDenied or BadArgument, with nothing left open."""
        try:
            for address in addresses:
                place = address.options.metrics
                if place and place not in self._idle:
                    self._idle[place] = Listener(parse_address(place, "metrics"))
        except BaseException:
            self.close()
            raise

    def start(self, nursery: trio.Nursery, disks: Iterable[Measured]) -> None:
        """Answer clients until ``close``, in tasks of ``nursery``. Call ``close`` before it
        ends."""
        disks = list(disks)
        while self._idle:
            place, listener = self._idle.popitem()
            here = [each for each in disks if each.core.metrics.served_at == place]
            self._scopes.append(trio.CancelScope())
            nursery.start_soon(_serve, self._scopes[-1], listener, partial(look, here))

    def close(self) -> None:
        """Stop answering, and close the listeners. Idempotent."""
        while self._idle:
            self._idle.popitem()[1].close()
        for scope in self._scopes:
            scope.cancel()


async def _serve(scope: trio.CancelScope, listener: Listener, seen: Look) -> None:
    with scope:
        await serve(listener, seen)


def look(disks: Sequence[Measured]) -> ProcessReading:
    """Read the numbers of these disks, from any thread. A change meanwhile may show in one number
    and not yet in another."""
    return read_process([_reading(*each) for each in disks])


def _reading(core: DiskCore, ladder: Ladder, paths: Paths | None) -> LunReading:
    session = ladder.session
    info = core.info
    rows = core.metrics.total()
    journal = core.durability.journal
    connected = session.error is None and session.suspended is None
    return LunReading(
        target=info.target,
        lun=info.lun,
        name=info.name,
        url=info.url,
        size=core.size,
        portal=session.portal,
        provider=str(session.describe().get("provider", "")),
        connected=connected,
        in_flight=sum(
            task.state >= QUEUED and task.lun == core.lun for task in session.queue.tasks
        ),
        retries=core.metrics.retries,
        reconnects=session.counts.reconnects,
        replayed=session.counts.replayed,
        aborted=ladder.aborted,
        resets=ladder.resets,
        connections=session.count if connected else 0,
        wanted=session.wanted,
        away_since=_away_since(session),
        recovered=session.counts.recovered,
        reassigned=session.counts.reassigned,
        snacks=session.counts.losses.snacks,
        damaged=session.counts.losses.damaged,
        per_connection=_connections(session) if connected else (),
        paths=_paths(paths) if paths is not None else (),
        unflushed=journal.size if journal is not None else 0,
        operations={name: of_row(row) for name, row in zip(OPERATIONS, rows, strict=True)},
    )


def _away_since(session: Session) -> int:
    """Seconds since 1970; 0: there is a connection, or there will be none."""
    if session.suspended is None:
        return 0
    return int(since_epoch() - (monotonic() - session.suspended_at))


def _connections(session: Session) -> tuple[ConnectionReading, ...]:
    """Of a session that may have several."""
    if session.parameters.max_connections == 1:
        return ()
    return tuple(
        ConnectionReading(
            cid=connection.cid,
            portal=connection.portal,
            provider=str(connection.datamover.describe().get("provider", "")),
            in_flight=connection.in_flight,
            commands=connection.begun,
            bytes=connection.bytes_begun,
        )
        for connection in session.queue.connections.copy()
    )


def _paths(paths: Paths) -> tuple[PathReading, ...]:
    """Of a session that has several; other threads than the reconnector's may ask, too."""
    current = paths.ways.current
    return tuple(
        PathReading(way.index, way.name, way is current, way.failures, way.state)
        for way in paths.ways.all.copy()
    )
