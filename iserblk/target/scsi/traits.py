"""What a logical unit says of itself, where it is not a unit of a file."""

from __future__ import annotations

from dataclasses import dataclass

from iserblk.scsi import opcodes
from iserblk.scsi.inquiry import Designator, Provisioning


@dataclass(slots=True, frozen=True)
class Traits:
    """What a unit says of itself, where that is not what a unit of a file says.

    ``designators``: its names in VPD page 83h. ``provisioning``: what is unmapped, and how; without
    ``lbpu`` and ``lbpws`` the unit is not thinly provisioned. ``granularity``, ``alignment``: of
    UNMAP, in blocks; 0: unknown. ``physical_block``, ``optimal_transfer``: bytes. ``lba_status``:
    GET LBA STATUS can tell holes. ``reservable``: reservations here exclude all other initiators of
    the medium. ``atomic``: so does a COMPARE AND WRITE. ``gateway_to``: names of the targets on the
    way to the medium.
    """

    vendor: str
    product: str
    revision: str
    designators: tuple[Designator, ...]
    provisioning: Provisioning
    granularity: int
    alignment: int
    physical_block: int
    optimal_transfer: int
    rotational: bool
    lba_status: bool
    reservable: bool
    atomic: bool
    gateway_to: tuple[str, ...] = ()

    def lacks(self) -> frozenset[int]:
        """Keys of the commands that the unit does not have (see ``commands.COMMANDS``), and opcodes
        with all of their service actions."""
        found: set[int] = set()
        if not self.provisioning.lbpu:
            found.add(opcodes.UNMAP)
        if not self.lba_status:
            found.add(opcodes.SERVICE_ACTION_IN_16 << 8 | opcodes.SA_GET_LBA_STATUS)
        if not self.reservable:
            found |= {
                opcodes.RESERVE_6,
                opcodes.RELEASE_6,
                opcodes.PERSISTENT_RESERVE_IN,
                opcodes.PERSISTENT_RESERVE_OUT,
            }
        if not self.atomic:
            found |= {opcodes.COMPARE_AND_WRITE, opcodes.XDWRITEREAD_10}
        return frozenset(found)
