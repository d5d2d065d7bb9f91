"""Fixtures of the metrics' tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk.metrics.address import Address
from tests.support.ports import free_port


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    return tmp_path / "socket" if request.param == "unix" else ("127.0.0.1", free_port())
