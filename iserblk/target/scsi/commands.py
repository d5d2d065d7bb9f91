"""The table of the commands of the device server, and REPORT SUPPORTED OPERATION CODES.

``usage`` is the CDB usage data of SPC-4: the opcode (and service action), then a 1 for each bit
that the device server evaluates. A command that sets any other bit ends with INVALID FIELD IN CDB.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from iserblk.scsi import opcodes as op
from iserblk.scsi import reservations as pr
from iserblk.scsi import sense
from iserblk.target.scsi import block, copying, logs, primary, provisioning
from iserblk.target.scsi.ended import CheckCondition, invalid_field
from iserblk.target.scsi.reservations import CHANGES, FREE, PREVENTS, READS, STARTS
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.scsi.unit import LogicalUnit

Begin = Callable[[DeviceTask, LogicalUnit], None]

_ACTION_MASK: Final = 0x1F
_WITH_ACTIONS: Final = op.WITH_ACTIONS
_RESERVE: Final = (op.PERSISTENT_RESERVE_IN, op.PERSISTENT_RESERVE_OUT)
_IN_ACTIONS: Final = (
    pr.READ_KEYS,
    pr.READ_RESERVATION,
    pr.REPORT_CAPABILITIES,
    pr.READ_FULL_STATUS,
)
_OUT_ACTIONS: Final = (
    pr.REGISTER,
    pr.RESERVE,
    pr.RELEASE,
    pr.CLEAR,
    pr.PREEMPT,
    pr.PREEMPT_AND_ABORT,
    pr.REGISTER_AND_IGNORE,
    pr.REGISTER_AND_MOVE,
)


class Command(NamedTuple):
    """One command of the table. ``begin`` None: the device server answers it itself, whether the
    LUN exists or not. ``access``: what the command needs of a LUN that another initiator has
    reserved, FREE, READS, … of ``iserblk.target.scsi.reservations``."""

    usage: bytes
    length: int  # bytes of the CDB
    forbidden: tuple[tuple[int, int], ...]  # index of a byte of the CDB, its bits that must be 0
    begin: Begin | None
    access: int

    @property
    def action(self) -> int | None:
        return self.usage[1] & _ACTION_MASK if self.usage[0] in _WITH_ACTIONS else None


def _command(usage: str, begin: Begin | None, access: int) -> Command:
    raw = bytes.fromhex(usage)
    forbidden = [(at, 0xFF & ~allowed) for at, allowed in enumerate(raw) if at and allowed != 0xFF]
    return Command(raw, len(raw), tuple(forbidden), begin, access)


def _report_supported(task: DeviceTask, unit: LogicalUnit) -> None:
    report_supported_operation_codes(task, unit)


_LIST: Final = (
    _command("00 00 00 00 00 00", primary.begin_nothing, FREE),
    _command("03 01 00 00 ff 00", None, FREE),
    _command("08 1f ff ff ff 00", block.begin_read6, READS),
    _command("0a 1f ff ff ff 00", block.begin_write6, CHANGES),
    _command("12 01 ff ff ff 00", None, FREE),
    _command("15 11 00 00 ff 00", primary.begin_mode_select6, CHANGES),
    _command("16 00 00 00 00 00", primary.begin_reserve6, FREE),
    _command("17 00 00 00 00 00", primary.begin_release6, FREE),
    _command("1a 08 ff ff ff 00", primary.begin_mode_sense6, READS),
    _command("1b 01 00 00 05 00", primary.begin_start_stop, STARTS),
    _command("1d 17 00 00 00 00", primary.begin_send_diagnostic, CHANGES),
    _command("1e 00 00 00 03 00", primary.begin_nothing, PREVENTS),
    _command("25 00 00 00 00 00 00 00 00 00", block.begin_read_capacity10, FREE),
    _command("28 18 ff ff ff ff 3f ff ff 00", block.begin_read10, READS),
    _command("2a 18 ff ff ff ff 3f ff ff 00", block.begin_write10, CHANGES),
    _command("2e 16 ff ff ff ff 3f ff ff 00", block.begin_write_and_verify10, CHANGES),
    _command("2f 16 ff ff ff ff 3f ff ff 00", block.begin_verify10, READS),
    _command("34 02 ff ff ff ff 3f ff ff 00", block.begin_pre_fetch10, READS),
    _command("35 06 ff ff ff ff 3f ff ff 00", block.begin_synchronize_cache10, CHANGES),
    _command("41 08 ff ff ff ff 3f ff ff 00", provisioning.begin_write_same10, CHANGES),
    _command("42 00 00 00 00 00 3f ff ff 00", provisioning.begin_unmap, CHANGES),
    _command("4d 00 ff ff 00 ff ff ff ff 00", logs.begin_log_sense, FREE),
    _command("53 1c ff ff ff ff 1f ff ff 00", block.begin_xdwriteread10, CHANGES),
    _command("55 11 00 00 00 00 00 ff ff 00", primary.begin_mode_select10, CHANGES),
    _command("5a 18 ff ff 00 00 00 ff ff 00", primary.begin_mode_sense10, READS),
    *(
        _command(f"5e {action:02x} 00 00 00 00 00 ff ff 00", primary.begin_reserve_in, FREE)
        for action in _IN_ACTIONS
    ),
    # Some of these actions ignore scope and type.
    *(
        _command(f"5f {action:02x} ff 00 00 ff ff ff ff 00", primary.begin_reserve_out, FREE)
        for action in _OUT_ACTIONS
    ),
    _command(
        "83 00 00 00 00 00 00 00 00 00 ff ff ff ff 00 00", copying.begin_extended_copy, CHANGES
    ),
    _command(
        "84 00 ff 00 00 00 00 00 00 00 ff ff ff ff 00 00",
        copying.begin_receive_copy_results,
        CHANGES,
    ),
    _command(
        "84 03 00 00 00 00 00 00 00 00 ff ff ff ff 00 00",
        copying.begin_receive_copy_results,
        CHANGES,
    ),
    _command("88 18 ff ff ff ff ff ff ff ff ff ff ff ff 3f 00", block.begin_read16, READS),
    _command(
        "89 18 ff ff ff ff ff ff ff ff 00 00 00 ff 3f 00", block.begin_compare_and_write, CHANGES
    ),
    _command("8a 18 ff ff ff ff ff ff ff ff ff ff ff ff 3f 00", block.begin_write16, CHANGES),
    _command(
        "8e 16 ff ff ff ff ff ff ff ff ff ff ff ff 3f 00", block.begin_write_and_verify16, CHANGES
    ),
    _command("8f 16 ff ff ff ff ff ff ff ff ff ff ff ff 3f 00", block.begin_verify16, READS),
    _command("90 02 ff ff ff ff ff ff ff ff ff ff ff ff 3f 00", block.begin_pre_fetch16, READS),
    _command(
        "91 06 ff ff ff ff ff ff ff ff ff ff ff ff 3f 00", block.begin_synchronize_cache16, CHANGES
    ),
    _command(
        "93 09 ff ff ff ff ff ff ff ff ff ff ff ff 3f 00", provisioning.begin_write_same16, CHANGES
    ),
    _command("9e 10 00 00 00 00 00 00 00 00 ff ff ff ff 00 00", block.begin_read_capacity16, FREE),
    _command(
        "9e 12 ff ff ff ff ff ff ff ff ff ff ff ff 00 00", provisioning.begin_get_lba_status, READS
    ),
    _command("a0 00 ff 00 00 00 ff ff ff ff 00 00", None, FREE),
    _command("a3 0a 00 00 00 00 ff ff ff ff 00 00", primary.begin_report_port_groups, FREE),
    _command("a3 0c 87 ff ff ff ff ff ff ff 00 00", _report_supported, READS),
    _command("a4 0a 00 00 00 00 ff ff ff ff 00 00", primary.begin_set_port_groups, CHANGES),
    _command("a8 18 ff ff ff ff ff ff ff ff 3f 00", block.begin_read12, READS),
    _command("aa 18 ff ff ff ff ff ff ff ff 3f 00", block.begin_write12, CHANGES),
    _command("ae 16 ff ff ff ff ff ff ff ff 3f 00", block.begin_write_and_verify12, CHANGES),
    _command("af 16 ff ff ff ff ff ff ff ff 3f 00", block.begin_verify12, READS),
)

# Opcode → command; for opcodes with service actions: opcode << 8 | service action → command.
COMMANDS: Final = {
    each.usage[0] if each.action is None else each.usage[0] << 8 | each.action: each
    for each in _LIST
}

# The same by the opcode alone, for those that have one command: 256 entries.
OF_OPCODE: Final = [COMMANDS.get(opcode) for opcode in range(256)]


def find(cdb: bytes) -> Command | None:
    """The command of a CDB; None: the command is unknown."""
    if not cdb:
        return None
    if cdb[0] in _WITH_ACTIONS and len(cdb) > 1:
        return COMMANDS.get(cdb[0] << 8 | cdb[1] & _ACTION_MASK)
    return COMMANDS.get(cdb[0])


def has(unit: LogicalUnit, command: Command) -> bool:
    """Whether the unit has the command; most have all."""
    lacks = unit.lacks
    if not lacks:
        return True
    opcode, action = command.usage[0], command.action
    return opcode not in lacks and (action is None or opcode << 8 | action not in lacks)


def check_fields(command: Command, cdb: bytes) -> None:
    """Raises CheckCondition for a CDB that is too short, or that has a forbidden bit set."""
    if len(cdb) < command.length:
        raise invalid_field(len(cdb))
    for at, bits in command.forbidden:
        wrong = cdb[at] & bits
        if wrong:
            raise invalid_field(at, wrong.bit_length() - 1)


# -- REPORT SUPPORTED OPERATION CODES --------------------------------------------------------------

_RCTD: Final = 0x80
_OPTIONS: Final = 0x07
_ALL_COMMANDS: Final = 0
_ONE_OPCODE: Final = 1
_ONE_ACTION: Final = 2
_EITHER: Final = 3
_CTDP: Final = 0x80  # in the answer about a single command
_SUPPORTED: Final = 3
_NOT_SUPPORTED: Final = 1
_DESCRIPTOR: Final = struct.Struct(">BxHxBH")
_SERVACTV: Final = 0x01
_CTDP_ALL: Final = 0x02
_SET_PORT_GROUPS: Final = bytes((op.MAINTENANCE_OUT, op.SA_SET_TARGET_PORT_GROUPS))
# Command timeouts descriptor: its length, then zeroes: no timeouts are given.
_TIMEOUTS: Final = struct.pack(">H10x", 10)


def report_supported_operation_codes(task: DeviceTask, unit: LogicalUnit) -> None:
    _, _, options, opcode, action, allocation, _ = struct.unpack_from(">BBBBHIH", task.cdb)
    timeouts = _TIMEOUTS if options & _RCTD else b""
    if options & _OPTIONS == _ALL_COMMANDS:
        answer = _all_commands(task, unit, timeouts)
    else:
        answer = _one_command(task, unit, options & _OPTIONS, opcode, action, timeouts)
    task.respond(answer, allocation)


def _is_there(task: DeviceTask, unit: LogicalUnit, command: Command) -> bool:
    if not has(unit, command):
        return False
    return command.usage[:2] != _SET_PORT_GROUPS or primary.sets_port_groups(task, unit)


def _all_commands(task: DeviceTask, unit: LogicalUnit, timeouts: bytes) -> bytes:
    descriptors = b""
    for each in _LIST:
        if not _is_there(task, unit, each):
            continue
        flags = (_SERVACTV if each.action is not None else 0) | (_CTDP_ALL if timeouts else 0)
        descriptors += _DESCRIPTOR.pack(each.usage[0], each.action or 0, flags, each.length)
        descriptors += timeouts
    return struct.pack(">I", len(descriptors)) + descriptors


def _one_command(
    task: DeviceTask, unit: LogicalUnit, option: int, opcode: int, action: int, timeouts: bytes
) -> bytes:
    has_actions = opcode in _WITH_ACTIONS
    if option > _EITHER:
        raise invalid_field(2, 2)
    if (option == _ONE_OPCODE and has_actions) or (option == _ONE_ACTION and not has_actions):
        raise invalid_field(2, 2)
    found = COMMANDS.get(opcode << 8 | action if has_actions else opcode)
    if (
        found is None
        or not _is_there(task, unit, found)
        or (action > _ACTION_MASK and has_actions)  # its high bits would change the opcode
        or (action and not has_actions and option == _EITHER)
    ):
        return bytes((0, _NOT_SUPPORTED, 0, 0))
    support = _SUPPORTED | (_CTDP if timeouts else 0)
    return struct.pack(">BBH", 0, support, found.length) + found.usage + timeouts


def unknown_command(cdb: bytes) -> CheckCondition:
    if len(cdb) > 1 and cdb[0] in _RESERVE:
        return invalid_field(1, 4)  # the command is known, the service action is not
    return CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_OPERATION_CODE, field=0)
