"""Identifies a LUN, and finds out what it can do, by commands that are sent once after each login.

A LUN lacks a command or a page when it refuses it with ILLEGAL REQUEST and invalid operation code
or invalid field in CDB. Any other error does not mean that, and is raised: a target that has just
started may answer with errors for a while. Such an error, taken for an answer, would make the LUN
look like another LUN, or a smaller one.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from iserblk.commands.command import Operation
from iserblk.commands.running import ask, command
from iserblk.commands.session import CommandSession
from iserblk.disk.lun.geometry import Geometry
from iserblk.disk.seam import LunInfo
from iserblk.errors import (
    NoSuchLun,
    NotSupported,
    RemoteProtocolError,
    ReservationConflict,
    ScsiError,
    UnusableLun,
)
from iserblk.scsi import capacity, cdb, inquiry, lba, luns, mode
from iserblk.scsi.sense import Sense

log = logging.getLogger(__name__)

MAX_TRANSFER = 1 << 20  # bytes of one READ or WRITE, unless the LUN allows less
_ALLOCATION = 512
_NAA_OF_LIO = "naa.6001405"  # the company ID that LIO puts into its names


class _Identify:
    """The commands that identify one LUN."""

    def __init__(self, session: CommandSession, lun: int, name: str, url: str) -> None:
        self.session = session
        self.lun = luns.encode(lun)
        self.name = name
        self.url = url

    def ask(self, command_block: bytes, length: int = _ALLOCATION) -> Operation[memoryview]:
        return (yield from ask(self.session, self.lun, command_block, length, self.name))

    def ask_optional(
        self, command_block: bytes, what: str, length: int = _ALLOCATION, reserved_ok: bool = False
    ) -> Operation[memoryview | None]:
        """As ``ask``; None when the LUN does not have what is asked for. ``reserved_ok``: None also
        when it does not answer because another initiator has reserved it; for answers that the
        caller can do without."""
        try:
            answer = yield from self.ask(command_block, length)
        except ScsiError as error:
            hidden = reserved_ok and isinstance(error, ReservationConflict)
            lacks = isinstance(error.sense, Sense) and error.sense.is_not_there
            if not hidden and not lacks:
                raise
            log.info("%s: no %s: %s", self.name, what, error)
            return None
        return answer

    def page(
        self, code: int, pages: tuple[int, ...], length: int = _ALLOCATION
    ) -> Operation[memoryview | None]:
        """One VPD page; None when the LUN does not have it."""
        if code not in pages:
            return None
        request = cdb.inquiry(length, code)
        return (yield from self.ask_optional(request, f"VPD page {code:#04x}", length))

    def answers_lba_status(self, geometry: Geometry, blocks: int) -> Operation[bool]:
        """Whether the LUN of so many blocks has GET LBA STATUS. LIO has thin provisioning without
        it. Asked for a block in the middle: EqualLogic's counts in blocks of 512 bytes, whatever
        the LUN's are, and for block 0 that does not show."""
        length = lba.LBA_STATUS_HEADER + lba.LBA_STATUS_DESCRIPTOR
        middle = blocks // 2
        request = cdb.get_lba_status16(middle, length)
        answer = yield from self.ask_optional(request, "GET LBA STATUS", length, reserved_ok=True)
        if answer is None:
            return False
        try:
            geometry.extents_untrusted(answer, middle * geometry.block, geometry.block, blocks)
        except RemoteProtocolError as error:
            log.warning("%s: %s; all of the LUN counts as data", self.name, error)
            return False
        return True

    def capacity(self) -> Operation[tuple[capacity.Capacity, bool]]:
        """The capacity, and whether READ CAPACITY(16) told it. Raises UnusableLun."""
        try:
            answer = yield from self.ask_optional(cdb.read_capacity16(32), "READ CAPACITY(16)", 32)
            if answer is not None:
                return capacity.decode16(answer), True
            return capacity.decode10((yield from self.ask(cdb.read_capacity10(), 8))), False
        except capacity.UnusableCapacity as error:
            raise UnusableLun(f"{self.url}: {self.name} has {error.reason}") from None


class Names(NamedTuple):
    """What identifies a LUN. ``pages``: the VPD pages that it has."""

    vendor: str
    product: str
    revision: str
    serial: str
    identifiers: tuple[str, ...]
    designators: tuple[inquiry.Designator, ...]
    pages: tuple[int, ...]


class NotADisk(NotSupported):
    """A tape, an enclosure, …: which a list of disks does not have."""


