"""A function is called before each wait of trio's loop."""

from __future__ import annotations

import threading

import trio

from iserblk.loop.instruments import BeforeWait


async def test_the_time_of_each_wait_and_whether_a_task_can_run() -> None:
    heard: list[tuple[float, bool]] = []
    waits = threading.Event()

    def before(timeout: float) -> None:
        heard.append((timeout, instrument.scheduled))
        instrument.scheduled = False
        if timeout:
            waits.set()

    instrument = BeforeWait(before)
    trio.lowlevel.add_instrument(instrument)
    try:
        await trio.lowlevel.checkpoint()  # this task can run on at once
        with trio.move_on_after(60):
            assert await trio.to_thread.run_sync(waits.wait, 60)
    finally:
        trio.lowlevel.remove_instrument(instrument)
    assert (0, True) in heard
    assert any(0 < timeout <= 60 for timeout, _ in heard)
    count = len(heard)
    await trio.lowlevel.checkpoint()
    assert len(heard) == count  # it was removed
