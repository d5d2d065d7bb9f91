"""Ports that nobody else takes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.ports import Share, free_port


def test_they_differ_and_the_kernel_gives_none_of_them() -> None:
    ports = [free_port() for _ in range(50)]
    assert len({*ports}) == 50
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 12000:
        pytest.skip(f"this kernel takes ports from {lowest} on: there are no others")
    assert max(ports) < lowest


def test_one_that_is_taken_is_left_out() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert port not in {free_port() for _ in range(3000)}  # more than there are


def test_each_process_has_its_own() -> None:
    shares = [Share() for _ in range(3)]
    try:
        given = [{share.free_port() for _ in range(20)} for share in shares]
        given.append({free_port() for _ in range(20)})
        assert len(set.union(*given)) == 80
    finally:
        for share in shares:
            share.close()


def test_a_process_that_has_ended_has_none() -> None:
    """However it ended: as many come and go as never could be there together."""
    for _ in range(200):
        Share().close()
