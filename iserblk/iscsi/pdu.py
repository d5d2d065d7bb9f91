"""One class for each PDU: its fields in the order on the wire (RFC 7143 section 11).

The fields of a class are exactly those of its ``LAYOUT``. Lengths are bytes. ``data_length`` is the
word at byte 4: DataSegmentLength, with TotalAHSLength in its top byte. Reserved bytes are sent as
zero and ignored when received. ``unpack_from`` raises RemoteProtocolError for less than 48 bytes.

The hot path uses ``SCSI_COMMAND_FIELDS`` and similar layouts of ``bhs`` instead.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar, Self

from iserblk.iscsi import bhs

TARGET_OPCODES = frozenset(
    (
        bhs.NOP_IN,
        bhs.SCSI_RESPONSE,
        bhs.TASK_MANAGEMENT_RESPONSE,
        bhs.TEXT_RESPONSE,
        bhs.LOGOUT_RESPONSE,
        bhs.ASYNC_MESSAGE,
        bhs.REJECT,
    )
)

# Task management functions (11.5.1) and responses (11.6.1).
TMF_ABORT_TASK = 1
TMF_ABORT_TASK_SET = 2
TMF_CLEAR_ACA = 3
TMF_CLEAR_TASK_SET = 4
TMF_LOGICAL_UNIT_RESET = 5
TMF_TARGET_WARM_RESET = 6
TMF_TARGET_COLD_RESET = 7
TMF_TASK_REASSIGN = 8
TMF_FUNCTION_MASK = 0x7F
TMF_COMPLETE = 0
TMF_TASK_DOES_NOT_EXIST = 1
TMF_LUN_DOES_NOT_EXIST = 2
TMF_STILL_ALLEGIANT = 3
TMF_REASSIGN_NOT_SUPPORTED = 4
TMF_NOT_SUPPORTED = 5
TMF_NOT_AUTHORIZED = 6
TMF_REJECTED = 255

# Login flags (11.12) and stages.
TRANSIT = 0x80
CSG_SHIFT = 2
STAGE_MASK = 0x03
LOGIN_CANNOT_INCLUDE = 0x0208  # Status: the session may not span to this portal
SECURITY_STAGE = 0
OPERATIONAL_STAGE = 1
FULL_FEATURE_PHASE = 3

LOGOUT_CLOSE_SESSION = 0
LOGOUT_CLOSE_CONNECTION = 1
LOGOUT_FOR_RECOVERY = 2

# Asynchronous events (11.9.1).
ASYNC_SCSI = 0
ASYNC_LOGOUT_REQUEST = 1
ASYNC_CONNECTION_DROP = 2
ASYNC_SESSION_DROP = 3
ASYNC_NEGOTIATE = 4

# Types of a SNACK Request (11.16.1).
SNACK_DATA = 0  # Data-In, or R2Ts
SNACK_STATUS = 1
SNACK_DATA_ACK = 2
SNACK_R_DATA = 3  # Data-In, perhaps in other pieces, and a SCSI Response with the SNACK Tag
SNACK_TYPE_MASK = 0x0F

# Reject reasons (11.17.1).
REJECT_DATA_DIGEST_ERROR = 0x02
REJECT_SNACK = 0x03
REJECT_PROTOCOL_ERROR = 0x04
REJECT_COMMAND_NOT_SUPPORTED = 0x05
REJECT_TASK_IN_PROGRESS = 0x07
REJECT_INVALID_DATA_ACK = 0x08
REJECT_INVALID_FIELD = 0x09
# What follows a lost PDU in its course: it is sent again, or the status tells.
REJECTS_OF_RECOVERY = (REJECT_DATA_DIGEST_ERROR, REJECT_SNACK)

# Logout responses (11.15.1).
LOGOUT_SUCCESS = 0
LOGOUT_CID_NOT_FOUND = 1
LOGOUT_NO_RECOVERY = 2
LOGOUT_CLEANUP_FAILED = 3


class Pdu:
    """The base class: packs and unpacks the fields in their order."""

    __slots__ = ()
    LAYOUT: ClassVar[struct.Struct]

    @classmethod
    def _names(cls) -> tuple[str, ...]:
        return tuple(cls.__slots__)

    def pack_into(self, buffer: memoryview | bytearray, offset: int = 0) -> None:
        """Write the 48 bytes of the BHS to ``buffer``, from ``offset`` on."""
        self.LAYOUT.pack_into(buffer, offset, *(getattr(self, name) for name in self._names()))

    def pack(self) -> bytes:
        buffer = bytearray(bhs.BHS_LENGTH)
        self.pack_into(buffer)
        return bytes(buffer)

    @classmethod
    def unpack_from(cls, buffer: bytes | bytearray | memoryview, offset: int = 0) -> Self:
        bhs.check_untrusted(buffer, offset)
        return cls(**dict(zip(cls._names(), cls.LAYOUT.unpack_from(buffer, offset), strict=True)))


@dataclass(slots=True, kw_only=True)
class NopOut(Pdu):
    """NOP-Out (11.18). ``itt`` NO_TAG: no answer is wanted. ``ttt``: of the NOP-In it answers."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8sIIII16x")
    opcode: int = bhs.NOP_OUT | bhs.IMMEDIATE
    flags: int = bhs.FLAG_FINAL
    data_length: int = 0
    lun: bytes = bytes(8)
    itt: int
    ttt: int = bhs.NO_TAG
    cmd_sn: int
    exp_stat_sn: int


