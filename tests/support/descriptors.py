"""What this process has open."""

from __future__ import annotations

import gc
import os


def descriptors() -> int:
    """How many descriptors are open. What only the collector would close, counts."""
    return len(os.listdir("/proc/self/fd"))


def descriptors_to_begin_with() -> int:
    """How many descriptors are open, without what earlier tests have left to the collector, which
    would close that at any moment of the test that compares."""
    gc.collect()
    return descriptors()
