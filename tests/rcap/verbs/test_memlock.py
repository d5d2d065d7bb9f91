"""The limit on locked memory."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from iserblk.errors import NotSupported
from iserblk.rcap.verbs import memlock, queuepair


def test_no_limit(limited: object) -> None:
    limited(resource.RLIM_INFINITY)  # type: ignore[operator]
    assert memlock.lockable() is None
    limited(1 << 20, 0, "000001ffffffffff")  # type: ignore[operator]
    assert memlock.lockable() is None, "root may"
    assert queuepair.pool_budget(16, 8268) == queuepair.POOL_BYTES


def test_what_is_left_is_shared_out(limited: object) -> None:
    limited(16 << 20, 1024)  # type: ignore[operator]
    assert memlock.lockable() == 15 << 20
    budget = queuepair.pool_budget(144, 8268)
    assert 5 << 20 < budget < 15 << 19


@pytest.mark.parametrize("size", [0, 64 << 10, 2 << 20])
def test_too_little_is_said_with_the_remedy(limited: object, size: int) -> None:
    limited(size)  # type: ignore[operator]
    with pytest.raises(NotSupported, match=r"locked-memory limit.*KiB are needed.*ulimit -l"):
        queuepair.pool_budget(144, 8268)


def test_the_real_limit_is_read() -> None:
    shown = subprocess.check_output(
        [sys.executable, "-c", "from iserblk.rcap.verbs import memlock; print(memlock.lockable())"],
        text=True,
    )
    assert shown.strip() == "None" or int(shown) >= 0
