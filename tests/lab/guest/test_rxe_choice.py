"""Which provider is chosen on a machine with Soft-RoCE; a target that listens both ways."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.commands import Server, bad, good, good_json, iserblk, serving
from tests.support.target import IQN

pytestmark = pytest.mark.skipif(
    "LAB_ADDRESS" not in os.environ, reason="runs in the lab: scripts/lab"
)


@contextmanager
def target(place: Path, *options: str, address: str = "") -> Iterator[Server]:
    listen = f"{address or os.environ['LAB_ADDRESS']}:0"
    spec = f"{place}/disk:size=4M"
    with serving(
        "target", "--listen", listen, "--iqn", IQN, "--lun", spec, *options, log=place / "log"
    ) as server:
        yield server


def connection(url: str, *options: str) -> tuple[object, str]:
    """The provider of the connection, and the reason for it."""
    (disk,) = good_json("info", f"{url}/0", *options)["disks"]
    return disk["connection"]["provider"], disk["provider_reason"]


# shows: SYSTEM-19
def test_a_target_that_listens_both_ways(tmp_path: Path) -> None:
    with target(tmp_path, "--rcap", "verbs") as server:
        device = os.environ["LAB_DEVICE"]
        assert connection(server.url) == (
            "verbs",
            f"rcap=auto, and RDMA device {device} leads there",
        )
        assert connection(server.url, "--rcap", "verbs") == ("verbs", "asked for with rcap")
        assert connection(server.url, "--rcap", "iwarp") == ("iwarp", "asked for with rcap")
        # One provider reads what the other wrote.
        data = tmp_path / "data"
        data.write_bytes(os.urandom(3 << 20))
        assert iserblk("copy", data, f"{server.url}/0", "--rcap", "verbs").returncode == 0
        good("copy", f"{server.url}/0", tmp_path / "back", "--rcap", "iwarp")
        assert (tmp_path / "back").read_bytes()[: 3 << 20] == data.read_bytes()


def test_a_target_on_every_address(tmp_path: Path) -> None:
    with target(tmp_path, "--rcap", "verbs", address="0.0.0.0") as server:
        url = server.url.replace("0.0.0.0", os.environ["LAB_ADDRESS"])
        assert connection(url, "--rcap", "verbs")[0] == "verbs"


# shows: SYSTEM-20
def test_nobody_listens_by_rdma_cm(tmp_path: Path) -> None:
    with target(tmp_path) as server:
        done = iserblk("-v", "info", f"{server.url}/0")
        assert done.returncode == 0
        assert "leads there, but: cannot connect to" in done.stderr
        assert "software iWARP is tried" in done.stderr
        provider, reason = connection(server.url)
        assert provider == "iwarp" and "no program listens" in reason
        assert "no program listens" in bad(4, "info", f"{server.url}/0", "--rcap", "verbs")


def test_no_device_leads_there(tmp_path: Path) -> None:
    with target(tmp_path, address="127.0.0.1") as server:
        provider, reason = connection(server.url)
        assert provider == "iwarp" and reason.startswith("rcap=auto, and ")
        bad(4, "info", f"{server.url}/0", "--rcap", "verbs")


def test_an_address_that_is_no_device_s(tmp_path: Path) -> None:
    spec = f"{tmp_path}/disk:size=16M"
    words = ("target", "--listen", "127.0.0.1:0", "--iqn", IQN, "--lun", spec, "--rcap", "verbs")
    assert "no RDMA device has this address" in bad(7, *words)


def test_doctor(tmp_path: Path) -> None:
    with target(tmp_path, "--rcap", "verbs") as server:
        report = good_json("doctor", server.url)
    assert report["works"]["verbs"] is True
    assert report["portal"]["provider"] == "verbs"
    names = {finding["name"]: finding for finding in report["findings"]}
    port = names[f"device {os.environ['LAB_DEVICE']} port 1"]
    assert port["status"] == "ok"
    assert "RoCE, ACTIVE" in port["text"] and "(RoCE v2)" in port["text"]
