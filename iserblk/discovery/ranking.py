"""In which order to try the portals of one target: iSER first, then the own subnets, then as given.

Pure; ``local_networks`` reads what the kernel says of this machine's interfaces.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from iserblk.iscsi import send_targets
from iserblk.iscsi.send_targets import Portal

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Portals of these types take iSER; software iWARP and rdma_cm reach them.
_ISER_TYPES = (send_targets.IWARP_TCP, send_targets.INFINIBAND)
_UP = 0x1
_GATEWAY = 0x2
_LOOPBACK = ipaddress.ip_network("127.0.0.0/8")


@dataclass(slots=True, frozen=True)
class Candidate:
    """One portal, and what is known of it. ``iser``: it takes iSER; None: not known.
    ``near``: in a subnet of this machine, None where the portal is a name."""

    portal: Portal
    iser: bool | None = None
    near: bool | None = None


def judge(portal: Portal, networks: Collection[Network], iser: bool | None = None) -> Candidate:
    """``iser``: what was found out by asking; else the portal group's type says it, if anything."""
    if iser is None and portal.kind is not None:
        iser = portal.kind in _ISER_TYPES
    return Candidate(portal, iser, is_near(portal.host, networks))


def is_near(host: str, networks: Collection[Network]) -> bool | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return any(address in network for network in networks if network.version == address.version)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best one first. Stable: what is alike stays in the order given."""
    preference = {True: 0, None: 1, False: 2}
    return sorted(candidates, key=lambda each: (preference[each.iser], not each.near))


def as_iser(candidate: Candidate, iser: bool) -> Candidate:
    """The same, with what was found out by asking."""
    return replace(candidate, iser=iser)


def local_networks(root: Path = Path("/")) -> list[Network]:
    """The subnets that this machine's interfaces are in; those that cannot be read are left out."""
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
    """Routes without a gateway: interface, destination, gateway, flags, …, mask; hexadecimal
    words in the machine's byte order."""
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
    """Addresses: 32 hexadecimal digits, interface, prefix length, scope, flags, name."""
    found: list[Network] = []
    for row in rows:
        fields = row.split()
        try:
            address = bytes.fromhex(fields[0])
            found.append(ipaddress.IPv6Network((address, int(fields[2], 16)), strict=False))
        except (ValueError, IndexError):
            continue
    return found
