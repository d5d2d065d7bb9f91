"""SendTargets as the target answers it."""

from __future__ import annotations

import pytest

from iserblk.errors import RemoteProtocolError
from tests.iscsi import captured
from tests.iscsi.texts import TARGETS, answer_to


@pytest.mark.parametrize(
    ("request_text", "answer"),
    [
        (
            "SendTargets=All\0",
            "TargetName=iqn.2026-11.x:a\0TargetAddress=10.0.0.1:3260,1\0"
            "TargetAddress=[::1]:3260,1\0TargetName=iqn.2026-11.x:b\0TargetAddress=h:1,1\0",
        ),
        ("SendTargets=iqn.2026-11.x:b\0", "TargetName=iqn.2026-11.x:b\0TargetAddress=h:1,1\0"),
        ("SendTargets=iqn.2026-11.x:c\0", ""),
        ("X-com.example=1\0", "X-com.example=NotUnderstood\0"),
        ("", ""),
    ],
)
def test_send_targets(request_text: str, answer: str) -> None:
    assert answer_to(request_text.encode(), TARGETS) == answer.encode()


# shows: SYSTEM-8
def test_send_targets_as_lio_answers() -> None:
    """The form of the answer is that of Linux's target."""
    ((_, data),) = captured.pdus("discovery_crc/03_sendtargets.t2i.bin")
    ((_, request),) = captured.pdus("discovery_crc/03_sendtargets.i2t.bin")
    portals = ["10.9.9.1:3260,1", "10.9.8.1:3260,1", "10.0.2.15:3260,1"]
    assert answer_to(request, {"iqn.2026-11.lab:t0": portals}) == data


def test_send_targets_refuses_nonsense() -> None:
    with pytest.raises(RemoteProtocolError):
        answer_to(b"SendTargets\0", TARGETS)
