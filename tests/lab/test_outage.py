"""Outages of a target under iserblk as it is by default: the cases of scripts/outage, one by one.

Each takes five to twenty minutes by software emulation, most of them waiting. What becomes of the
other initiators is measured beside it, and not judged here.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lablib.host import why_not
from outagelib.cases import CASES
from outagelib.ledger import Missing
from outagelib.report import read
from outagelib.work import programs_of_postgresql

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 4000  # on a machine that may be busy
# What has the same outage side by side, in one guest: the case in which most is lost with all
# targets, and with each file system; a database, where there is PostgreSQL.
ALL = ("LIO", "tgtd", "istgt")
RUNS = {
    "network": ("network", ("LIO", "tgtd"), ("ext4",), "records"),
    "longer": ("longer", ("LIO",), ("ext4",), "records"),
    "reboot": ("reboot", ALL, ("ext4",), "records"),
    "reboot-xfs": ("reboot", ("LIO", "tgtd"), ("xfs",), "records"),
    "reboot-pgbench": ("reboot", ("LIO",), ("ext4",), "pgbench"),
    "restart": ("restart", ALL, ("ext4",), "records"),
    "moved": ("moved", ("LIO", "tgtd"), ("ext4",), "records"),
}


def test_every_case_has_a_run() -> None:
    assert {case for case, *_ in RUNS.values()} == {*CASES}


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", RUNS)
def test_an_outage_is_a_pause(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """By defaults alone: no call of a program fails, no file system is read-only, nothing that was
    acknowledged is missing."""
    if request.config.getoption("--no-lab"):
        pytest.skip("needs a virtual machine, and --no-lab")
    reason = why_not("tcp")
    if reason:
        pytest.skip(f"no virtual machine: {reason}")
    case, targets, file_systems, program = RUNS[name]
    if program == "pgbench" and programs_of_postgresql() is None:
        pytest.skip("no PostgreSQL below /usr/lib/postgresql")
    file = tmp_path / "measured.json"
    words = ["--case", case, "--program", program, "--json", str(file)]
    words += [word for each in targets for word in ("--target", each)]
    words += [word for each in file_systems for word in ("--file-system", each)]
    done = subprocess.run(
        [ROOT / "scripts" / "outage", *words],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        timeout=LIMIT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    assert done.returncode == 0
    found = read(file)
    kinds = {(each.target, each.file_system, each.program) for each in found}
    assert kinds == {*itertools.product(targets, file_systems, [program])}
    for outage in found:
        (ours,) = [each for each in outage.subjects if each.name == "iserblk"]
        assert ours.went_on and ours.failed == 0, outage.title
        assert ours.file_system == "read-write", outage.title
        assert ours.missing == Missing(0, 0, 0), outage.title
