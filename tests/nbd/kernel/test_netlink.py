"""What the kernel is told: attributes and their bytes."""

from __future__ import annotations

import errno

import pytest

from iserblk.nbd.kernel.netlink import CONNECT, RECONFIGURE, Netlink, Settings

# Laid out by hand after include/uapi/linux/nbd-netlink.h and linux/netlink.h.
EVERYTHING = [
    ("NBD_ATTR_SIZE_BYTES", 1 << 40),
    ("NBD_ATTR_BLOCK_SIZE_BYTES", 4096),
    ("NBD_ATTR_TIMEOUT", 90),
    ("NBD_ATTR_DEAD_CONN_TIMEOUT", 60),
    ("NBD_ATTR_SERVER_FLAGS", 0x1FF),
    ("NBD_ATTR_BACKEND_IDENTIFIER", "naa.6001"),
    (
        "NBD_ATTR_SOCKETS",
        {
            "attrs": [
                ("NBD_SOCK_ITEM", {"attrs": [("NBD_SOCK_FD", 5)]}),
                ("NBD_SOCK_ITEM", {"attrs": [("NBD_SOCK_FD", 6)]}),
            ]
        },
    ),
]


def test_what_is_not_given_is_not_told() -> None:
    assert Settings().attributes() == []
    assert Settings(dead_timeout=0).attributes() == [("NBD_ATTR_DEAD_CONN_TIMEOUT", 0)]


def test_every_setting_is_told() -> None:
    settings = Settings(1 << 40, 4096, 0x1FF, 90, 60, "naa.6001", [5, 6])
    assert settings.attributes() == EVERYTHING


def test_what_the_kernel_refuses_is_an_oserror() -> None:
    """There is no such device; or not even the family."""
    with pytest.raises(OSError) as raised:
        Netlink().reconfigure(1 << 20, Settings())
    assert raised.value.errno in (errno.ENOENT, errno.EINVAL, errno.EPERM)


def test_the_commands_are_those_of_the_kernel() -> None:
    assert (CONNECT, RECONFIGURE) == (1, 3)
