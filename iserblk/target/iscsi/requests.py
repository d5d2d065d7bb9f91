"""PDUs of one connection of the target that are no SCSI commands, in full feature phase."""

from __future__ import annotations

from functools import partial
from typing import Final

from iserblk.datamover.seam import TargetDatamover, TargetUser
from iserblk.errors import ConnectionLost, RemoteProtocolError
from iserblk.iscsi import bhs, pdu
from iserblk.iscsi.text import MAXIMUM_TEXT
from iserblk.target.iscsi.control import CONTROL_INLINE, AnswerLimit, ControlAnswers
from iserblk.target.iscsi.logout import Logouts
from iserblk.target.iscsi.session import TargetSession
from iserblk.target.iscsi.tasks.management import TaskManagement
from iserblk.target.iscsi.tasks.slot import Allegiance
from iserblk.target.ports import TargetPort

# PDUs with a CmdSN, SCSI Commands excepted.
_NUMBERED: Final = (
    bhs.NOP_OUT,
    bhs.TASK_MANAGEMENT_REQUEST,
    bhs.TEXT_REQUEST,
    bhs.LOGOUT_REQUEST,
)


class Requests:
    """Pings, task management, text, logouts and SNACKs of ``connection``.

    ``user``: the connection, which is notified of a PDU that came before its turn when that has
    come. ``portal``, ``port``: to which the initiator connected. ``recovers``: see Commands."""

    def __init__(
        self,
        connection: Allegiance,
        user: TargetUser,
        session: TargetSession,
        datamover: TargetDatamover,
        answers: ControlAnswers,
        limit: AnswerLimit,
        management: TaskManagement,
        logouts: Logouts,
        target_name: str,
        portal: str,
        port: TargetPort,
        recovers: bool,
    ) -> None:
        self._connection = connection
        self._user = user
        self._session = session
        self._window = session.window
        self._dm = datamover
        self._answers = answers
        self._limit = limit
        self._management = management
        self._logouts = logouts
        self._target_name = target_name
        self._portal = portal
        self._port = port
        self._recovers = recovers
        self._early_text = False  # a Text Request waits for its turn

    def take(self, message: memoryview, at: int, opcode: int) -> None:
        """Take a PDU."""
        if opcode in _NUMBERED and (
            self._lacks_tag(message, at, opcode) or self._must_wait(message, at)
        ):
            pass
        elif opcode == bhs.NOP_OUT:
            self._answers.nop_in(message, at, self._limit.length)
        elif opcode == bhs.TASK_MANAGEMENT_REQUEST and self._session.attached:
            self._management.take(pdu.TaskManagementRequest.unpack_from(message, at))
        elif opcode == bhs.TEXT_REQUEST:
            addresses = self._port.ports.target_addresses(self._portal, self._port)
            self._answers.text(message, at, {self._target_name: addresses}, self._limit.length)
        elif opcode == bhs.LOGOUT_REQUEST:
            self._logouts.take(pdu.LogoutRequest.unpack_from(message, at))
        elif opcode == bhs.SNACK_REQUEST and self._recovers:
            reason, data_sn = self._dm.retransmit(pdu.SnackRequest.unpack_from(message, at))
            if reason:
                self._answers.reject(
                    message, at, reason, in_place_of_a_response=False, data_sn=data_sn
                )
        elif opcode in (bhs.SNACK_REQUEST, bhs.LOGIN_REQUEST):
            # Neither is allowed in full feature phase: not in iSER (RFC 7145 sections 7.3.9,
            # 7.3.11), nor in Traditional iSCSI at ErrorRecoveryLevel 0.
            self._reject(message, at, pdu.REJECT_PROTOCOL_ERROR, False)
        else:
            self._reject(message, at, pdu.REJECT_COMMAND_NOT_SUPPORTED, False)

    def _reject(self, message: memoryview, at: int, reason: int, responds: bool) -> None:
        self._answers.reject(message, at, reason, in_place_of_a_response=responds)

    def _lacks_tag(self, message: memoryview, at: int, opcode: int) -> bool:
        """Whether a PDU that is no SCSI command, and is to have an answer, has the ITT that is
        reserved (11.2.1.8). Then it is rejected, unless its CmdSN has it ignored."""
        (itt,) = bhs.ITT.unpack_from(message, at + bhs.ITT_OFFSET)
        if itt != bhs.NO_TAG or opcode == bhs.NOP_OUT:
            return False
        window = self._window
        (cmd_sn, _) = bhs.CMD_SN_EXP_STAT_SN.unpack_from(message, at + bhs.CMD_SN_OFFSET)
        if window.is_next(message[at], cmd_sn) or window.may_wait(cmd_sn):
            self._reject(message, at, pdu.REJECT_INVALID_FIELD, True)
        return True

    def _must_wait(self, message: memoryview, at: int) -> bool:
        """Whether a PDU that is no SCSI command has come before others with a smaller CmdSN. Then a
        copy of it waits for its turn: a Text Request whole, as a part of a question is another one,
        any other with no more data than an answer could have. A connection has one Text Request
        outstanding (RFC 7143 section 11.10), so a second one that would wait is rejected, and does
        not count as received. Raises RemoteProtocolError as for a text that is too long in turn,
        and ConnectionLost where there is no memory."""
        (cmd_sn, _) = bhs.CMD_SN_EXP_STAT_SN.unpack_from(message, at + bhs.CMD_SN_OFFSET)
        if (
            message[at] & bhs.IMMEDIATE
            or cmd_sn == self._window.exp_cmd_sn
            or not self._window.may_wait(cmd_sn)
        ):
            return False
        data = bhs.data_segment_untrusted(message, at)
        if message[at] & bhs.OPCODE_MASK != bhs.TEXT_REQUEST:
            data = data[:CONTROL_INLINE]
        elif len(data) > MAXIMUM_TEXT:
            raise RemoteProtocolError("iSCSI", f"a text of more than {MAXIMUM_TEXT} bytes")
        elif self._early_text:
            self._reject(message, at, pdu.REJECT_PROTOCOL_ERROR, True)
            return True
        else:
            self._early_text = True
        if not self._session.pool.may_hold(bhs.BHS_LENGTH + len(data)):
            raise ConnectionLost("there is no memory for what comes before its turn")
        copy = bytearray(message[at : at + bhs.BHS_LENGTH])
        bhs.LENGTHS.pack_into(copy, bhs.LENGTHS_OFFSET, len(data))
        whole = memoryview(copy + data)
        turn_comes = partial(self._turn_comes, whole)
        self._session.wait(cmd_sn, self._connection, None, turn_comes, len(whole))
        return True

    def _turn_comes(self, whole: memoryview) -> None:
        """Take a PDU that came before its turn."""
        if whole[0] & bhs.OPCODE_MASK == bhs.TEXT_REQUEST:
            self._early_text = False
        self._user.control_notify(whole, 0, 0)
