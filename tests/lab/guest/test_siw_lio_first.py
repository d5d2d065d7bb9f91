"""The first operations with a target of another project: login and I/O."""

from __future__ import annotations

import filecmp
import json
import os
import random
import subprocess
from pathlib import Path

MIB = 1 << 20


def iserblk(*arguments: str) -> str:
    done = subprocess.run(["iserblk", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_info(lab_url: str) -> None:
    (lun,) = json.loads(iserblk("info", "--json", f"{lab_url}?rcap=iwarp"))["disks"]
    assert (lun["vendor"], lun["size"]) == ("LIO-ORG", 256 * MIB)
    assert lun["connection"]["provider"] == "iwarp"
    assert not lun["can_extents"]  # LIO sets LBPME, but has no GET LBA STATUS


def test_copying_there_and_back(tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    there.write_bytes(random.Random(1).randbytes(8 * MIB))
    url = f"{os.environ['LAB_URL2']}?rcap=iwarp"
    iserblk("copy", str(there), url, "--verify")
    iserblk("copy", url, str(back))
    os.truncate(back, 8 * MIB)
    assert filecmp.cmp(there, back, shallow=False)