@dataclass(slots=True, kw_only=True)
class NopIn(Pdu):
    """NOP-In (11.19)."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8sIIIII12x")
    opcode: int = bhs.NOP_IN
    flags: int = bhs.FLAG_FINAL
    data_length: int = 0
    lun: bytes = bytes(8)
    itt: int
    ttt: int = bhs.NO_TAG
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int


@dataclass(slots=True, kw_only=True)
class ScsiCommand(Pdu):
    """SCSI Command (11.3). ``cdb``: its first 16 bytes. ``edtl``: Expected Data Transfer Length."""

    LAYOUT: ClassVar[struct.Struct] = bhs.SCSI_COMMAND_FIELDS
    opcode: int = bhs.SCSI_COMMAND
    flags: int
    data_length: int = 0
    lun: bytes
    itt: int
    edtl: int
    cmd_sn: int
    exp_stat_sn: int
    cdb: bytes


@dataclass(slots=True, kw_only=True)
class ScsiResponse(Pdu):
    """SCSI Response (11.4)."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBBBI8xIIIIIIII")
    opcode: int = bhs.SCSI_RESPONSE
    flags: int = bhs.FLAG_FINAL
    response: int = 0
    status: int
    data_length: int = 0
    itt: int
    snack_tag: int = 0
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int
    exp_data_sn: int = 0
    bidi_residual: int = 0
    residual: int = 0


@dataclass(slots=True, kw_only=True)
class TaskManagementRequest(Pdu):
    """Task Management Function Request (11.5). ``function`` is without the F bit, which the
    same byte carries on the wire."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8sIIIIII8x")
    opcode: int = bhs.TASK_MANAGEMENT_REQUEST | bhs.IMMEDIATE
    function: int
    data_length: int = 0
    lun: bytes
    itt: int
    referenced_task_tag: int = bhs.NO_TAG
    cmd_sn: int
    exp_stat_sn: int
    ref_cmd_sn: int = 0
    exp_data_sn: int = 0

    def pack_into(self, buffer: memoryview | bytearray, offset: int = 0) -> None:
        super(TaskManagementRequest, self).pack_into(buffer, offset)
        buffer[offset + 1] = self.function | bhs.FLAG_FINAL

    @classmethod
    def unpack_from(cls, buffer: bytes | bytearray | memoryview, offset: int = 0) -> Self:
        request = super(TaskManagementRequest, cls).unpack_from(buffer, offset)
        request.function &= TMF_FUNCTION_MASK
        return request


@dataclass(slots=True, kw_only=True)
class TaskManagementResponse(Pdu):
    """Task Management Function Response (11.6)."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBBxI8xI4xIII12x")
    opcode: int = bhs.TASK_MANAGEMENT_RESPONSE
    flags: int = bhs.FLAG_FINAL
    response: int
    data_length: int = 0
    itt: int
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int


