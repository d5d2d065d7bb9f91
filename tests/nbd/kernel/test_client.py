"""The kernel's NBD client: its time limit."""

from __future__ import annotations

import pytest

from iserblk.nbd.kernel.client import kernel_timeout


@pytest.mark.parametrize("io_timeout", [1, 2.5, 30, 86400])
def test_our_error_comes_before_the_kernels(io_timeout: float) -> None:
    """The kernel's time limit is above io-timeout and twice five seconds of task management
    (deadlines.py)."""
    assert kernel_timeout(io_timeout) >= io_timeout + 2 * 5 + 10
