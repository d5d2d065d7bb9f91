"""Software iWARP on the host, and LIO on siw in the guest, through an emulated network.

These run on the host: the guest serves.
"""

from __future__ import annotations

import filecmp
import os
import random
import subprocess
from pathlib import Path

import pytest

MIB = 1 << 20

# A guest of its own; test_siw_lio_iwarp has the same over the segments of a link of 1500 bytes.
pytestmark = pytest.mark.long


@pytest.mark.parametrize("crc", ["yes", "no"])
def test_copying_there_and_back(tmp_path: Path, crc: str) -> None:
    """The network cuts the stream into segments of 1460 bytes, at any place."""
    there, back = tmp_path / "there", tmp_path / "back"
    there.write_bytes(random.Random(crc).randbytes(8 * MIB))
    url = f"{os.environ['LAB_URL2']}?rcap=iwarp&mpa-crc={crc}"
    for source, destination in ((str(there), url), (url, str(back))):
        done = subprocess.run(
            ["iserblk", "copy", source, destination], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    os.truncate(back, 8 * MIB)
    assert filecmp.cmp(there, back, shallow=False)
