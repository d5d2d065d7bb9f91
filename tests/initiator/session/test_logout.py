"""The Logout Request of a session."""

from __future__ import annotations

from iserblk.initiator.session.logout import fill_logout
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi import bhs, pdu


# shows: SYSTEM-43
def test_it_closes_the_session() -> None:
    """RFC 7143 section 11.14: opcode 06h, immediate, F, reason 0; the CID is that of the session's
    first connection, and no data segment follows."""
    slot = TaskSlot(0)
    slot.bhs = memoryview(bytearray(b"\xff" * bhs.BHS_LENGTH))
    fill_logout(slot)
    assert bytes(slot.bhs[:2]) == bytes((0x46, 0x80))
    request = pdu.LogoutRequest.unpack_from(slot.bhs)
    assert (request.reason, request.cid, request.data_length) == (0, 0, 0)
    assert bytes(slot.bhs[32:]) == bytes(16)  # reserved
