"""A router between initiator and target: three network namespaces, and packets on both links."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from tests.support.blockwork import everything
from tests.support.namespaces import captured, decoded, link, make_host, need
from tests.support.target_elsewhere import our_target

NEAR, FAR = "198.51.100", "203.0.113"  # for documentation (RFC 5737)
CLIENT, TARGET = f"{NEAR}.1", f"{FAR}.2"


# shows: SYSTEM-28
@pytest.mark.parametrize(
    ("scheme", "provider"), [("iscsi", "tcp"), ("iser", "iwarp")], ids=["iscsi", "iwarp"]
)
@pytest.mark.parametrize("far_mtu", [1500, 1280])
def test_all_block_operations_through_a_router(
    tmp_path: Path, scheme: str, provider: str, far_mtu: int
) -> None:
    """The far link may be narrower than the near one: the router then asks for smaller packets."""
    need("tcpdump", "tshark")
    with ExitStack() as stack:
        client, router, target = (make_host(stack, role) for role in ("client", "router", "target"))
        link(client, router, NEAR)
        link(router, target, FAR, far_mtu)
        router.sysctl("net.ipv4.ip_forward", 1)
        client.ip("route", "add", f"{FAR}.0/24", "via", f"{NEAR}.2")
        target.ip("route", "add", f"{NEAR}.0/24", "via", f"{FAR}.1")
        file = tmp_path / "disk"
        with open(file, "wb") as whole:
            whole.truncate(80 << 20)
        url = stack.enter_context(our_target(target, TARGET, [file]))
        near, far = tmp_path / "near.pcap", tmp_path / "far.pcap"
        with captured(client, NEAR, near), captured(target, FAR, far):
            outcome = client.call(
                lambda: trio.run(everything, url.replace("iser:", f"{scheme}:") + "/0", {})
            )
        assert outcome.connection.get("provider", "tcp") == provider
        hops = []
        for capture in (near, far):
            packets = decoded(capture, ["ip.ttl", "ip.src", "ip.len"], "-Y", "tcp.len > 0")
            assert {source for _, source, _ in packets} == {CLIENT, TARGET}
            hops.append({source: ttl for ttl, source, _ in packets})
        assert hops == [{CLIENT: "64", TARGET: "63"}, {CLIENT: "63", TARGET: "64"}]
