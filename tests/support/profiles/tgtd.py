"""tgtd: 29/00 for each new nexus, whether anything was lost or not; the same identifiers on every
host; nothing is told when a LUN's number gets another volume.

The first LUN of the first target of each host is ``t10.IET     00010001``, with an NAA 3h and an
NAA 6h identifier whose company ID is 000000, and the serial number beaf11, until its administrator
says otherwise (genestack issue 451: two volumes became one). While a number has no LUN, commands
end with 5/25/00 (``take_away``); the next LUN that gets it (``give``) reports nothing of its own,
and the nexus goes on. Seen with tgt 1.0.85 (tests/integration/test_tgtd_cache.py,
test_tgtd_identity.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from iserblk.scsi import sense
from iserblk.scsi.inquiry import ASCII, ASSOCIATION_LUN, BINARY, TYPE_NAA, TYPE_T10, Designator
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.seam import Nexus
from tests.support.renamed import Renamed

_TARGET = 1


class Device(Renamed):
    def greeting(self, _nexus: Nexus, _lun: int) -> int:
        return sense.POWER_ON_OR_RESET

    def serial(self, lun: int, _unit: LogicalUnit) -> str:
        return f"beaf{_TARGET}{lun}"

    def designators(self, lun: int, _unit: LogicalUnit) -> Sequence[Designator]:
        number = f"{_TARGET:04}{lun:04}"
        return [
            Designator(ASSOCIATION_LUN, TYPE_T10, ASCII, f"IET     {number}".encode()),
            Designator(ASSOCIATION_LUN, TYPE_NAA, BINARY, bytes.fromhex(f"30000001{number}")),
            Designator(
                ASSOCIATION_LUN,
                TYPE_NAA,
                BINARY,
                bytes.fromhex(f"60000000000000000e000000{number}"),
            ),
        ]
