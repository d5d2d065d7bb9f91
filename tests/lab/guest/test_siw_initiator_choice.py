"""The initiator uses its iWARP device towards a target on software iWARP, on the same port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.commands import good_json, serving
from tests.support.target import IQN

pytestmark = pytest.mark.skipif(
    "LAB_NETNS" not in os.environ, reason="runs in the lab: scripts/lab"
)


def test_auto_takes_the_device(tmp_path: Path) -> None:
    """The initiator connects through rdma_cm; the target has no device and no rdma_cm."""
    listen, lun = f"{os.environ['LAB_LISTEN']}:0", f"{tmp_path}/disk:size=16M"
    words = ("target", "--listen", listen, "--iqn", IQN, "--lun", lun)
    with serving(*words, log=tmp_path / "log", namespace=os.environ["LAB_NETNS"]) as target:
        (disk,) = good_json("info", f"{target.url}/0")["disks"]
        assert disk["connection"]["provider"] == "verbs"
        assert disk["connection"]["transport"] == "iWARP"
        assert disk["connection"]["mode"] == "region"
        assert disk["connection"]["receive_invalidate"] is False
        report = good_json("doctor", target.url)
        assert report["portal"]["provider"] == "verbs"
        mpa = [each for each in report["portal"]["findings"] if each["name"].startswith("MPA")]
        assert mpa[0]["status"] == "ok"
