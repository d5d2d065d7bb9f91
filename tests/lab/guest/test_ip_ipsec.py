"""ESP between two network namespaces; iserblk knows nothing of it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from iserblk.disk.aio import open_disks
from iserblk.errors import TransportError
from tests.support.namespaces import Host, captured, counted, link, make_host, need
from tests.support.target_elsewhere import IQN, our_target

NET = "192.0.2"
SIZE = 256 << 10  # the cipher is slow in an emulated machine
CLIENT, TARGET = f"{NET}.1", f"{NET}.2"
SPI = {CLIENT: "0x1001", TARGET: "0x1002"}  # of what each sends


def aead() -> list[str]:
    """AES-GCM with 128 bits of key and 32 of salt: what RFC 7143 section 9.3.2 says should be."""
    return ["aead", "rfc4106(gcm(aes))", random_key(20), "128"]


def random_key(size: int) -> str:
    return "0x" + os.urandom(size).hex()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def protect(hosts: dict[str, Host]) -> None:
    """Policies and security associations for all traffic between the two, in both directions."""
    keys = {address: aead() for address in hosts}
    for here, host in hosts.items():
        (there,) = set(hosts) - {here}
        for source, destination, way in ((here, there, "out"), (there, here, "in")):
            ends = ("src", source, "dst", destination)
            esp = ("proto", "esp", "reqid", "1", "mode", "transport")
            host.ip(*("xfrm", "state", "add", *ends, "spi", SPI[source], *esp),
                    *keys[source], *("flag", "esn", "replay-window", "128"))  # fmt: skip
            host.ip("xfrm", "policy", "add", *ends, "dir", way, "tmpl", *ends, *esp)


async def write_and_read(url: str, options: dict[str, str]) -> str:
    """Write, flush, and read on a new connection; the provider that carried it."""
    data = random.Random(url).randbytes(SIZE)
    async with open_disks([url], options) as disks:
        disk = disks.disks[disks.default]
        await disk.write(memoryview(data), 0)
        await disk.flush()
    async with open_disks([url], options) as disks:
        disk = disks.disks[disks.default]
        buffer = bytearray(len(data))
        await disk.read_into(memoryview(buffer), 0)
        assert buffer == data
        return str(disk.info.connection.get("provider", "tcp"))


def esp_alone(capture: Path) -> int:
    """How many packets there are, all of which must be ESP; ARP and the neighbours' ND apart."""
    assert counted(capture, "ip and not ip proto 50") == 0
    return counted(capture, "ip proto 50")


def two_hosts(stack: ExitStack, tmp_path: Path) -> tuple[Host, Host, Path]:
    """The initiator's and the target's, on one network, and the file of a LUN."""
    need("tcpdump")
    client, target = make_host(stack, "client"), make_host(stack, "target")
    link(client, target, NET)
    file = tmp_path / "disk"
    with open(file, "wb") as whole:
        whole.truncate(8 << 20)
    return client, target, file


def served(stack: ExitStack, target: Host, file: Path) -> str:
    """The URL of a target that takes every transport."""
    listen = ",1,transport=iwarp+tcp+sctp"
    return stack.enter_context(our_target(target, TARGET, [file], listen=listen))


# shows: SYSTEM-47
def test_nothing_but_esp_is_on_the_network(stack: ExitStack, tmp_path: Path) -> None:
    # proves: ISER-11-3, ISER-GEN-2.4-1, ISER-GEN-8.1.6.4-2, ISER-IB00-2.4-1, ISER-IB00-3.1.6.4-2
    # proves: ISER-7143-RFC7146-1
    client, target, file = two_hosts(stack, tmp_path)
    capture = tmp_path / "capture"
    with captured(target, NET, capture):
        protect({CLIENT: client, TARGET: target})
        url = served(stack, target, file)
        for scheme, rcap, provider in (
            ("iser", "iwarp", "iwarp"),
            ("iser", "iwarp-sctp", "iwarp-sctp"),
            ("iscsi", "auto", "tcp"),
        ):
            lun = url.replace("iser:", f"{scheme}:") + "/0"
            carried = client.call(lambda u=lun, r=rcap: trio.run(write_and_read, u, {"rcap": r}))  # type: ignore[misc]
            assert carried == provider
    assert esp_alone(capture) > 3 * 2 * SIZE // 1500  # the data went this way


# shows: SYSTEM-47
@pytest.mark.long  # what Linux does; that our data is inside shows the test before
def test_without_a_security_association_nothing_flows(stack: ExitStack, tmp_path: Path) -> None:
    # proves: ISER-11-3, ISER-GEN-8.1.6.4-2, ISER-IB00-3.1.6.4-2
    client, target, file = two_hosts(stack, tmp_path)
    protect({CLIENT: client, TARGET: target})
    url = served(stack, target, file)
    assert client.call(lambda: trio.run(write_and_read, url + "/0", {})) == "iwarp"
    client.ip("xfrm", "state", "flush")  # the policies stay
    capture = tmp_path / "capture"
    with captured(target, NET, capture):
        for rcap in ("iwarp", "iwarp-sctp"):
            with pytest.raises(TransportError):
                client.call(lambda r=rcap: trio.run(write_and_read, url + "/0", {"rcap": r}))  # type: ignore[misc]
    # What the target still sends of older connections is ESP. Nothing comes from the client.
    esp_alone(capture)
    assert counted(capture, f"ip src {CLIENT}") == 0


# shows: SYSTEM-47
def test_a_gateway_behind_which_all_is_esp(stack: ExitStack, tmp_path: Path) -> None:
    """Where iSER enters the IP network, at a gateway, the far side is behind ESP."""
    # proves: ISER-11-5, ISER-GEN-8.1.6.4-4, ISER-IB00-3.1.6.4-3
    gateway, target, file = two_hosts(stack, tmp_path)
    protect({CLIENT: gateway, TARGET: target})
    capture = tmp_path / "capture"
    with captured(target, NET, capture):
        behind = stack.enter_context(our_target(target, TARGET, [file]))
        remote = behind.replace("iser:", "iscsi:") + "/0"
        front = stack.enter_context(
            our_target(gateway, "127.0.0.1", [remote], iqn=f"{IQN}:gateway")
        )
        carried = gateway.call(lambda: trio.run(write_and_read, front + "/0", {}))
        assert carried == "iwarp"
    assert esp_alone(capture) > 2 * SIZE // 1500
