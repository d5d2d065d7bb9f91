"""What a login decides about unsolicited data: whether it is offered, and whether it is used."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import trio

from iserblk.errors import ConnectionLost
from iserblk.initiator.connecting.login import Login, over_rdma
from iserblk.initiator.session.session import Session
from iserblk.initiator.session.unsolicited import FEW
from iserblk.iscsi.text import decode_untrusted
from iserblk.options import Options
from iserblk.rcap.inprocess import Message
from iserblk.url import parse_url
from tests.target.iser_client import IserClient

ULPDU = 65534
DEPTH = 8


class Far(NamedTuple):
    """The kind of connection, and what each end declares as its MaxULPDULength."""

    iwarp: bool
    ours: int
    theirs: int


OWN = Far(True, ULPDU, ULPDU)  # software iWARP, our own target
SIW = Far(True, ULPDU, 0)
NO_CRC = Far(True, 0, 0)  # software iWARP, or a device of iWARP
ROCE = Far(False, 0, 0)


async def log_in(far: Far, options: Options) -> tuple[Session, dict[str, str]]:
    """A session with the embedded target, and the keys of the Login Request."""
    client = IserClient(max_ulpdu=far.theirs)
    ours = client.ours
    ours.posted = 0  # the login under test posts its own receives
    ours.iwarp, ours.max_ulpdu = far.iwarp, far.ours
    left: list[Message] = []

    def watch(message: Message) -> bool:
        left.append(message)
        return True

    ours.intercept = watch

    async def far_end() -> None:
        while True:
            await trio.lowlevel.wait_readable(client.target_pair.fileno())
            client.connection.progress(0.0)

    url = parse_url("iser://10.0.0.1/iqn.2026-11.example:disk/0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(far_end)
        session = await Login(over_rdma(ours), url, options, "portal:3260").run()
        nursery.cancel_scope.cancel()
    return session, dict(decode_untrusted(left[0].data[76:]))


@pytest.mark.parametrize(
    ("far", "wanted", "immediate", "offered", "limit", "most_busy"),
    [
        (OWN, "auto", True, "No", 65536, FEW),
        (OWN, "yes", True, "No", 65536, DEPTH),
        (OWN, "yes", False, "No", 65536, DEPTH),
        (OWN, "no", True, "Yes", 0, 0),
        (OWN, "auto", False, "Yes", 0, 0),
        (SIW, "auto", True, "No", 0, 0),
        (SIW, "yes", True, "No", 0, 0),
        (NO_CRC, "auto", True, "Yes", 0, 0),
        (NO_CRC, "yes", True, "Yes", 0, 0),
        (ROCE, "auto", True, "Yes", 0, 0),
        (ROCE, "yes", True, "No", 65536, DEPTH),
    ],
)
async def test_unsolicited_data(
    far: Far, wanted: str, immediate: bool, offered: str, limit: int, most_busy: int
) -> None:
    """It is used only where both agree, and never where the far end may be Linux siw."""
    options = Options(queue_depth=DEPTH, unsolicited_data=wanted, immediate_data=immediate)
    session, said = await log_in(far, options)
    assert said["InitialR2T"] == offered
    outs = session.queue.connection.data_outs
    assert (outs.limit, min(outs.most_busy, DEPTH)) == (limit, most_busy)
    session.fail(ConnectionLost("end of test"))
