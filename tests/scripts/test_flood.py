"""scripts/flood: a small flood, and what it prints."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

FLOOD = Path(__file__).resolve().parents[2] / "scripts/flood"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(FLOOD), *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("begin", ["mixed", "login"])
def test_a_small_flood(begin: str) -> None:
    """More connections than there is room for before a login."""
    done = run("--connections", "600", "--begin", begin)
    assert not done.returncode, done.stdout + done.stderr
    logins = re.findall(
        r"^honest login from 127\.0\.0\.[12], .*: logged in after", done.stdout, re.M
    )
    assert len(logins) == 6
    assert "connections made from 127.0.0.1: 600" in done.stdout
    assert "resident memory of the target: " in done.stdout
    assert done.stdout.endswith("\nas promised\n")


def test_help() -> None:
    done = run("--help")
    assert not done.returncode and "--connections" in done.stdout