@dataclass(slots=True, kw_only=True)
class DataOut(Pdu):
    """SCSI Data-Out (11.7)."""

    LAYOUT: ClassVar[struct.Struct] = bhs.DATA_OUT_FIELDS
    opcode: int = bhs.DATA_OUT
    flags: int
    data_length: int
    lun: bytes
    itt: int
    ttt: int = bhs.NO_TAG
    exp_stat_sn: int
    data_sn: int
    buffer_offset: int


@dataclass(slots=True, kw_only=True)
class DataIn(Pdu):
    """SCSI Data-In (11.7)."""

    LAYOUT: ClassVar[struct.Struct] = bhs.DATA_IN_FIELDS
    opcode: int = bhs.DATA_IN
    flags: int
    status: int = 0
    data_length: int
    lun: bytes
    itt: int
    ttt: int = bhs.NO_TAG
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int
    data_sn: int
    buffer_offset: int
    residual: int = 0


@dataclass(slots=True, kw_only=True)
class ReadyToTransfer(Pdu):
    """Ready To Transfer, R2T (11.8)."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8sIIIIIIII")
    opcode: int = bhs.R2T
    flags: int = bhs.FLAG_FINAL
    data_length: int = 0
    lun: bytes
    itt: int
    ttt: int
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int
    r2t_sn: int
    buffer_offset: int
    desired_length: int


@dataclass(slots=True, kw_only=True)
class AsyncMessage(Pdu):
    """Asynchronous Message (11.9). The event defines the parameters."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8sI4xIIIBBHHH4x")
    opcode: int = bhs.ASYNC_MESSAGE
    flags: int = bhs.FLAG_FINAL
    data_length: int = 0
    lun: bytes = bytes(8)
    itt: int = bhs.NO_TAG
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int
    event: int
    vendor_code: int = 0
    parameter1: int = 0
    parameter2: int = 0
    parameter3: int = 0


@dataclass(slots=True, kw_only=True)
class TextRequest(Pdu):
    """Text Request (11.10)."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8sIIII16x")
    opcode: int = bhs.TEXT_REQUEST | bhs.IMMEDIATE
    flags: int = bhs.FLAG_FINAL
    data_length: int
    lun: bytes = bytes(8)
    itt: int
    ttt: int = bhs.NO_TAG
    cmd_sn: int
    exp_stat_sn: int


@dataclass(slots=True, kw_only=True)
class TextResponse(Pdu):
    """Text Response (11.11)."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8sIIIII12x")
    opcode: int = bhs.TEXT_RESPONSE
    flags: int = bhs.FLAG_FINAL
    data_length: int
    lun: bytes = bytes(8)
    itt: int
    ttt: int = bhs.NO_TAG
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int


@dataclass(slots=True, kw_only=True)
class LoginRequest(Pdu):
    """Login Request (11.12). ``flags``: T, C, CSG, NSG."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBBBI6sHIHxxII16x")
    opcode: int = bhs.LOGIN_REQUEST | bhs.IMMEDIATE
    flags: int
    version_max: int = 0
    version_min: int = 0
    data_length: int
    isid: bytes
    tsih: int
    itt: int
    cid: int = 0
    cmd_sn: int
    exp_stat_sn: int


@dataclass(slots=True, kw_only=True)
class LoginResponse(Pdu):
    """Login Response (11.13). ``status``: Status-Class << 8 | Status-Detail."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBBBI6sHI4xIIIH10x")
    opcode: int = bhs.LOGIN_RESPONSE
    flags: int
    version_max: int = 0
    version_active: int = 0
    data_length: int
    isid: bytes
    tsih: int
    itt: int
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int
    status: int = 0


@dataclass(slots=True, kw_only=True)
class LogoutRequest(Pdu):
    """Logout Request (11.14). ``reason`` is without the F bit, which the same byte carries on the
    wire."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8xIHxxII16x")
    opcode: int = bhs.LOGOUT_REQUEST | bhs.IMMEDIATE
    reason: int
    data_length: int = 0
    itt: int
    cid: int = 0
    cmd_sn: int
    exp_stat_sn: int

    def pack_into(self, buffer: memoryview | bytearray, offset: int = 0) -> None:
        super(LogoutRequest, self).pack_into(buffer, offset)
        buffer[offset + 1] = self.reason | bhs.FLAG_FINAL

    @classmethod
    def unpack_from(cls, buffer: bytes | bytearray | memoryview, offset: int = 0) -> Self:
        request = super(LogoutRequest, cls).unpack_from(buffer, offset)
        request.reason &= ~bhs.FLAG_FINAL
        return request


@dataclass(slots=True, kw_only=True)
class LogoutResponse(Pdu):
    """Logout Response (11.15). Times are seconds."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBBxI8xI4xIII4xHH4x")
    opcode: int = bhs.LOGOUT_RESPONSE
    flags: int = bhs.FLAG_FINAL
    response: int
    data_length: int = 0
    itt: int
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int
    time2wait: int = 0
    time2retain: int = 0


