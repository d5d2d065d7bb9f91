"""tgtd serves iSER in this set-up."""

from __future__ import annotations

import subprocess


def test_tgtd_listens_for_rdma() -> None:
    listeners = subprocess.run(
        ["rdma", "resource", "show", "cm_id"], capture_output=True, text=True, check=True
    ).stdout
    assert any("tgtd" in line and ":3260" in line for line in listeners.splitlines())
