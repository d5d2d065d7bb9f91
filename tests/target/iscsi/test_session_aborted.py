"""Tasks that are being aborted when their connection, or the session, ends."""

from __future__ import annotations

import pytest

from iserblk.iscsi import bhs, pdu
from tests.support import logs
from tests.target.iscsi.several import (
    PLAIN,
    SYNCHRONIZE_CACHE,
    WRITE_10,
    WRITES,
    Host,
    IserPeer,
    Peer,
    TcpPeer,
    cdb10,
)

pytestmark = pytest.mark.logs(logs.IGNORED)

KINDS = pytest.mark.parametrize("kind", [TcpPeer, IserPeer])
Kind = type[TcpPeer] | type[IserPeer]


def two(kind: Kind, host: Host) -> tuple[Peer, Peer]:
    """A session with the connections 0 and 1."""
    first = kind(host, 0)
    assert first.log_in() == 0
    first.ready()
    second = kind(host, 1)
    assert second.log_in() == 0
    second.command(bytes(16), itt=9)  # the unit attention
    second.heard.clear()
    return first, second


@KINDS
@pytest.mark.parametrize("level", [0, 2])
def test_a_thread_that_works_for_an_aborted_task_of_a_lost_connection(
    kind: Kind, level: int
) -> None:
    """The answer to the abort is lost with the connection, so the initiator does not wait for it:
    no command may begin before the thread has ended, or an old write lands behind a new one."""
    host = Host(level=level, threads=True)
    first, second = two(kind, host)
    first.command(cdb10(SYNCHRONIZE_CACHE, 0), PLAIN, itt=1)
    first.manage(pdu.TMF_ABORT_TASK, 1, ref_cmd_sn=host.cmd_sn - 1)
    assert len(host.running) == 1 and not first.heard
    first.lose()
    again = kind(host, 0)
    assert again.log_in() == 0
    for peer, itt in (second, 2), (again, 3):
        peer.command(cdb10(WRITE_10, 1), WRITES, 512, b"x" * 512, itt=itt)
        assert not peer.heard and not host.store.calls
    host.finish()
    assert second.opcodes() == again.opcodes() == [bhs.SCSI_RESPONSE]
    assert host.store.calls[-1][0] == "write" and not host.session.held
