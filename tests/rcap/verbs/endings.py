"""Pairs on devices that end."""

from __future__ import annotations

from tests.rcap.verbs.fake import FakeEnd, fake_pair
from tests.rcap.wire import Driver

RECEIVE = 1 << 62


def made(windows: bool = True) -> tuple[Driver, list[FakeEnd]]:
    driver = Driver(*fake_pair(windows))
    for pair in driver.pairs:
        pair.post_receive(8)
    links = [pair._link for pair in driver.pairs]  # type: ignore[attr-defined]
    return driver, links
