"""The names at the root of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

import iserblk
from iserblk import errors
from iserblk.disk import aio, asyncio, blocking, request_queue


def test_disks() -> None:
    assert iserblk.open_disks is blocking.open_disks
    assert iserblk.aio.open_disks is aio.open_disks
    assert iserblk.aio.open_queue is request_queue.open_queue
    assert iserblk.asyncio.open_disks is asyncio.open_disks


def test_every_error_is_there() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.IserblkError):
            assert getattr(iserblk, name) is kind
            assert name in dir(iserblk)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'open_files'"):
        iserblk.open_files  # noqa: B018


def test_nothing_is_loaded_before_it_is_used() -> None:
    code = "import sys, iserblk; print([n for n in sys.modules if n.startswith('iserblk.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['iserblk.forms']\n"  # which chooses the form of those to come
