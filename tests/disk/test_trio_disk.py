"""trio's face of a disk."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from iserblk.disk.aio import TrioDisk
from iserblk.disk.seam import Rest


async def test_what_has_begun_goes_on_within_its_deadline() -> None:
    """Its command was not enough; it is not begun anew."""
    buffer, asked = memoryview(bytearray(512)), []

    def ask(*arguments: object) -> object:
        asked.append(arguments)
        return asked

    async def run_operation(operation: object) -> None:
        assert operation is asked
        await trio.lowlevel.checkpoint()

    core: Any = SimpleNamespace(
        read=ask, write=ask, begin_batch=None, end_batch=None, ended=None, ended_write=None,
        begin_read=lambda *_: 1 / 0, begin_write=lambda *_: 1 / 0, take_over=None, abandon=None,
    )  # fmt: skip
    driver: Any = SimpleNamespace(
        run_operation=run_operation, new_waiter=object, begin_batch=None, end_batch=None,
        abandon=None, check_here=None,
    )  # fmt: skip
    disk = TrioDisk(core, driver)
    await disk.read_into(buffer, 512, Rest(1, 2.5))
    await disk.write(buffer, 512, False, Rest(1, 3.5))
    assert asked == [(buffer, 512, 2.5), (buffer, 512, False, 3.5)]
