"""Fixtures for tests of verbs without a device."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from iserblk.rcap.verbs import memlock


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """A process like most: no capability, and this much of the limit used."""

    def limit(size: int, used_kib: int = 0, capabilities: str = "0000000000000000") -> None:
        status = tmp_path / "status"
        status.write_text(
            f"Name:\tx\nVmLck:\t0 kB\nVmPin:\t{used_kib} kB\nCapEff:\t{capabilities}\n"
        )
        monkeypatch.setattr(memlock, "STATUS", status)
        monkeypatch.setattr(resource, "getrlimit", lambda _which: (size, size))

    return limit
