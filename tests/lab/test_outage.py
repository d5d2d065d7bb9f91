"""Outages of a target under iserblk as it is by default: the cases of scripts/outage, one by one.

Each takes five to twenty minutes by software emulation. What becomes of the other initiators is
measured beside it, and not judged here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lablib.host import why_not
from outagelib.cases import CASES
from outagelib.ledger import Missing
from outagelib.report import read

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 4000  # on a machine that may be busy
# Each case with LIO and ext4; the one in which most is lost also with the others.
RUNS = [(name, "LIO", "ext4") for name in CASES]
RUNS += [("reboot", "LIO", "xfs"), ("reboot", "tgtd", "ext4"), ("reboot", "istgt", "ext4")]


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize(("name", "target", "file_system"), RUNS)
def test_an_outage_is_a_pause(
    name: str, target: str, file_system: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """By defaults alone: no call of a program fails, no file system is read-only, nothing that was
    acknowledged is missing."""
    if request.config.getoption("--no-lab"):
        pytest.skip("needs a virtual machine, and --no-lab")
    reason = why_not("tcp")
    if reason:
        pytest.skip(f"no virtual machine: {reason}")
    file = tmp_path / "measured.json"
    words = ["--case", name, "--target", target, "--file-system", file_system, "--json", str(file)]
    done = subprocess.run(
        [ROOT / "scripts" / "outage", *words],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0
    (outage,) = read(file)
    (ours,) = [each for each in outage.subjects if each.name == "iserblk"]
    assert ours.went_on and ours.failed == 0
    assert ours.file_system == "read-write"
    assert ours.missing == Missing(0, 0, 0)