def names(session: CommandSession, lun: int, name: str, url: str) -> Operation[Names]:
    """What one LUN tells even initiators that a reservation shuts out. (READ CAPACITY should be
    such a command, too, but LIO answers it with RESERVATION CONFLICT.)

    Raises NoSuchLun, or NotADisk.
    """
    steps = _Identify(session, lun, name, url)
    standard = inquiry.decode_standard((yield from steps.ask(cdb.inquiry(96), 96)))
    if standard.qualifier != 0:
        raise NoSuchLun(
            f"{url}: the target has no LUN {lun}; `iserblk info` with the URL without /{lun} lists"
            " its LUNs"
        )
    if standard.device_type != inquiry.DISK:
        raise NotADisk(
            f"{url}: LUN {lun} is no disk but {inquiry.device_type_words(standard.device_type)}; "
            "name another LUN"
        )
    yield from command(session, steps.lun, cdb.test_unit_ready(), name)
    listed = yield from steps.ask_optional(cdb.inquiry(_ALLOCATION, 0), "vital product data")
    pages = inquiry.decode_supported_pages(listed)
    serial = inquiry.decode_serial((yield from steps.page(0x80, pages)))
    designation = yield from steps.page(0x83, pages)
    return Names(
        vendor=standard.vendor,
        product=standard.product,
        revision=standard.revision,
        serial=serial,
        identifiers=inquiry.decode_identifiers(designation),
        designators=tuple(
            each
            for each in inquiry.decode_designators(designation)
            if each.association == inquiry.ASSOCIATION_LUN and each.data
        ),
        pages=pages,
    )


def _is_lio(known: Names) -> bool:
    """Whether the LUN is Linux's own target's, also where it was given the vendor of an appliance.

    Its WRITE with FUA on a file (``fd_execute_rw_buffered``) is not to be used: it waits for the
    disk, drops what comes of that, and says GOOD. The kernel has reported the loss then, and the
    next SYNCHRONIZE CACHE says GOOD, too (seen with Linux 6.1). A SYNCHRONIZE CACHE in place of FUA
    tells.
    """
    return known.vendor == "LIO-ORG" or any(
        each.lower().startswith(_NAA_OF_LIO) for each in known.identifiers
    )


def identify(
    session: CommandSession, lun: int, name: str, url: str, target: str
) -> Operation[tuple[LunInfo, Geometry]]:
    """Read INQUIRY, VPD pages, capacity and mode pages of one LUN. Raises as ``names``, and
    UnusableLun."""
    known = yield from names(session, lun, name, url)
    steps, pages = _Identify(session, lun, name, url), known.pages
    block_limits = inquiry.decode_block_limits((yield from steps.page(0xB0, pages)))
    characteristics = inquiry.decode_characteristics((yield from steps.page(0xB1, pages)))
    provisioning = inquiry.decode_provisioning((yield from steps.page(0xB2, pages)))
    gateway = yield from steps.page(inquiry.GATEWAY, pages, inquiry.GATEWAY_LENGTH)

    size, long_cdbs = yield from steps.capacity()
    caching = yield from steps.ask_optional(
        cdb.mode_sense6(0x08, 192), "caching mode page", 192, reserved_ok=True
    )
    modes = mode.decode_sense6(caching) if caching is not None else mode.UNKNOWN

    block = size.block_size
    can_unmap = provisioning.lbpu or (size.lbpme and block_limits.max_unmap_lba_count > 0)
    max_transfer = MAX_TRANSFER
    if block_limits.max_transfer_length:
        max_transfer = min(max_transfer, block_limits.max_transfer_length * block)
    geometry = Geometry(
        block=block,
        long_cdbs=long_cdbs,
        max_unmap_blocks=block_limits.max_unmap_lba_count,
        max_unmap_descriptors=block_limits.max_unmap_descriptor_count,
        unmap_granularity=block_limits.unmap_granularity,
        unmap_alignment=block_limits.unmap_alignment,
        max_write_same_blocks=block_limits.max_write_same_length,
        zero_when_unmapped=size.lbprz,
        tells_cache=modes.tells_cache,
    )
    can_extents = (
        size.lbpme and long_cdbs and (yield from steps.answers_lba_status(geometry, size.blocks))
    )
    info = LunInfo(
        name=name,
        url=url,
        target=target,
        lun=lun,
        size=size.blocks * block,
        block_size=block,
        physical_block_size=size.physical_block_size,
        read_only=modes.write_protected,
        rotational=characteristics.rotational,
        write_cache=modes.write_cache,
        fua=modes.dpofua and not _is_lio(known),
        can_trim=can_unmap,
        can_zero=provisioning.lbpws or block_limits.max_write_same_length > 0,
        zero_by_unmap=provisioning.lbpws and size.lbprz,
        can_extents=can_extents,
        vendor=known.vendor,
        product=known.product,
        revision=known.revision,
        serial=known.serial,
        identifiers=known.identifiers,
        max_transfer=max_transfer,
        optimal_transfer=block_limits.optimal_transfer_length * block,
        designators=known.designators,
        unmap_granularity=block_limits.unmap_granularity,
        unmap_alignment=block_limits.unmap_alignment,
        gateway_to=inquiry.decode_gateway(gateway),
        connection=session.describe(),
    )
    return info, geometry
