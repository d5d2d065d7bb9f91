"""Device servers whose LUNs have other names than ours, and whose numbers are given away without a
word: the base of profiles (tests/support/profiles)."""

from __future__ import annotations

from collections.abc import Sequence

from iserblk.scsi import alua, inquiry
from iserblk.scsi.inquiry import Designator
from iserblk.target.scsi.device import DeviceServer
from iserblk.target.scsi.unit import LogicalUnit


class Renamed(DeviceServer):
    """``serial`` and ``designators`` say what VPD pages 80h and 83h have for a LUN: our serial
    number, and no identifier, until a profile says more."""

    def serial(self, _lun: int, unit: LogicalUnit) -> str:
        return unit.serial

    def designators(self, _lun: int, _unit: LogicalUnit) -> Sequence[Designator]:
        return ()

    def _note_pages(self, lun: int, unit: LogicalUnit) -> None:
        super()._note_pages(lun, unit)
        for tag, port in self.ports.by_tag.items():
            names = [
                *self.designators(lun, unit),
                *alua.port_designators(port.relative, port.tag),
            ]
            self._pages[tag, lun] |= {
                inquiry.UNIT_SERIAL_NUMBER: inquiry.encode_serial(self.serial(lun, unit)),
                inquiry.DEVICE_IDENTIFICATION: inquiry.encode_identifiers(names),
            }

    def take_away(self, lun: int) -> LogicalUnit:
        """From now on there is no such LUN: 5/25/00. No initiator is told."""
        return self._units.pop(lun)

    def give(self, lun: int, unit: LogicalUnit) -> None:
        """From now on ``unit`` has the number. No initiator is told."""
        self._units[lun] = unit
        self._serve(lun, unit)
