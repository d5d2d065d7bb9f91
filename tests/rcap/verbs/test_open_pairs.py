"""What a program left open is closed at its end."""

from __future__ import annotations

import pytest

from iserblk.rcap import seam
from iserblk.rcap.verbs import open_pairs
from tests.rcap.verbs.endings import made


def test_what_is_left_open_is_closed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, links = made()
    a, _ = driver.pairs
    a.advertise(memoryview(bytearray(100)), seam.REMOTE_WRITE)
    monkeypatch.setattr("os.getpid", lambda: 1)
    kept = dict(open_pairs._open)
    open_pairs.close_all()
    assert not any(link.closed for link in links), "those are the parent's"
    open_pairs._open.update(kept)
    monkeypatch.undo()
    open_pairs.close_all()
    assert all(link.closed for link in links)
    open_pairs.close_all()
