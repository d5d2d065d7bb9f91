"""scripts/flood: a small flood, and what it prints."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

FLOOD = Path(__file__).resolve().parents[2] / "scripts/flood"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(FLOOD), *words], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("begin", ["mixed", pytest.param("login", marks=pytest.mark.long)])
def test_a_small_flood(begin: str) -> None:
    """More connections than there is room for before a login."""
    shows_what_is_promised("login", run("--connections", "600", "--begin", begin))


@pytest.mark.parametrize("begin", ["mixed", pytest.param("option", marks=pytest.mark.long)])
def test_a_small_flood_of_nbd(begin: str) -> None:
    """More connections than there is room for before the end of a handshake."""
    done = run("--nbd", "--connections", "1500", "--begin", begin)
    shows_what_is_promised("client", done, 1500)
    assert "the client from before the flood goes on" in done.stdout


def shows_what_is_promised(
    what: str, done: subprocess.CompletedProcess[str], count: int = 600
) -> None:
    assert not done.returncode, done.stdout + done.stderr
    logins = re.findall(
        rf"^honest {what} from 127\.0\.0\.[12], .*: succeeded after", done.stdout, re.M
    )
    assert len(logins) == 6
    assert f"connections made from 127.0.0.1: {count}" in done.stdout
    assert "resident memory of the server: " in done.stdout
    assert done.stdout.endswith("\nas promised\n")


def test_a_beginning_of_another_server() -> None:
    done = run("--nbd", "--begin", "mpa")
    assert done.returncode == 2 and "it is one of nothing, flags, option, idle" in done.stderr


def test_help() -> None:
    done = run("--help")
    assert not done.returncode and "--connections" in done.stdout
