"""What scripts/manpages makes, for the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.target import ROOT

DATE = "1234567890"  # 2009-02-13


def make(directory: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts/manpages"), "--output", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable, "SOURCE_DATE_EPOCH": DATE, **changes},
    )
