"""Which calls of the seam a connection may make, from its resources to its full feature phase.

RFC 5047 section 8.4 and 8.6, RFC 7145 sections 3.1.4 and 3.1.6: resources are allocated once, and
Enable_Datamover comes after that.
"""

from __future__ import annotations

from enum import StrEnum

from iserblk.errors import LocalProtocolError
from iserblk.state_tables import step


class State(StrEnum):
    EMPTY = "without resources"
    ALLOCATED = "allocated"
    ENABLED = "in full feature phase"


class Event(StrEnum):
    ALLOCATE = "Allocate_Connection_Resources"
    ENABLE = "Enable_Datamover"


TABLE: dict[tuple[State, Event], State] = {
    (State.EMPTY, Event.ALLOCATE): State.ALLOCATED,
    # To ask again succeeds, and changes nothing (RFC 7145 section 3.1.4).
    (State.ALLOCATED, Event.ALLOCATE): State.ALLOCATED,
    (State.ENABLED, Event.ALLOCATE): State.ENABLED,
    (State.ALLOCATED, Event.ENABLE): State.ENABLED,
}


class Allocation:
    """The state of one connection at one end."""

    def __init__(self) -> None:
        self.state = State.EMPTY

    def enter(self, event: Event) -> bool:
        """Make the transition of ``event``. False: it is a repetition, which changes nothing.
        Raises LocalProtocolError where the table has no such transition; then nothing has
        changed."""
        after = step(TABLE, "a connection", self.state, event)
        changed = after is not self.state
        self.state = after
        return changed

    def need_resources(self) -> None:
        """Raises LocalProtocolError unless resources are allocated."""
        if self.state is State.EMPTY:
            raise LocalProtocolError(f"a connection that is {self.state} cannot be given more")
