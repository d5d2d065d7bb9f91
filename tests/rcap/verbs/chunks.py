"""Chunks of memory without a device."""

from __future__ import annotations

from iserblk.rcap.verbs.pool import Pool
from tests.rcap.verbs.fake import FakeEnd


def pool(budget: int = 1 << 20, limit: int = 1 << 40) -> tuple[Pool, FakeEnd]:
    end = FakeEnd(windows=False, limit=limit)
    return Pool(end.register, 0, budget), end
