"""One connection of a session: its datamover, its numbers, and what it has in flight."""

from __future__ import annotations

import logging
from typing import Final

from iserblk.datamover.seam import BARE, InitiatorDatamover, PduSlot
from iserblk.initiator.session.unsolicited import DataOuts
from iserblk.iscsi.keys import SessionParameters
from iserblk.loop.clock import monotonic

log = logging.getLogger(__name__)

# Slots of commands that have memory from the start, where more can be added; and how many are then
# given memory at a time, when one of them is first used. Most sessions use few of theirs.
FIRST_SLOTS: Final = 8
_ANY_AHS: Final = 255 * 4  # what TotalAHSLength can say


class Connection:
    """What a session has once for each connection.

    ``memory``: of each slot of the session, by its index; used by one slot at a time. Those that
    have not been used yet may be BARE.
    ``parameters``, ``provider_reason``: of the login that made this connection.
    ``immediate_limit``: what a write may carry in its command; 0 where immediate data was not
    negotiated. ``begun``, ``ended``: commands that were sent here, and those of them that are over;
    the difference is in flight. ``bytes_begun``: of the former, where the session may have several
    connections; for statistics. ``lost``: it is over, and its datamover terminated.
    ``lent``: slots have memory that they did not have at first.
    ``logging_out``: no more commands are sent here, as the target has asked for its logout.
    ``control_cmd_sns``: then, the CmdSNs of control PDUs that were not answered. ``early``: PDUs
    that came before the session had it. ``time2wait``, ``time2retain``: seconds, of the login; or
    what the target has announced with the end of this connection.
    """

    __slots__ = (
        "_posted",
        "ahs_limit",
        "begun",
        "bytes_begun",
        "cid",
        "control_cmd_sns",
        "data_outs",
        "datamover",
        "early",
        "ended",
        "exp_stat_sn",
        "immediate_limit",
        "last_heard",
        "lent",
        "logging_out",
        "lost",
        "memory",
        "parameters",
        "portal",
        "provider_reason",
        "time2retain",
        "time2wait",
        "unsent_pongs",
    )

    def __init__(
        self,
        datamover: InitiatorDatamover,
        memory: list[PduSlot],
        parameters: SessionParameters,
        portal: str,
        cid: int = 0,
    ) -> None:
        """``memory``: allocated by the datamover; where it ``adds_resources``, only that of the
        first slot and that for control PDUs need be."""
        self.datamover = datamover
        self.memory = memory
        self.parameters = parameters
        self.portal = portal
        self.cid = cid
        self.provider_reason = ""
        self.time2wait = parameters.default_time2wait
        self.time2retain = parameters.default_time2retain
        self.immediate_limit = (
            min(
                parameters.first_burst_length,
                parameters.target_recv_data_segment_length,
                len(memory[0].inline),
            )
            if parameters.immediate_data
            else 0
        )
        self.data_outs = DataOuts([], parameters, self.immediate_limit, 0)
        # Bytes of AHS that the target takes in one PDU (RFC 7145 section 6.8).
        self.ahs_limit = parameters.max_ahs_length if parameters.rdma_extensions else 0
        if not self.ahs_limit:
            self.ahs_limit = _ANY_AHS
        self.exp_stat_sn = 0
        self.begun = 0
        self.bytes_begun = 0
        self.ended = 0
        self.last_heard = monotonic()
        self.lost = False
        self.logging_out = False
        self.control_cmd_sns: list[int] = []
        self.early: list[bytes] = []
        self.unsent_pongs = 0  # answers to pings since the wire was last seen free
        self.lent = False
        self._posted: set[int] = set()  # the first index of groups of slots that have had memory

    def lend(self, slot: PduSlot) -> bool:
        """Give ``slot``, of the session, the memory that there is for its
        index. False: the system has none."""
        memory = self.memory[slot.index]
        if memory.bhs is BARE:
            first = slot.index - slot.index % FIRST_SLOTS
            near = self.memory[first : first + FIRST_SLOTS]
            bare = [each for each in near if each.bhs is BARE]
            try:
                self.datamover.add_resources(bare, 0 if first in self._posted else len(bare))
            except (OSError, MemoryError) as error:
                log.info("%s: no memory for another command: %s", self.portal, error)
                return False
            self._posted.add(first)
            self.lent = True
        if memory is not slot:
            slot.take_memory(memory)
        return True

    @property
    def unsent(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self.datamover.queued) or self.datamover.wants_write()

    def take_back(self, count: int) -> None:
        """While nothing is in flight or ``unsent``: take back the memory that was lent, of the
        first ``count`` slots, which are for commands."""
        self.data_outs.take_back()
        if self.lent:
            for memory in self.memory[FIRST_SLOTS:count]:
                memory.drop_memory()
            self.lent = False

    def allow_data_outs(self, slots: list[PduSlot], most_busy: int, more: int = 0) -> None:
        """Before the first command: writes may have Data-Outs, while at most ``most_busy`` commands
        are in flight. They use ``slots``, and ``more`` that are allocated when they are needed."""
        self.data_outs = DataOuts(slots, self.parameters, self.immediate_limit, most_busy, more)

    @property
    def in_flight(self) -> int:
        """Commands that were sent here and are not over."""
        return self.begun - self.ended
