"""What the kernel is told, and how, byte by byte; and what it answers."""

from __future__ import annotations

import errno
import os
import socket
import struct

import pytest

from iserblk.nbd.kernel import netlink
from iserblk.nbd.kernel.netlink import CONNECT, RECONFIGURE, Netlink, Settings, message

# Numbers of linux/nbd-netlink.h.
INDEX, SIZE, BLOCK_SIZE, TIMEOUT, FLAGS, SOCKETS, DEAD, BACKEND = 1, 2, 3, 4, 5, 7, 8, 10
NESTED = 1 << 15
GENERIC = 16  # NETLINK_GENERIC


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
        (RECONFIGURE, Settings(dead_timeout=0), attribute(DEAD, u64(0))),
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
    assert message(command, 3, settings) == (
        bytes([command, 1, 0, 0]) + attribute(INDEX, u32(3)) + expected
    )


def test_the_commands_are_those_of_the_kernel() -> None:
    assert (CONNECT, RECONFIGURE) == (1, 3)


def test_a_family_is_found() -> None:
    """This kernel's own family of families, which is always there."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, GENERIC) as sock:
        sock.bind((0, 0))
        assert netlink.family_number(sock, b"nlctrl") == 16
        with pytest.raises(OSError) as raised:
            netlink.family_number(sock, b"no-such")
    assert raised.value.errno == errno.ENOENT


def framed(kind: int, body: bytes) -> bytes:
    header = struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0)
    return header + body + bytes(-len(body) % 4)


ANSWER = b"\1\1\0\0" + attribute(INDEX, u32(3))
DONE = framed(2, struct.pack("=i", 0) + bytes(16))


@pytest.mark.parametrize("messages", [[framed(30, ANSWER), DONE], [framed(30, ANSWER) + DONE]])
def test_answers_come_alone_or_together(messages: list[bytes]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for each in messages:
            theirs.send(each)
        assert netlink.exchange(ours, 30, b"\5\1\0\0") == [ANSWER]
        assert theirs.recv(100) == struct.pack("=IHHII", 20, 30, 5, 0, 0) + b"\5\1\0\0"


def test_a_refusal_is_an_oserror() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, pytest.raises(OSError) as raised:
        theirs.send(framed(2, struct.pack("=i", -errno.EBUSY) + bytes(16)))
        netlink.exchange(ours, 30, b"")
    assert raised.value.errno == errno.EBUSY and raised.value.strerror == os.strerror(errno.EBUSY)


def test_what_the_kernel_refuses_is_an_oserror() -> None:
    """There is no such device; or not even the family."""
    with pytest.raises(OSError) as raised:
        Netlink().reconfigure(1 << 20, Settings())
    assert raised.value.errno in (errno.ENOENT, errno.EINVAL, errno.EPERM)
