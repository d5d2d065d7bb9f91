"""Ranks the portals of a target: iSER first, then those in subnets of this machine, then as given;
last those that cannot be used, because their addresses lack an interface.

Only ``local_networks`` does I/O: it reads this machine's subnets from /proc.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from iserblk.iscsi import send_targets
from iserblk.iscsi.send_targets import Portal, needs_interface

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Portals of these types take iSER; software iWARP and rdma_cm reach them.
_ISER_TYPES = (send_targets.IWARP_TCP, send_targets.INFINIBAND)
_UP = 0x1
_GATEWAY = 0x2
_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


@dataclass(slots=True, frozen=True)
class Candidate:
    """One portal, and what is known about it. ``iser``: whether it takes iSER; None: not known.
    ``near``: whether it is in a subnet of this machine; None: the portal is a name."""

    portal: Portal
    iser: bool | None = None
    near: bool | None = None

    @property
    def unusable(self) -> bool:
        """A link-local address without %INTERFACE."""
        return needs_interface(self.portal.host)


def judge(portal: Portal, networks: Collection[Network], iser: bool | None = None) -> Candidate:
    """Make a Candidate of a portal. ``iser``: whether a probe found that it takes iSER; None: not
    probed, so the type of the portal (``portal.kind``) tells, if it is known."""
    if iser is None and portal.kind is not None:
        iser = portal.kind in _ISER_TYPES
    return Candidate(portal, iser, is_near(portal.host, networks))


def is_near(host: str, networks: Collection[Network]) -> bool | None:
    # None: ``host`` is a name, not an address.
    if needs_interface(host):  # each interface has its own network of these addresses
        return False
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return any(address in network for network in networks if network.version == address.version)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Sort candidates, the best first. Equal candidates stay in the order given."""
    preference = {True: 0, None: 1, False: 2}
    return sorted(
        candidates, key=lambda each: (each.unusable, preference[each.iser], not each.near)
    )


def as_iser(candidate: Candidate, iser: bool) -> Candidate:
    """A copy of ``candidate`` with ``iser``, the result of a probe."""
    return replace(candidate, iser=iser)


def local_networks(root: Path = Path("/")) -> list[Network]:
    """The subnets of this machine's interfaces. Subnets that cannot be read are left out."""
    networks: list[Network] = [_LOOPBACK]
    networks += _ipv4(_lines(root / "proc/net/route")[1:])
    networks += _ipv6(_lines(root / "proc/net/if_inet6"))
    return networks


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _ipv4(rows: Sequence[str]) -> list[Network]:
    """The networks of routes without a gateway. Fields of a row: interface, destination, gateway,
    flags, …, mask; hexadecimal words in the machine's byte order."""
    found: list[Network] = []
    for row in rows:
        fields = row.split()
        try:
            flags = int(fields[3], 16)
            destination, mask = (
                socket.inet_ntoa(struct.pack("=I", int(fields[at], 16))) for at in (1, 7)
            )
            network = ipaddress.IPv4Network((destination, mask))
        except (ValueError, IndexError, struct.error):
            continue
        if flags & _UP and not flags & _GATEWAY and network.prefixlen:
            found.append(network)
    return found


def _ipv6(rows: Sequence[str]) -> list[Network]:
    """The networks of addresses. Fields of a row: address (32 hexadecimal digits), interface,
    prefix length, scope, flags, name."""
    found: list[Network] = []
    for row in rows:
        fields = row.split()
        try:
            address = bytes.fromhex(fields[0])
            found.append(ipaddress.IPv6Network((address, int(fields[2], 16)), strict=False))
        except (ValueError, IndexError):
            continue
    return found
