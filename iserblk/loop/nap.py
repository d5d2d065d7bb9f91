"""A sleep of a trio task that another task ends."""

from __future__ import annotations

import trio


class Nap:
    """A place where a single task sleeps until another task wakes it."""

    __slots__ = ("_task",)

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    async def sleep(self) -> None:
        """Sleep until ``wake``. May be cancelled."""
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._abort)

    def wake(self) -> None:
        """Wake the sleeping task. Does nothing when no task sleeps."""
        if self._task is not None:
            trio.lowlevel.reschedule(self._task)
            self._task = None

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED
