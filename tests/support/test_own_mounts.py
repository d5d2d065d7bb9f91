"""What one worker mounts has no copy in the namespaces that another makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.target import ROOT

PROGRAM = """
import subprocess, sys
from tests.support.own_mounts import have_own_mounts
if not have_own_mounts():
    sys.exit("not permitted")
subprocess.run(["mount", "-t", "tmpfs", "none", sys.argv[1]], check=True)
print(open("/proc/self/mountinfo").read().count(sys.argv[1]), flush=True)
input()
"""


def test_nobody_else_has_the_mount(tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdin is not None
        line = other.stdout.readline()
        if not line:
            pytest.skip("no mount namespaces here")
        try:
            assert line == "1\n"
            assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        finally:
            other.stdin.write("\n")
    assert other.returncode == 0
