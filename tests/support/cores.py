"""What is below the faces of a disk."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from iserblk.commands.command import Operation
from iserblk.disk.aio import TrioDisk
from iserblk.disk.blocking import ThreadDisk
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.seam import BlockingLun
from iserblk.initiator.session.session import Session

T = TypeVar("T")


def core_of(disk: Any) -> DiskCore:
    """Of a disk of any face, also behind wrappers, whose ``disk`` is what they pass calls on to."""
    while not hasattr(disk, "core"):
        disk = disk.disk
    core: DiskCore = disk.core
    return core


def session_of(disk: Any) -> Session:
    session = core_of(disk).session
    assert isinstance(session, Session)
    return session


def in_thread(disk: BlockingLun, operation: Operation[T]) -> T:
    """Run an operation on the session of ``disk``; returns its result."""
    assert isinstance(disk, ThreadDisk) and isinstance(disk.disk, TrioDisk)
    return disk.places.call(disk.disk, partial(disk.disk.driver.run_operation, operation))
