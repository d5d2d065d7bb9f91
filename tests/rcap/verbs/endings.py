"""Pairs on devices that end."""

from __future__ import annotations

from tests.rcap.verbs.fake import FakeEnd, fake_pair, link_of
from tests.rcap.wire import Driver

RECEIVE = 1 << 62


def made(windows: bool = True) -> tuple[Driver, list[FakeEnd]]:
    driver = Driver(*fake_pair(windows))
    for pair in driver.pairs:
        pair.post_receive(8)
    return driver, [link_of(pair) for pair in driver.pairs]
