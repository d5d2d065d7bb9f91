"""A target on an address of an iWARP device, whose ports are TCP's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.commands import bad
from tests.support.target import IQN

pytestmark = pytest.mark.skipif(
    "LAB_ADDRESS" not in os.environ, reason="runs in the lab: scripts/lab"
)


def test_rdma_cm_beside_tcp_is_refused_in_words(tmp_path: Path) -> None:
    listen = f"{os.environ['LAB_ADDRESS']}:0"
    spec = f"{tmp_path}/disk:size=16M"
    words = ("target", "--listen", listen, "--iqn", IQN, "--lun", spec, "--rcap", "verbs")
    line = bad(28, *words)
    assert "initiators with iWARP devices do not need it" in line
