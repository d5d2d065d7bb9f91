"""A logical unit: a store with a block size, an identity and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from iserblk.errors import BadArgument
from iserblk.scsi import alua, inquiry
from iserblk.scsi.capacity import Capacity
from iserblk.scsi.inquiry import BlockLimits, Designator, Provisioning
from iserblk.target.ports import ONLY_PORT, TargetPort
from iserblk.target.scsi.guard import RangeGuard
from iserblk.target.scsi.reservations import Reservations
from iserblk.target.scsi.unflushed import Unflushed
from iserblk.target.seam import Nexus, NexusName
from iserblk.target.store.store import Store

VENDOR = "ISERBLK"
PRODUCT = "FILE"
REVISION = "0001"
MAXIMUM_SERIAL = 64

# What one command may ask for, in bytes. A task holds its data in memory, whole.
MAX_TRANSFER = 16 << 20
OPTIMAL_TRANSFER = 1 << 20
MAX_UNMAP = 512 << 20
MAX_WRITE_SAME = 2 << 30
MAX_PREFETCH = 64 << 20
MAX_UNMAP_DESCRIPTORS = 256
MAX_COMPARE_AND_WRITE_BLOCKS = 255

EndTasksOf = Callable[[Sequence[NexusName], Callable[[], None]], int]

_PAGE = 4096  # what files are allocated and cached in


class LogicalUnit:
    """One disk. ``store`` is the unit's own and is closed with it.

    ``write_cache`` False: every write is durable before its GOOD. ``serial``: printable ASCII, up
    to 64 characters; all identifiers follow from it, so it must be the same after a restart and
    different for every LUN that one initiator may see.
    """

    def __init__(
        self,
        store: Store,
        *,
        serial: str,
        block: int = 512,
        read_only: bool = False,
        write_cache: bool = True,
    ) -> None:
        if (
            not 0 < len(serial) <= MAXIMUM_SERIAL
            or not serial.isascii()
            or not serial.isprintable()
        ):
            raise BadArgument(
                f"serial {serial!r}: 1 to {MAXIMUM_SERIAL} printable ASCII characters"
            )
        self.store = store
        self.serial = serial
        self.block = block
        self.blocks = store.size // block
        self.read_only = read_only
        self.write_cache = write_cache
        self.guard = RangeGuard()
        self.unflushed = Unflushed()
        self.reservations = Reservations()
        # End the tasks of these I_T nexuses here, as Nexus.end_tasks does; by the device server.
        self.end_tasks: EndTasksOf = lambda _names, _ended: 0
        self.max_transfer_blocks = MAX_TRANSFER // block
        self.capacity = self._capacity()
        self.limits = BlockLimits(
            max_compare_and_write_length=MAX_COMPARE_AND_WRITE_BLOCKS,
            optimal_granularity=max(block, _PAGE) // block,
            max_transfer_length=self.max_transfer_blocks,
            optimal_transfer_length=OPTIMAL_TRANSFER // block,
            max_prefetch_length=MAX_PREFETCH // block,
            max_unmap_lba_count=MAX_UNMAP // block,
            max_unmap_descriptor_count=MAX_UNMAP_DESCRIPTORS,
            unmap_granularity=max(block, _PAGE) // block,
            max_write_same_length=MAX_WRITE_SAME // block,
        )

    def _capacity(self) -> Capacity:
        return Capacity(self.blocks, self.block, max(self.block, _PAGE), True, True)

    def grow(self) -> bool:
        """Look at the file. True: it has grown, and the unit with it, by whole blocks."""
        blocks = self.store.measure() // self.block
        if blocks <= self.blocks:
            return False
        self.blocks = blocks
        self.capacity = self._capacity()
        return True

    @property
    def must_sync(self) -> bool:
        """There may be bytes that only a flush makes durable."""
        return self.write_cache and not self.read_only

    def flush(self, nexus: Nexus) -> None:
        """For ``nexus``; raises OSError where anything that it wrote may be lost."""
        self.unflushed.flush(nexus, self.store.flush)

    def settle(self, nexus: Nexus) -> None:
        """After a change other than a write: durable at once where there is no write cache."""
        if self.write_cache:
            self.unflushed.wrote(nexus)
        else:
            self.store.flush()

    def vpd_pages(self, iqn: str, port: TargetPort = ONLY_PORT) -> dict[int, bytes]:
        """Page code → page, for a unit of target ``iqn``, read through ``port``."""
        identifiers = (
            Designator(
                inquiry.ASSOCIATION_LUN,
                inquiry.TYPE_NAA,
                inquiry.BINARY,
                inquiry.naa_locally_assigned(self.serial),
            ),
            Designator(
                inquiry.ASSOCIATION_LUN,
                inquiry.TYPE_T10,
                inquiry.ASCII,
                VENDOR.ljust(8).encode() + self.serial.encode(),
            ),
            *alua.port_designators(port.relative, port.tag),
            Designator(
                inquiry.ASSOCIATION_TARGET,
                inquiry.TYPE_NAME,
                inquiry.UTF8,
                inquiry.name_string(iqn),
            ),
        )
        pages = {
            inquiry.UNIT_SERIAL_NUMBER: inquiry.encode_serial(self.serial),
            inquiry.DEVICE_IDENTIFICATION: inquiry.encode_identifiers(identifiers),
            inquiry.BLOCK_LIMITS: inquiry.encode_block_limits(self.limits),
            inquiry.BLOCK_DEVICE_CHARACTERISTICS: inquiry.encode_characteristics(),
            inquiry.LOGICAL_BLOCK_PROVISIONING: inquiry.encode_provisioning(
                Provisioning(lbpu=True, lbpws=True, lbpws10=True, lbprz=True)
            ),
        }
        supported = inquiry.encode_supported_pages((inquiry.SUPPORTED_PAGES, *pages))
        return {inquiry.SUPPORTED_PAGES: supported, **pages}

    def close(self) -> None:
        """Write back what is cached, and close the file. No task may be running."""
        self.store.close()