@dataclass(slots=True, kw_only=True)
class SnackRequest(Pdu):
    """SNACK Request (11.16). Never sent over iSER. ``kind``: its Type, without the F bit, which the
    same byte carries on the wire. ``ttt``: Target Transfer Tag of a DataACK, SNACK Tag of an
    R-Data SNACK. ``run_length`` 0: all from ``beg_run`` on."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBxxI8sII4xI8xII")
    opcode: int = bhs.SNACK_REQUEST
    kind: int
    data_length: int = 0
    lun: bytes = bytes(8)
    itt: int = bhs.NO_TAG
    ttt: int = bhs.NO_TAG
    exp_stat_sn: int
    beg_run: int
    run_length: int

    def pack_into(self, buffer: memoryview | bytearray, offset: int = 0) -> None:
        super(SnackRequest, self).pack_into(buffer, offset)
        buffer[offset + 1] = self.kind | bhs.FLAG_FINAL

    @classmethod
    def unpack_from(cls, buffer: bytes | bytearray | memoryview, offset: int = 0) -> Self:
        request = super(SnackRequest, cls).unpack_from(buffer, offset)
        request.kind &= SNACK_TYPE_MASK
        return request


@dataclass(slots=True, kw_only=True)
class Reject(Pdu):
    """Reject (11.17). The data segment holds the header of the PDU that was rejected. ``data_sn``:
    of the next Data-In or R2T, where a SNACK for one that was never sent is rejected."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBBxI8xI4xIIII8x")
    opcode: int = bhs.REJECT
    flags: int = bhs.FLAG_FINAL
    reason: int
    data_length: int
    itt: int = bhs.NO_TAG
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int
    data_sn: int = 0


@dataclass(slots=True, kw_only=True)
class TargetHeader(Pdu):
    """The fields that every PDU of a target has at the same place. ``response`` is byte 2."""

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(">BBBxI8xIIIII12x")
    opcode: int
    flags: int
    response: int
    data_length: int
    itt: int
    ttt: int
    stat_sn: int
    exp_cmd_sn: int
    max_cmd_sn: int

    @property
    def advances_stat_sn(self) -> bool:
        """Whether the PDU uses up a StatSN. A NOP-In that answers nothing does not (11.19.3)."""
        return not (self.opcode == bhs.NOP_IN and self.itt == bhs.NO_TAG)


# The classes by opcode, for tools and tests.
BY_OPCODE: dict[int, type[Pdu]] = {
    bhs.NOP_OUT: NopOut,
    bhs.SCSI_COMMAND: ScsiCommand,
    bhs.TASK_MANAGEMENT_REQUEST: TaskManagementRequest,
    bhs.LOGIN_REQUEST: LoginRequest,
    bhs.TEXT_REQUEST: TextRequest,
    bhs.DATA_OUT: DataOut,
    bhs.LOGOUT_REQUEST: LogoutRequest,
    bhs.SNACK_REQUEST: SnackRequest,
    bhs.NOP_IN: NopIn,
    bhs.SCSI_RESPONSE: ScsiResponse,
    bhs.TASK_MANAGEMENT_RESPONSE: TaskManagementResponse,
    bhs.LOGIN_RESPONSE: LoginResponse,
    bhs.TEXT_RESPONSE: TextResponse,
    bhs.DATA_IN: DataIn,
    bhs.LOGOUT_RESPONSE: LogoutResponse,
    bhs.R2T: ReadyToTransfer,
    bhs.ASYNC_MESSAGE: AsyncMessage,
    bhs.REJECT: Reject,
}
