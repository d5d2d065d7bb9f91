"""Opens the remote LUNs of a target, and keeps their sessions."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import trio

from iserblk.disk.aio import open_disks
from iserblk.disk.multipath.addresses import settle
from iserblk.disk.seam import DirectDisk, LunInfo
from iserblk.errors import BadArgument, IserblkError
from iserblk.gateway.store import DiskStore
from iserblk.loop.strands import open_strands
from iserblk.scsi.inquiry import MAX_GATEWAYS, Provisioning
from iserblk.target.scsi.traits import Traits
from iserblk.target.scsi.unit import LogicalUnit

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Use:
    """How the gateway uses a remote LUN. ``exclusive``: it has reserved it. ``shared``: other hosts
    write to it, too."""

    exclusive: bool
    shared: bool


def traits_of(info: LunInfo, use: Use) -> Traits:
    """What a remote LUN says of itself, which its unit says, too.

    Reservations that the gateway keeps bind its own initiators only. They are offered where it has
    reserved the LUN itself, so that there are no others. The same holds for commands that must be
    atomic, where other hosts write, too.
    """
    return Traits(
        vendor=info.vendor,
        product=info.product,
        revision=info.revision,
        designators=info.designators,
        provisioning=Provisioning(
            lbpu=info.can_trim,
            lbpws=info.zero_by_unmap,
            lbpws10=info.zero_by_unmap,
            lbprz=info.zero_by_unmap,
        ),
        granularity=info.unmap_granularity,
        alignment=info.unmap_alignment,
        physical_block=info.physical_block_size,
        optimal_transfer=info.optimal_transfer,
        rotational=info.rotational,
        lba_status=info.can_extents,
        reservable=use.exclusive,
        atomic=use.exclusive or not use.shared,
        gateway_to=(info.target, *info.gateway_to),
    )


def unit_of(store: DiskStore, info: LunInfo, use: Use, read_only: bool) -> LogicalUnit:
    """The unit of a remote LUN."""
    return LogicalUnit(
        store,
        serial=info.serial,
        block=info.block_size,
        read_only=read_only or info.read_only,
        write_cache=info.write_cache,
        loop=store,
        traits=traits_of(info, use),
    )


class Gateways:
    """The remote LUNs of the target ``iqn``; each has a task in ``nursery``."""

    def __init__(self, iqn: str, nursery: trio.Nursery) -> None:
        self._iqn = iqn
        self._nursery = nursery

    async def open(self, urls: Sequence[str], read_only: bool = False) -> LogicalUnit:
        """Log in to the LUN that ``urls`` name, one or more portals of it. The caller closes the
        unit, in a thread. Raises what connecting raises, and BadArgument; nothing stays open
        then."""
        addresses = settle(urls, {})
        for address in addresses:
            if address.url.iqn.lower() == self._iqn.lower():
                raise BadArgument(
                    f"{address.url.redacted()}: this is the target itself; name a LUN of another"
                    " target, or serve the file"
                )
        options = addresses[0].options
        store: DiskStore = await self._nursery.start(self._keep, urls)
        info = store.disk.info
        log.info("%s: %s %s, %d bytes", info.url, info.vendor, info.product, info.size)
        others = dict.fromkeys(each.url.iqn for each in addresses if each.url.iqn != info.target)
        use = Use(options.reserve, options.shared)

        def seen() -> LunInfo:
            """What the LUN says of itself now, with all names of its target."""
            now = store.disk.info
            return replace(now, gateway_to=(*others, *now.gateway_to))

        def look() -> None:
            unit.renew(traits_of(seen(), use), read_only or seen().read_only)

        unit = unit_of(store, seen(), use, read_only)
        store.look = look
        return unit

    def open_from_thread(self, urls: Sequence[str], read_only: bool = False) -> LogicalUnit:
        """``open``, for threads that trio has started."""
        return trio.from_thread.run(self.open, urls, read_only)

    async def _keep(self, urls: Sequence[str], task_status: trio.TaskStatus[DiskStore]) -> None:
        """Body of the task of one LUN, from login to logout. Cancelling ends the login only: later
        the LUN's initiators have to be gone before it is closed."""
        store: DiskStore | None = None
        try:
            with trio.CancelScope() as scope:
                async with open_disks(urls, {}) as disks:
                    disk = _only(list(disks.disks.values()))
                    check_way(disk.info, self._iqn)
                    # Cancelled since the last answer: ``started`` would have no effect, and the
                    # caller would wait for this task to end, which waits for the caller.
                    await trio.lowlevel.checkpoint_if_cancelled()
                    scope.shield = True
                    async with open_strands() as group, trio.open_nursery() as nursery:
                        store = DiskStore(disk, group, nursery)
                        nursery.start_soon(store.watch_size)
                        task_status.started(store)
                        await store.closing.wait()
                        nursery.cancel_scope.cancel()
                        with trio.CancelScope(shield=True):
                            await _flush(store)
                        store.end()
        finally:
            if store is not None:
                store.finish()


async def _flush(store: DiskStore) -> None:
    if store.disk.dirty:
        try:
            await store.disk.flush(store.disk.new_client())
        except IserblkError as error:
            log.error("%s: the last flush failed, data may be lost: %s", store.disk.info.url, error)
            store.failure = error


def _only(found: Sequence[DirectDisk]) -> DirectDisk:
    if len(found) > 1:
        names = ", ".join(f"/{disk.info.lun}" for disk in found)
        raise BadArgument(
            f"{found[0].info.url}: the URL names {len(found)} disks; add one of {names} to it"
        )
    return found[0]


def check_way(info: LunInfo, iqn: str) -> None:
    """Raises BadArgument where the way to the LUN leads back to the target ``iqn``: a command would
    go round until nothing has room for it."""
    if iqn.lower() in map(str.lower, info.gateway_to):
        raise BadArgument(
            f"{info.url}: a gateway back to this target; name a LUN whose way does not lead here"
        )
    if len(info.gateway_to) >= MAX_GATEWAYS:
        raise BadArgument(
            f"{info.url}: there are {len(info.gateway_to)} gateways on the way to this LUN; at most"
            f" {MAX_GATEWAYS}"
        )


@asynccontextmanager
async def open_gateways(iqn: str) -> AsyncIterator[Gateways]:
    """While the block runs, remote LUNs can be opened. At its end all have to be closed."""
    async with trio.open_nursery() as nursery:
        yield Gateways(iqn, nursery)
