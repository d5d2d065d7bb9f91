"""scripts/peers, with an apt of the test's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.target import ROOT

CANDIDATES = {"not in this release": "", "held off by the administrator": "(none)"}


def peers(place: Path, apt_get: str, candidate: str) -> subprocess.CompletedProcess[str]:
    programs = place / "bin"
    programs.mkdir()
    for name, does in (
        ("apt-get", apt_get),
        ("apt-cache", f'printf "istgt:\\n  Candidate: {candidate}\\n"' if candidate else ":"),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    return subprocess.run(
        [ROOT / "scripts/peers", "istgt"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(place / "cache"),
        },
    )


@pytest.mark.parametrize("candidate", CANDIDATES.values(), ids=CANDIDATES)
def test_a_release_without_the_package_is_told_apart(tmp_path: Path, candidate: str) -> None:
    """Its tests are skipped; no other failure may look so."""
    done = peers(tmp_path, 'case "$*" in *update) ;; *) exit 100 ;; esac', candidate)
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1].endswith(" has no package istgt")
    assert done.stdout == ""


@pytest.mark.parametrize(
    "apt_get", ["echo no network >&2; exit 100", 'case "$*" in *update) ;; *) exit 100 ;; esac']
)
def test_a_package_that_cannot_be_had_now(tmp_path: Path, apt_get: str) -> None:
    done = peers(tmp_path, apt_get, "0.4-1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "peers: apt-get could not download istgt"
    assert not list((tmp_path / "cache/iserblk/peers").iterdir())
