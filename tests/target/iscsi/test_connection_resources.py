"""A target that cannot allocate connection resources refuses the login (RFC 7145, 10.1.3.1)."""

from __future__ import annotations

import errno

import pytest

from iserblk.errors import Busy
from iserblk.iscsi import bhs
from iserblk.rcap.seam import HeaderSlot
from tests.datamover.test_stream_target import Target
from tests.target.iser_client import IserClient
from tests.vectors import streaming_login as golden

FEW = 8  # slots: those of the login
REASONS = (
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    MemoryError(),
    Busy("RDMA device x: Cannot allocate memory"),
)


@pytest.mark.parametrize("reason", REASONS, ids=lambda error: type(error).__name__)
def test_in_messages(reason: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """The login has agreed; then memory for the session's slots cannot be had.

    proves: ISER-5.1.2-7, ISER-10.1.3.1-4
    """
    client = IserClient()
    pair = client.target_pair
    alloc = pair.alloc_headers

    def few(count: int, size: int) -> list[HeaderSlot]:
        if count > FEW:
            raise reason
        return alloc(count, size)

    monkeypatch.setattr(pair, "alloc_headers", few)
    client.login()
    (answer,) = client.heard
    assert answer.opcode == bhs.LOGIN_RESPONSE
    assert answer.bhs[36:38] == b"\x03\x02" and not answer.bhs[1] & 0x80
    assert client.connection.done and client.connection.login.failed
    assert "enable_datamover" not in [name for name, _ in client.datamover.calls]
    assert "no connection resources" in client.connection.login.problem
    # Nobody is told of a session that does not exist.
    assert client.connection.parameters is None


def test_on_a_byte_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """proves: ISER-5.1.2-7, ISER-10.1.3.1-4"""
    target = Target()
    alloc = target.qp.alloc_headers

    def few(count: int, size: int) -> list[HeaderSlot]:
        if count > FEW:
            raise MemoryError
        return alloc(count, size)

    monkeypatch.setattr(target.qp, "alloc_headers", few)
    try:
        heard = target.say(golden.LOGIN_REQUEST)
        # (The command window, which means nothing in a refusal, is open already.)
        want = golden.OUT_OF_RESOURCES
        assert heard[:32] + heard[36:] == want[:32] + want[36:]
        assert target.connection.done
    finally:
        target.close()
