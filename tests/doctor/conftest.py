"""Fixtures of the doctor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doctor.box import Box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)
