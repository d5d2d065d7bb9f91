"""Every PDU: bytes and fields, against the byte maps of RFC 7143 section 11 and the captures."""

from __future__ import annotations

import pytest

from iserblk.errors import RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from tests.iscsi import captured

LUN = bytes.fromhex("0001000000000000")
ISID = bytes.fromhex("801234560001")
NUMBERS = {"stat_sn": 0x18191A1B, "exp_cmd_sn": 0x1C1D1E1F, "max_cmd_sn": 0x20212223}
SENT = {"cmd_sn": 0x18191A1B, "exp_stat_sn": 0x1C1D1E1F}
ITT = 0x10111213
TTT = 0x14151617

# (PDU, its 48 bytes by words of the byte map). The words are written down from the RFC's figures,
# in which offset n carries the bytes n, n+1, n+2, n+3 here wherever it can.
TABLE: list[tuple[pdu.Pdu, str]] = [
    (
        pdu.NopOut(lun=LUN, itt=ITT, ttt=TTT, data_length=5, **SENT),
        "40800000 00000005 00010000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "00000000 00000000 00000000 00000000",
    ),
    (
        pdu.NopIn(lun=LUN, itt=ITT, ttt=TTT, data_length=5, **NUMBERS),
        "20800000 00000005 00010000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "20212223 00000000 00000000 00000000",
    ),
    (
        pdu.ScsiCommand(
            flags=0xE1, lun=LUN, itt=ITT, edtl=TTT, data_length=5, cdb=bytes(range(32, 48)), **SENT
        ),
        "01e10000 00000005 00010000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "20212223 24252627 28292a2b 2c2d2e2f",
    ),
    (
        pdu.ScsiResponse(
            flags=0x82,
            response=1,
            status=2,
            data_length=5,
            itt=ITT,
            snack_tag=TTT,
            exp_data_sn=0x24252627,
            bidi_residual=0x28292A2B,
            residual=0x2C2D2E2F,
            **NUMBERS,
        ),
        "21820102 00000005 00000000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "20212223 24252627 28292a2b 2c2d2e2f",
    ),
    (
        pdu.TaskManagementRequest(
            function=pdu.TMF_LOGICAL_UNIT_RESET,
            lun=LUN,
            itt=ITT,
            referenced_task_tag=TTT,
            ref_cmd_sn=0x20212223,
            exp_data_sn=0x24252627,
            **SENT,
        ),
        "42850000 00000000 00010000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "20212223 24252627 00000000 00000000",
    ),
    (
        pdu.TaskManagementResponse(response=5, itt=ITT, **NUMBERS),
        "22800500 00000000 00000000 00000000 10111213 00000000 18191a1b 1c1d1e1f"
        "20212223 00000000 00000000 00000000",
    ),
    (
        pdu.LoginRequest(
            flags=0x87,
            version_max=1,
            version_min=2,
            data_length=5,
            isid=ISID,
            tsih=0x0E0F,
            itt=ITT,
            cid=0x1415,
            **SENT,
        ),
        "43870102 00000005 80123456 00010e0f 10111213 14150000 18191a1b 1c1d1e1f"
        "00000000 00000000 00000000 00000000",
    ),
    (
        pdu.LoginResponse(
            flags=0x87,
            version_max=1,
            version_active=2,
            data_length=5,
            isid=ISID,
            tsih=0x0E0F,
            itt=ITT,
            status=0x0203,
            **NUMBERS,
        ),
        "23870102 00000005 80123456 00010e0f 10111213 00000000 18191a1b 1c1d1e1f"
        "20212223 02030000 00000000 00000000",
    ),
    (
        pdu.TextRequest(flags=0x40, lun=LUN, itt=ITT, ttt=TTT, data_length=5, **SENT),
        "44400000 00000005 00010000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "00000000 00000000 00000000 00000000",
    ),
    (
        pdu.TextResponse(flags=0x80, lun=LUN, itt=ITT, ttt=TTT, data_length=5, **NUMBERS),
        "24800000 00000005 00010000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "20212223 00000000 00000000 00000000",
    ),
    (
        pdu.DataOut(
            flags=0x80,
            lun=LUN,
            itt=ITT,
            ttt=TTT,
            data_length=5,
            exp_stat_sn=0x1C1D1E1F,
            data_sn=0x24252627,
            buffer_offset=0x28292A2B,
        ),
        "05800000 00000005 00010000 00000000 10111213 14151617 00000000 1c1d1e1f"
        "00000000 24252627 28292a2b 00000000",
    ),
    (
        pdu.DataIn(
            flags=0x81,
            status=2,
            lun=LUN,
            itt=ITT,
            ttt=TTT,
            data_length=5,
            data_sn=0x24252627,
            buffer_offset=0x28292A2B,
            residual=0x2C2D2E2F,
            **NUMBERS,
        ),
        "25810002 00000005 00010000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "20212223 24252627 28292a2b 2c2d2e2f",
    ),
    (
        pdu.ReadyToTransfer(
            lun=LUN,
            itt=ITT,
            ttt=TTT,
            r2t_sn=0x24252627,
            buffer_offset=0x28292A2B,
            desired_length=0x2C2D2E2F,
            **NUMBERS,
        ),
        "31800000 00000000 00010000 00000000 10111213 14151617 18191a1b 1c1d1e1f"
        "20212223 24252627 28292a2b 2c2d2e2f",
    ),
    (
        pdu.AsyncMessage(
            lun=LUN,
            event=0x24,
            vendor_code=0x25,
            parameter1=0x2627,
            parameter2=0x2829,
            parameter3=0x2A2B,
            data_length=5,
            **NUMBERS,
        ),
        "32800000 00000005 00010000 00000000 ffffffff 00000000 18191a1b 1c1d1e1f"
        "20212223 24252627 28292a2b 00000000",
    ),
    (
        pdu.LogoutRequest(reason=pdu.LOGOUT_CLOSE_CONNECTION, itt=ITT, cid=0x1415, **SENT),
        "46810000 00000000 00000000 00000000 10111213 14150000 18191a1b 1c1d1e1f"
        "00000000 00000000 00000000 00000000",
    ),
    (
        pdu.LogoutResponse(response=3, itt=ITT, time2wait=0x2829, time2retain=0x2A2B, **NUMBERS),
        "26800300 00000000 00000000 00000000 10111213 00000000 18191a1b 1c1d1e1f"
        "20212223 00000000 28292a2b 00000000",
    ),
    (
        pdu.SnackRequest(
            kind=pdu.SNACK_STATUS,
            lun=LUN,
            itt=ITT,
            ttt=TTT,
            exp_stat_sn=0x1C1D1E1F,
            beg_run=0x28292A2B,
            run_length=0x2C2D2E2F,
        ),
        "10810000 00000000 00010000 00000000 10111213 14151617 00000000 1c1d1e1f"
        "00000000 00000000 28292a2b 2c2d2e2f",
    ),
    (
        pdu.Reject(reason=9, data_length=48, data_sn=0x24252627, **NUMBERS),
        "3f800900 00000030 00000000 00000000 ffffffff 00000000 18191a1b 1c1d1e1f"
        "20212223 24252627 00000000 00000000",
    ),
]
CASES = [pytest.param(*row, id=type(row[0]).__name__) for row in TABLE]


