"""scripts/ is no installed package: the tests find its modules where they are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from tests.scripts.manual import make


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory share/ of scripts/manpages."""
    directory = tmp_path_factory.mktemp("manual")
    done = make(directory)
    assert (done.returncode, done.stderr) == (0, "")
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    assert sorted(map(Path, done.stdout.splitlines())) == files
    return directory / "share"
