"""The names that udev gives a LUN of the kernel's initiator."""

from __future__ import annotations

import pytest

from iserblk.scsi.inquiry import TYPE_EUI64, TYPE_NAA, TYPE_NAME, TYPE_T10, Designator
from iserblk.scsi.udev_names import properties

BINARY, ASCII, UTF8 = 1, 2, 3
NAA6 = Designator(0, TYPE_NAA, BINARY, bytes.fromhex("600140500112233445566778899aabbc"))
NAA5 = Designator(0, TYPE_NAA, BINARY, bytes.fromhex("5000c500a1b2c3d4"))
NAA3 = Designator(0, TYPE_NAA, BINARY, bytes.fromhex("3000000100000002"))
EUI = Designator(0, TYPE_EUI64, BINARY, bytes.fromhex("0123456789abcdef"))
T10 = Designator(0, TYPE_T10, ASCII, b"LIO-ORG disk0:1234")
T10_BINARY = Designator(0, TYPE_T10, BINARY, b"LIO-ORG\x01")
OWN = Designator(0, 0, ASCII, b"one two")
NAME = Designator(0, TYPE_NAME, UTF8, b"iqn.2026-11.example:disk,L,0x0\0\0")


def of(*designators: Designator, serial: str = "") -> dict[str, str]:
    return properties("IET", "VIRTUAL-DISK", "0001", serial, designators)


@pytest.mark.parametrize(
    ("designators", "serial"),
    [
        ([T10, NAA6], "3600140500112233445566778899aabbc"),
        ([NAA5, NAA6, EUI], "3600140500112233445566778899aabbc"),
        ([NAA3, NAA5], "35000c500a1b2c3d4"),
        ([T10, EUI, NAA3], "33000000100000002"),
        ([T10, EUI], "20123456789abcdef"),
        ([OWN, NAME, T10], "1LIO-ORG_disk0:1234"),
        ([T10, T10_BINARY], "14c494f2d4f524701"),
        ([NAME, OWN], "0IET_VIRTUAL-DISK_one_two"),
        ([NAME], None),
        ([], None),
        ([Designator(0, TYPE_NAA, BINARY, b"")], None),
        ([Designator(0, TYPE_NAA, ASCII, b"6001405 A/B\0\0")], "36001405_A_B"),
    ],
)
def test_which_designator_is_the_serial(designators: list[Designator], serial: str | None) -> None:
    assert of(*designators).get("ID_SERIAL") == serial


def test_the_world_wide_name() -> None:
    assert of(T10, NAA6, serial="0050 01") == {
        "ID_VENDOR": "IET",
        "ID_MODEL": "VIRTUAL-DISK",
        "ID_REVISION": "0001",
        "ID_TYPE": "disk",
        "ID_SERIAL": "3600140500112233445566778899aabbc",
        "ID_SERIAL_SHORT": "600140500112233445566778899aabbc",
        "ID_WWN": "0x6001405001122334",
        "ID_WWN_VENDOR_EXTENSION": "0x45566778899aabbc",
        "ID_WWN_WITH_EXTENSION": "0x600140500112233445566778899aabbc",
        "ID_SCSI_SERIAL": "0050_01",
    }
    eight = of(NAA5)
    assert eight["ID_WWN"] == eight["ID_WWN_WITH_EXTENSION"] == "0x5000c500a1b2c3d4"
    assert "ID_WWN_VENDOR_EXTENSION" not in eight
    assert not any("WWN" in name for name in of(EUI))


def test_the_serial_number() -> None:
    """VPD 80h names a LUN that has no other name, behind vendor and product."""
    found = of(NAME, serial="  beaf11 ")
    assert found["ID_SERIAL"] == "SIET_VIRTUAL-DISK_beaf11"
    assert found["ID_SERIAL_SHORT"] == found["ID_SCSI_SERIAL"] == "beaf11"


def test_values_are_plain() -> None:
    """They become names of links, and lines of a file."""
    wild = Designator(0, TYPE_T10, ASCII, b'a/../b"c\nd=e\x80$(f)')
    for value in properties("v\nX=1", 'm"', "r'", "s\0t", [wild]).values():
        assert not set(value) & set("\n\"'/$\0 ")