def test_the_table_has_every_pdu() -> None:
    assert {type(instance) for instance, _ in TABLE} == set(pdu.BY_OPCODE.values())


@pytest.mark.parametrize(("instance", "raw"), CASES)
def test_bytes_and_fields(instance: pdu.Pdu, raw: str) -> None:
    expected = bytes.fromhex(raw)
    assert instance.pack() == expected
    kind = type(instance)
    assert pdu.BY_OPCODE[expected[0] & bhs.OPCODE_MASK] is kind
    assert kind.unpack_from(expected) == instance
    assert kind.unpack_from(b"\xee" * 7 + expected + b"\xee" * 9, 7) == instance


@pytest.mark.parametrize(("instance", "raw"), CASES)
def test_whole_headers_only(instance: pdu.Pdu, raw: str) -> None:
    expected = bytes.fromhex(raw)
    for cut in range(bhs.BHS_LENGTH):
        with pytest.raises(RemoteProtocolError):
            type(instance).unpack_from(expected[:cut])
    with pytest.raises(RemoteProtocolError):
        type(instance).unpack_from(expected, 1)


@pytest.mark.parametrize(("instance", "raw"), CASES)
def test_packing_touches_the_bhs_only(instance: pdu.Pdu, raw: str) -> None:
    buffer = bytearray(b"\xee" * 60)
    instance.pack_into(buffer, 6)
    assert buffer == b"\xee" * 6 + bytes.fromhex(raw) + b"\xee" * 6


@pytest.mark.parametrize(("instance", "raw"), CASES)
def test_target_header(instance: pdu.Pdu, raw: str) -> None:
    """The fields that every PDU of a target has at the same place."""
    expected = bytes.fromhex(raw)
    if expected[0] < bhs.NOP_IN or expected[0] & bhs.IMMEDIATE:
        return
    head = pdu.TargetHeader.unpack_from(expected)
    assert (head.stat_sn, head.exp_cmd_sn, head.max_cmd_sn) == tuple(NUMBERS.values())
    assert head.itt == getattr(instance, "itt", bhs.NO_TAG)
    assert head.response == expected[2]
    assert head.advances_stat_sn


def test_an_unasked_nop_in_has_no_stat_sn_of_its_own() -> None:
    """RFC 7143 section 11.19.2."""
    for ttt in (TTT, bhs.NO_TAG):
        nop = pdu.NopIn(itt=bhs.NO_TAG, ttt=ttt, **NUMBERS)  # type: ignore[arg-type]
        assert not pdu.TargetHeader.unpack_from(nop.pack()).advances_stat_sn


@pytest.mark.parametrize("name", captured.names())
def test_captured_headers(name: str) -> None:
    """Every BHS of real peers decodes, and encodes to the same bytes."""
    for raw in captured.headers(name):
        kind = pdu.BY_OPCODE[raw[0] & bhs.OPCODE_MASK]
        again = kind.unpack_from(raw).pack()
        assert again == raw


def test_captured_opcodes() -> None:
    """The captures have what this test is for."""
    seen = {raw[0] & bhs.OPCODE_MASK for name in captured.names() for raw in captured.headers(name)}
    assert seen >= {
        bhs.SCSI_COMMAND,
        bhs.LOGIN_REQUEST,
        bhs.TEXT_REQUEST,
        bhs.LOGOUT_REQUEST,
        bhs.TASK_MANAGEMENT_REQUEST,
        bhs.NOP_OUT,
        bhs.SCSI_RESPONSE,
        bhs.LOGIN_RESPONSE,
        bhs.TEXT_RESPONSE,
        bhs.LOGOUT_RESPONSE,
        bhs.TASK_MANAGEMENT_RESPONSE,
        bhs.NOP_IN,
        bhs.REJECT,
    }
