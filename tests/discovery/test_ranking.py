"""Which portal is tried first."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

import pytest

from iserblk.discovery.ranking import Candidate, as_iser, is_near, judge, local_networks, rank
from iserblk.iscsi.send_targets import Portal

NETWORKS = [ipaddress.ip_network(text) for text in ("10.1.0.0/16", "2001:db8:1::/64")]


# shows: SYSTEM-12
@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("10.1.2.3", True),
        ("10.2.2.3", False),
        ("2001:db8:1::9", True),
        ("2001:db8:2::9", False),
        ("storage.example", None),
    ],
)
def test_near(host: str, near: bool | None) -> None:
    assert is_near(host, NETWORKS) is near


# shows: SYSTEM-12, SYSTEM-21
def test_order() -> None:
    """iSER first, then the own subnet, then as given. What is not known is between yes and no.

    proves: ISER-B.3-2, ISER-GEN-3.3-2, ISER-GEN-3.4-2, ISER-IB00-6.4-1
    """
    given = [
        judge(Portal("10.9.0.1", 1, 1, 0), NETWORKS),
        judge(Portal("10.9.0.2", 1), NETWORKS),
        judge(Portal("10.1.0.3", 1), NETWORKS),
        judge(Portal("name", 1), NETWORKS),
        judge(Portal("10.9.0.4", 1), NETWORKS, iser=True),
        judge(Portal("10.1.0.5", 1, 1, 3), NETWORKS),
        judge(Portal("10.1.0.6", 1, 1, 2), NETWORKS),
        judge(Portal("10.1.0.7", 1), NETWORKS),
    ]
    order = [each.portal.host for each in rank(given)]
    assert order == [
        *("10.1.0.5", "10.9.0.4", "10.1.0.3", "10.1.0.7"),
        *("10.9.0.2", "name", "10.1.0.6", "10.9.0.1"),
    ]


def test_what_cannot_be_used_comes_last() -> None:
    """A link-local address without an interface, also where another interface of this machine has a
    network of such addresses, and whatever the target says of iSER."""
    networks = [*NETWORKS, ipaddress.ip_network("fe80::/64")]
    hosts = ("fe80::1", "fe80::2%eth0", "10.9.0.1", "name")
    ways = rank([judge(Portal(host, 1, 1, 3 if host == "fe80::1" else 0), networks)
                 for host in hosts])  # fmt: skip
    assert [way.portal.host for way in ways] == ["fe80::2%eth0", "10.9.0.1", "name", "fe80::1"]
    assert [(way.unusable, way.near) for way in ways[::3]] == [(False, True), (True, False)]


# shows: SYSTEM-21
def test_asking_counts_more_than_the_type() -> None:
    portal = Portal("h", 1, 1, 0)
    assert judge(portal, NETWORKS).iser is False
    assert judge(portal, NETWORKS, iser=True).iser is True
    assert as_iser(Candidate(portal, False), True).iser is True


# shows: SYSTEM-12
def test_local_networks(tmp_path: Path) -> None:
    """Networks come from the kernel's tables; rows that make no sense are left out."""
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    (net / "route").write_text(
        "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"
        f"eth0\t00000000\t{word('10.1.0.1')}\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
        f"eth0\t{word('10.1.0.0')}\t00000000\t0001\t0\t0\t0\t{word('255.255.0.0')}\t0\t0\t0\n"
        f"eth0\t{word('10.7.0.0')}\t{word('10.1.0.1')}\t0003\t0\t0\t0\t{word('255.255.0.0')}\t0\n"
        "eth0\trubbish\n"
    )
    (net / "if_inet6").write_text(
        "20010db8000100000000000000000005 02 40 00 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "xyz 02\n"
    )
    found = [str(network) for network in local_networks(tmp_path)]
    assert found == ["127.0.0.0/8", "10.1.0.0/16", "2001:db8:1::/64", "::1/128"]


def word(address: str) -> str:
    """Hexadecimal, in the machine's byte order."""

    return f"{int.from_bytes(ipaddress.IPv4Address(address).packed, sys.byteorder):08X}"


def test_this_machine_has_a_loopback() -> None:
    assert is_near("127.0.0.1", local_networks())
    assert local_networks(Path("/nowhere")) == [ipaddress.ip_network("127.0.0.0/8")]
