"""Commands that may wait: they run in the loop or in threads, and are answered in the loop."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import trio

from iserblk.errors import TransportError
from iserblk.loop.seam import Loop
from iserblk.loop.work import Limit
from iserblk.target.iscsi.tasks.slot import Allegiance, TargetTask
from iserblk.target.places import Places
from iserblk.target.scsi.device import DeviceServer
from iserblk.target.seam import Nexus
from iserblk.target.store.store import OWNER

log = logging.getLogger(__name__)

DISK_THREADS = 16  # for each LUN


class Offloading:
    """The offloaded commands of a target.

    ``limits``: one for each LUN: a disk that does not answer takes no threads from the other LUNs.
    Those of LUNs that are gone are there, too: their threads may run."""

    def __init__(self, device: DeviceServer, places: Places, luns: Iterable[int]) -> None:
        """``places``: knows whose connection one is, for the log."""
        self._device = device
        self._places = places
        self.limits = {lun: Limit(DISK_THREADS) for lun in luns}
        self._touched: dict[Allegiance, None] = {}  # since the last ``_batch_ended``
        self._batch_ends = False  # soon
        self._ended = trio.Event()  # set, and made anew, when some tasks have ended
        device.on_batch = self._batch_ended

    def add_lun(self, lun: int) -> None:
        # Not the limit of a LUN before it: its threads may wait for a target that is away.
        self.limits[lun] = Limit(DISK_THREADS)

    def begin(self, slot: TargetTask, nexus: Nexus, loop: Loop, under_way: set[TargetTask]) -> None:
        """Execute a task of ``nexus`` that may wait, in the loop or else in a thread.
        ``under_way``: those that began on the same connection."""
        device = self._device

        def ended() -> None:
            under_way.discard(slot)
            self._touched[slot.connection] = None
            self._finish(slot)

        def work() -> None:
            owned = OWNER.set(nexus)
            try:
                device.run(slot.task, slot.buffer)
            finally:
                OWNER.reset(owned)  # the thread refers to no session that may have ended

        def returned(problem: BaseException | None) -> None:
            if problem is not None:
                slot.end_unknown()
                self._end_broken(slot.connection, problem)
            if slot.task.cancelled and slot.task.in_loop:
                device.settle(slot.task, settled)
            else:
                settled()

        def settled() -> None:
            ended()
            self._end_batch_soon(loop)

        under_way.add(slot)
        if not slot.task.in_loop or not device.start(slot.task, slot.buffer, ended):
            loop.offload(work, returned, self.limits[slot.lun])

    async def wait(self, under_way: set[TargetTask]) -> None:
        """Wait until none of these tasks is carried out any more."""
        while under_way:
            await self._ended.wait()

    def _end_batch_soon(self, loop: Loop) -> None:
        """With what else threads have done by then: a send for each would cost more than all else
        of such a command."""
        if not self._batch_ends:
            self._batch_ends = True
            loop.call_soon(self._batch_ended)

    def _batch_ended(self) -> None:
        """Send the answers of tasks that have ended."""
        self._batch_ends = False
        touched, self._touched = self._touched, {}
        for connection in touched:
            try:
                connection.wake()
            except Exception as problem:
                self._end_broken(connection, problem)
        self._ended.set()
        self._ended = trio.Event()

    def _finish(self, slot: TargetTask) -> None:
        """Answer a task that has been carried out, on the connection to which it is allegiant
        now."""
        connection = slot.connection
        try:
            connection.finish(slot)
        except TransportError as error:
            log.info("connection ended while a command ran: %s", error)
            connection.abandon()
        except Exception as problem:
            self._end_broken(connection, problem)

    def _end_broken(self, connection: Allegiance, problem: BaseException) -> None:
        """End a connection that has met a bug outside of its own task: no other one ends."""
        peer = self._places.origin_of(connection)
        log.error("%s: internal error, connection closed", peer, exc_info=problem)
        try:
            connection.abandon()
            connection.notify_ended()
        except Exception:
            log.exception("%s: internal error", peer)
