"""NetApp ONTAP: one target name for all volumes of a virtual machine, on every portal; what tells
volumes apart is their identifiers.

Each LUN has an NAA 6h identifier with NetApp's company ID 00a098, a T10 vendor ID, and, of the
target device, the SCSI name string of the target: the same for all LUNs. Numbers are those of a
mapping, and can be given to another volume, after which each LUN reports 3F/0E (``remap``).
Sources: NetApp's documents on LUN serial numbers and igroups; multipath-tools issue 144 for names
of the target in page 83h.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from iserblk.scsi import inquiry, sense
from iserblk.scsi.inquiry import Designator
from iserblk.target.scsi.unit import LogicalUnit
from tests.support.renamed import Renamed


class Device(Renamed):
    def designators(self, _lun: int, unit: LogicalUnit) -> Sequence[Designator]:
        own = hashlib.sha256(unit.serial.encode()).digest()
        naa = bytes.fromhex("600a0980") + own[:12]
        return [
            Designator(inquiry.ASSOCIATION_LUN, inquiry.TYPE_NAA, inquiry.BINARY, naa),
            Designator(
                inquiry.ASSOCIATION_LUN,
                inquiry.TYPE_T10,
                inquiry.ASCII,
                b"NETAPP   LUN " + own[:6].hex().encode(),
            ),
            Designator(
                inquiry.ASSOCIATION_TARGET,
                inquiry.TYPE_NAME,
                inquiry.UTF8,
                inquiry.name_string(self._iqn),
            ),
        ]

    def remap(self, lun: int, unit: LogicalUnit) -> None:
        """``unit`` gets the number of another volume."""
        self.take_away(lun)
        self.give(lun, unit)
        for nexus in list(self._nexuses):
            for each in list(self._units):
                self._attend(nexus, each, sense.REPORTED_LUNS_CHANGED)
