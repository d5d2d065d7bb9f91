"""Fixtures of the tests that run in the lab's guest."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.lab.guest import report


@pytest.fixture
def record(record_property: Callable[[str, object], None]) -> report.Record:
    """Call it at the end of a test that a peer passed: a row of docs/interop.md."""

    def record(**values: object) -> None:
        record_property("interop", report.row(**values))  # type: ignore[arg-type]

    return record
