"""What a mount's server does beside serving; its life is in test_mount.py."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("pyfuse3", reason="pyfuse3 is missing: run scripts/setup")
from fuse_mount import serving


@pytest.mark.parametrize(
    ("said", "of_use"),
    [
        (("fuse_release(): fuse_reply_* failed with %s", "No such file or directory"), False),
        (("fuse_release(): fuse_reply_* failed with %s", "Invalid argument"), True),
        (("No such file or directory",), True),
    ],
)
def test_an_answer_that_nobody_waits_for_is_not_logged(said: tuple[str, ...], of_use: bool) -> None:
    """A file is closed while the file system is unmounted."""
    words, *values = said
    record = logging.LogRecord("pyfuse3", logging.ERROR, "", 0, words, tuple(values), None)
    assert serving.is_of_use(record) is of_use
