"""Logout: the request, and the times that belong to it (RFC 7143 sections 11.14, 11.15)."""

from __future__ import annotations

from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import pdu

# How long the target has to close the connection after its Logout Response (tgtd never does). When
# both ends close at the same time, LIO on siw warns of a failed QP.
PARTING_S = 0.25
DRAIN_S = 30.0  # commands in flight may delay a logout by this much, if the target is as patient
ANSWER_S = 3.0  # how long the Logout Response is waited for
MOST_WAIT_S = 20.0  # the most of Time2Wait that is obeyed: commands have deadlines


def fill_logout(slot: TaskSlot) -> None:
    """A Logout Request that closes the session (RFC 7143 section 11.14)."""
    pdu.LogoutRequest(
        reason=pdu.LOGOUT_CLOSE_SESSION, itt=0, cid=0, cmd_sn=0, exp_stat_sn=0
    ).pack_into(slot.bhs)
