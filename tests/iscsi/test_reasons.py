"""Numbers in words: one line each, for any number."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from iserblk.iscsi import pdu, reasons


@pytest.mark.parametrize(
    ("words", "value", "text"),
    [
        (reasons.scsi_response, 1, "target failure"),
        (reasons.scsi_response, 0x90, "0x90"),
        (reasons.task_management_response, pdu.TMF_TASK_DOES_NOT_EXIST, "task does not exist"),
        (reasons.task_management_response, 255, "rejected"),
        (reasons.task_management_response, 99, "0x63"),
        (reasons.reject_reason, pdu.REJECT_PROTOCOL_ERROR, "protocol error"),
        (reasons.reject_reason, 0x0C, "waiting for logout"),
        (reasons.reject_reason, 0x77, "0x77"),
        (reasons.async_event, pdu.ASYNC_LOGOUT_REQUEST, "asks for a logout"),
        (reasons.async_event, pdu.ASYNC_SESSION_DROP, "all connections"),
        (reasons.async_event, 250, "0xfa"),
        (reasons.login_status, 0x0203, "target name"),
        (reasons.login_status, 0x01FF, "redirection 01 ff"),
        (reasons.login_status, 0x0400, "status 04 00"),
    ],
)
def test_words(words: Callable[[int], str], value: int, text: str) -> None:
    assert text in words(value)


@pytest.mark.parametrize(
    "words",
    [
        reasons.scsi_response,
        reasons.task_management_response,
        reasons.reject_reason,
        reasons.async_event,
        reasons.login_status,
    ],
)
def test_any_number(words: Callable[[int], str]) -> None:
    for value in (*range(256), 0xFFFF):
        said = words(value)
        assert said and "\n" not in said
