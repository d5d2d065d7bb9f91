"""The names that udev gives a LUN which the kernel's own initiator has.

udev asks such a disk by its program scsi_id, and makes links of the answer: ``scsi-SERIAL`` and
``wwn-WWN`` in /dev/disk/by-id. The first designator of the device identification page (VPD 83h)
that is among these names the LUN: NAA IEEE Registered Extended, NAA IEEE Registered, any other NAA,
EUI-64, T10 vendor ID, vendor specific; of each kind a binary one before one in ASCII. The number of
its kind stands in front of it. Without one the LUN is called S, vendor, product and serial number
(VPD 80h). scsi_id(8), and the rules of udev (60-persistent-storage.rules).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from iserblk.scsi.inquiry import TYPE_EUI64, TYPE_NAA, TYPE_T10, Designator

_VENDOR_SPECIFIC = 0
_BINARY, _ASCII = 1, 2
_REGISTERED_EXTENDED, _REGISTERED, _ANY = 6, 5, None
_ORDER: tuple[tuple[int, int | None], ...] = (
    (TYPE_NAA, _REGISTERED_EXTENDED),
    (TYPE_NAA, _REGISTERED),
    (TYPE_NAA, _ANY),
    (TYPE_EUI64, _ANY),
    (TYPE_T10, _ANY),
    (_VENDOR_SPECIFIC, _ANY),
)
_WWN = 16  # digits; what an identifier has more is its vendor's extension
_PLAIN = re.compile(r"[^A-Za-z0-9#+\-.:=@_]")


def properties(
    vendor: str, product: str, revision: str, serial: str, designators: Sequence[Designator]
) -> dict[str, str]:
    """The properties that udev has of the LUN, by their names there. Without any name of the LUN:
    none that names it."""
    found = {
        "ID_VENDOR": _plain(vendor),
        "ID_MODEL": _plain(product),
        "ID_REVISION": _plain(revision),
        "ID_TYPE": "disk",
    }
    model = f"{vendor:<8.8}{product:<16.16}"
    chosen = _choose(designators)
    if chosen is not None:
        kind, short = chosen.kind, _identifier(chosen)
        prefix = model if kind == _VENDOR_SPECIFIC else ""
        found["ID_SERIAL"] = _plain(f"{kind:x}{prefix}{short}")
        found["ID_SERIAL_SHORT"] = _plain(short)
        if kind == TYPE_NAA:
            wwn, extension = short[:_WWN], short[_WWN : 2 * _WWN]
            found["ID_WWN"] = f"0x{_plain(wwn)}"
            if extension:
                found["ID_WWN_VENDOR_EXTENSION"] = f"0x{_plain(extension)}"
            found["ID_WWN_WITH_EXTENSION"] = f"0x{_plain(wwn + extension)}"
    elif serial:
        found["ID_SERIAL"] = _plain(f"S{model}{serial}")
        found["ID_SERIAL_SHORT"] = _plain(serial)
    if serial:
        found["ID_SCSI_SERIAL"] = _plain(serial)
    return {name: value for name, value in found.items() if value}


def _choose(designators: Iterable[Designator]) -> Designator | None:
    known = [each for each in designators if each.code_set in (_BINARY, _ASCII) and each.data]
    for kind, format_ in _ORDER:
        for code_set in (_BINARY, _ASCII):
            for each in known:
                if (
                    each.kind == kind
                    and each.code_set == code_set
                    and format_ in (_ANY, each.data[0] >> 4)
                ):
                    return each
    return None


def _identifier(each: Designator) -> str:
    if each.code_set == _BINARY:
        return each.data.hex()
    return each.data.split(b"\0")[0].decode("ascii", errors="replace")


def _plain(text: str) -> str:
    """Blanks at the ends are left out, those within and what else no name of a link may have become
    an underscore; several blanks one."""
    return _PLAIN.sub("_", re.sub(r"\s+", "_", text.strip()))
