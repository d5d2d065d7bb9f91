"""The bytes of netlink messages, for the kernel's family ``nbd``."""

from __future__ import annotations

import struct

import pytest

from iserblk.nbd.kernel.netlink import CONNECT, RECONFIGURE, Settings
from iserblk.nbd.kernel.netlink_messages import message

# Numbers of linux/nbd-netlink.h.
INDEX, SIZE, BLOCK_SIZE, TIMEOUT, FLAGS, SOCKETS, DEAD, BACKEND = 1, 2, 3, 4, 5, 7, 8, 10
NESTED = 1 << 15


def attribute(kind: int, value: bytes) -> bytes:
    """linux/netlink.h: length, type, value, and bytes up to a multiple of four."""
    header = struct.pack("=HH", 4 + len(value), kind)
    return header + value + bytes(-len(value) % 4)


def u32(value: int) -> bytes:
    return struct.pack("=I", value)


def u64(value: int) -> bytes:
    return struct.pack("=Q", value)


def descriptor(number: int) -> bytes:
    return attribute(1 | NESTED, attribute(1, u32(number)))


@pytest.mark.parametrize(
    ("command", "settings", "expected"),
    [
        (RECONFIGURE, Settings(), b""),
        (
            CONNECT,
            Settings(1 << 40, 4096, 0x1FF, 90, 60, "naa.6001", [5, 6]),
            attribute(SIZE, u64(1 << 40))
            + attribute(BLOCK_SIZE, u64(4096))
            + attribute(TIMEOUT, u64(90))
            + attribute(DEAD, u64(60))
            + attribute(FLAGS, u64(0x1FF))
            + attribute(BACKEND, b"naa.6001\0")
            + attribute(SOCKETS | NESTED, descriptor(5) + descriptor(6)),
        ),
    ],
)
def test_a_message(command: int, settings: Settings, expected: bytes) -> None:
    made = message(command, [("NBD_ATTR_INDEX", 3), *settings.attributes()])
    made.encode()
    netlink_header = 16
    assert bytes(made.data)[netlink_header:] == (
        bytes([command, 1, 0, 0]) + attribute(INDEX, u32(3)) + expected
    )
