"""Who answers at a portal that has not become a connection: for the message, and for nothing else.

A portal of Traditional iSCSI takes an MPA Request for the beginning of a PDU, and waits for the
rest; a portal of iSER alone closes the connection of a Login Request. Neither says what it is. So a
portal that has not answered is asked in the other protocol, on a connection of its own. Neither
question takes anything at the target:

- the Login Request is for a discovery session, and does not ask to leave its stage (T is 0): the
  target answers, and no session begins. Its ITT is two ends of lines, so that servers of text take
  it for a line, and answer it, too.
- the MPA Request asks for markers, which Linux siw refuses in the driver: its target does not hear
  of the connection (LIO's would wait 15 seconds for a login).

Runs in trio.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from iserblk.errors import IserblkError
from iserblk.initiator.connecting.iwarp import Address, connect_tcp
from iserblk.initiator.connecting.protocols import is_stranger, who_untrusted
from iserblk.iscsi import pdu
from iserblk.iscsi.text import encode
from iserblk.loop.patience import move_on_after
from iserblk.names import initiator_name, random_isid
from iserblk.options import Options
from iserblk.rcap.iwarp import mpa

ANSWER_S = 2.0  # for a question, when the portal has been silent before
_ENOUGH = 48  # bytes that tell
_ITT = int.from_bytes(b"\r\n\r\n")


def login_question(options: Options) -> bytes:
    """A Login Request that makes a target answer, and begins no session."""
    pairs = (
        ("InitiatorName", initiator_name(options.initiator_name)),
        ("SessionType", "Discovery"),
    )
    data = encode(pairs)
    request = pdu.LoginRequest(
        flags=pdu.OPERATIONAL_STAGE << pdu.CSG_SHIFT,
        data_length=len(data),
        isid=random_isid(),
        tsih=0,
        itt=_ITT,
        cid=0,
        cmd_sn=1,
        exp_stat_sn=0,
    )
    return request.pack() + data + bytes(-len(data) & 3)


def mpa_question() -> bytes:
    """An MPA Request that is answered, mostly with a rejection."""
    return mpa.HEADER.pack(mpa.REQUEST_KEY, mpa.MARKERS, 1, 0)


async def ask(addresses: Sequence[Address], portal: str, question: bytes, patience: float) -> str:
    """Who answers ``question`` at ``portal``, as ``who_untrusted`` has it; "" also if nothing
    answers within ``patience`` seconds. The connection is closed."""
    start = b""
    try:
        with move_on_after(patience):
            sock = await connect_tcp(addresses, portal, patience)
            with sock:
                await _send(sock, question)
                while len(start) < _ENOUGH and not is_stranger(who_untrusted(start)):
                    more = await sock.recv(_ENOUGH - len(start))
                    if not more:
                        break
                    start += more
    except (IserblkError, OSError):
        pass  # what has come before tells
    return who_untrusted(start)


async def _send(sock: trio.socket.SocketType, data: bytes) -> None:
    while data:
        data = data[await sock.send(data) :]
