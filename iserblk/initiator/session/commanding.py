"""A session as its commands see it: what runs commands, and the LUNs, need of one."""

from __future__ import annotations

from typing import Protocol

from iserblk.errors import IserblkError
from iserblk.initiator.session.listeners import LunListeners
from iserblk.initiator.session.slots import TaskSlot, Waiter


class CommandQueue(Protocol):
    """See SendQueue, whose methods these are."""

    @property
    def tasks(self) -> list[TaskSlot]: ...

    def take(self, waiter: Waiter) -> TaskSlot | None: ...

    def take_now(self) -> TaskSlot | None: ...

    def submit(self, slot: TaskSlot) -> None: ...

    def release(self, slot: TaskSlot) -> None: ...

    def shrink(self) -> None: ...


class CommandSession(Protocol):
    """See Session, whose attributes and methods these are."""

    @property
    def queue(self) -> CommandQueue: ...

    @property
    def listeners(self) -> LunListeners: ...

    @property
    def io_timeout(self) -> float: ...

    @property
    def portal(self) -> str: ...

    @property
    def error(self) -> IserblkError | None: ...

    @property
    def suspended(self) -> IserblkError | None: ...

    @property
    def can_reconnect(self) -> bool: ...

    @property
    def suspended_at(self) -> float: ...

    @property
    def reconnects(self) -> int: ...

    @property
    def replayed(self) -> int: ...

    def new_waiter(self) -> Waiter: ...

    def describe(self) -> dict[str, object]: ...

    def disconnect(self) -> None: ...
