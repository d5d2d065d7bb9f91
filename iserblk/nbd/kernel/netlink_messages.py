"""The messages of the netlink family ``nbd``, sent by pyroute2, which is loaded with this module.

Source: include/uapi/linux/nbd-netlink.h of Linux.
"""

from __future__ import annotations

import os
from typing import Any

from pyroute2.netlink import NLM_F_ACK, NLM_F_REQUEST, genlmsg, nla
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic import GenericNetlinkSocket

VERSION = 1  # of the family


class nbd_message(genlmsg):  # type: ignore[misc]
    """A message; pyroute2 numbers the attributes by their places in ``nla_map``."""

    prefix = "NBD_ATTR_"
    nla_map = (
        ("NBD_ATTR_UNSPEC", "none"),
        ("NBD_ATTR_INDEX", "uint32"),
        ("NBD_ATTR_SIZE_BYTES", "uint64"),
        ("NBD_ATTR_BLOCK_SIZE_BYTES", "uint64"),
        ("NBD_ATTR_TIMEOUT", "uint64"),
        ("NBD_ATTR_SERVER_FLAGS", "uint64"),
        ("NBD_ATTR_CLIENT_FLAGS", "uint64"),
        ("NBD_ATTR_SOCKETS", "sockets"),
        ("NBD_ATTR_DEAD_CONN_TIMEOUT", "uint64"),
        ("NBD_ATTR_DEVICE_LIST", "hex"),
        ("NBD_ATTR_BACKEND_IDENTIFIER", "asciiz"),
    )

    class sockets(nla):  # type: ignore[misc]
        """A list of descriptors."""

        nla_flags = 0x8000  # NLA_F_NESTED: the kernel's policy wants it
        prefix = "NBD_SOCK_"
        nla_map = (("NBD_SOCK_UNSPEC", "none"), ("NBD_SOCK_ITEM", "item"))

        class item(nla):  # type: ignore[misc]
            nla_flags = 0x8000
            prefix = "NBD_SOCK_"
            nla_map = (("NBD_SOCK_UNSPEC", "none"), ("NBD_SOCK_FD", "uint32"))


def message(command: int, attributes: list[tuple[str, Any]]) -> nbd_message:
    """A request. ``attributes``: of ``Settings.attributes``."""
    made = nbd_message()
    made["cmd"] = command
    made["version"] = VERSION
    made["attrs"] = attributes
    return made


def send(command: int, attributes: list[tuple[str, Any]]) -> None:
    """Send a request, and wait for the answer. Raises OSError with the kernel's reason."""
    try:
        with GenericNetlinkSocket() as socket:
            socket.bind("nbd", nbd_message)
            flags = NLM_F_REQUEST | NLM_F_ACK
            asked = message(command, attributes)
            list(socket.nlm_request(asked, msg_type=socket.prid, msg_flags=flags))
    except NetlinkError as error:
        raise OSError(error.code, os.strerror(error.code)) from None
