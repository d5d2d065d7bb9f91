"""LUNs through boot and shutdown of a machine with systemd: the cases of scripts/boot, one by one.

The command runs once for all tests here. It takes about half an hour by software emulation.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bootlib.cases import CASES
from lablib.host import why_not

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 5400  # with the package and the disk to make, on a machine that may be busy


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """How each case ended."""
    if request.config.getoption("--no-lab"):
        pytest.skip("needs a virtual machine, and --no-lab")
    if os.geteuid():
        pytest.skip("mmdebstrap needs root")
    reason = why_not("none")
    if reason:
        pytest.skip(f"no virtual machine: {reason}")
    directory = tmp_path_factory.mktemp("boot")
    report = directory / "report"
    done = subprocess.run(
        [ROOT / "scripts" / "boot", "--report", report, "--keep", directory / "kept"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        timeout=LIMIT_S,
        check=False,
    )
    assert report.exists(), f"scripts/boot ended with {done.returncode}; see above"
    return {each["name"]: each for each in map(json.loads, report.read_text().splitlines())}


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", CASES)
def test_boot(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    ran = outcomes.get(name) or outcomes.get("boot") or {"text": "it did not run"}
    assert ran.get("passed"), ran["text"]
