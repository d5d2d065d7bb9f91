"""The state machines of a login, one for each side (RFC 7143 section 6.3).

``docs/states.md`` shows both tables as diagrams.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import pdu
from iserblk.state_tables import tell


class State(StrEnum):
    """The state of one side: mostly the stage that the login is in."""

    START = "start"  # no PDU of the login has passed
    SECURITY = "security"  # SecurityNegotiation
    SKIPPED = "security skipped"  # LoginOperationalNegotiation, and no stage came before it
    OPERATIONAL = "operational"  # LoginOperationalNegotiation
    FULL_FEATURE = "full feature"  # FullFeaturePhase: the login is over
    FAILED = "failed"


class Event(StrEnum):
    """The events that change the state."""

    SECURE = "first request: security"
    SKIP = "first request: operational"
    SEND_BACK = "the target answers in the security stage"
    NEGOTIATE = "both go on to operational"
    CONCLUDE = "both go on to full feature"
    REFUSE = "refused"  # by either end


Table = Mapping[tuple[State, Event], State]

INITIATOR: Table = {
    (State.START, Event.SECURE): State.SECURITY,
    (State.START, Event.SKIP): State.SKIPPED,
    (State.SKIPPED, Event.SEND_BACK): State.SECURITY,
    (State.SKIPPED, Event.CONCLUDE): State.FULL_FEATURE,
    (State.SECURITY, Event.NEGOTIATE): State.OPERATIONAL,
    (State.OPERATIONAL, Event.CONCLUDE): State.FULL_FEATURE,
    (State.SKIPPED, Event.REFUSE): State.FAILED,
    (State.SECURITY, Event.REFUSE): State.FAILED,
    (State.OPERATIONAL, Event.REFUSE): State.FAILED,
}
# Only a discovery session goes from the security stage to full feature phase: other sessions must
# agree on RDMAExtensions first (RFC 7145 section 6.3).
TARGET: Table = {
    (State.START, Event.SECURE): State.SECURITY,
    (State.START, Event.SKIP): State.OPERATIONAL,
    (State.SECURITY, Event.NEGOTIATE): State.OPERATIONAL,
    (State.SECURITY, Event.CONCLUDE): State.FULL_FEATURE,
    (State.OPERATIONAL, Event.CONCLUDE): State.FULL_FEATURE,
    (State.START, Event.REFUSE): State.FAILED,
    (State.SECURITY, Event.REFUSE): State.FAILED,
    (State.OPERATIONAL, Event.REFUSE): State.FAILED,
    # Before its last response has left, the target may still find that it has no resources.
    (State.FULL_FEATURE, Event.REFUSE): State.FAILED,
}

# The code of each stage: CSG and NSG of a PDU.
CODES = {
    State.SECURITY: pdu.SECURITY_STAGE,
    State.SKIPPED: pdu.OPERATIONAL_STAGE,
    State.OPERATIONAL: pdu.OPERATIONAL_STAGE,
    State.FULL_FEATURE: pdu.FULL_FEATURE_PHASE,
}


class Stages:
    """The state of one side of a login. Only ``enter`` writes ``state``."""

    __slots__ = ("_table", "state")

    def __init__(self, table: Table) -> None:
        self._table = table
        self.state = State.START

    @property
    def code(self) -> int:
        """CSG of the next PDU. Raises KeyError before the first PDU and after a failure."""
        return CODES[self.state]

    @property
    def done(self) -> bool:
        return self.state is State.FULL_FEATURE

    @property
    def failed(self) -> bool:
        return self.state is State.FAILED

    @property
    def over(self) -> bool:
        return self.done or self.failed

    def enter(self, event: Event) -> None:
        """Change the state. Raises RemoteProtocolError where the table has no such transition; then
        nothing has changed."""
        after = self._table.get((self.state, event))
        if after is None:
            raise RemoteProtocolError("iSCSI", f"login stage {self.state}: {event}")
        tell("a login", self.state, event, after)
        self.state = after
