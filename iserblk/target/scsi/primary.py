"""SPC commands: MODE SENSE and MODE SELECT, reservations of both kinds, target port groups,
SEND DIAGNOSTIC, START STOP UNIT, and commands that do nothing on a file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from iserblk.errors import RemoteProtocolError
from iserblk.scsi import alua, mode, opcodes, sense
from iserblk.scsi import reservations as pr
from iserblk.scsi.cdb import DBD, PF, SP
from iserblk.target.scsi.block import begin_flush
from iserblk.target.scsi.ended import CheckCondition, invalid_field, wrong_parameter
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.seam import DATA_OUT, NexusName

log = logging.getLogger(__name__)

# PREEMPT AND ABORT fails if a write of a preempted nexus takes longer: that write may still land.
PREEMPT_TIMEOUT_S = 60.0

_MOST_PORT_GROUPS = 65536  # bytes of the parameter list of SET TARGET PORT GROUPS
# What it may ask for: not TRANSITIONING (SPC-4, SET TARGET PORT GROUPS).
_SETTABLE_STATES = frozenset(
    (
        alua.ACTIVE_OPTIMIZED,
        alua.ACTIVE_NON_OPTIMIZED,
        alua.STANDBY,
        alua.UNAVAILABLE,
        alua.OFFLINE,
    )
)
_LLBAA = 0x10  # MODE SENSE(10): the initiator accepts a long block descriptor
_START = 0x01
_NO_FLUSH = 0x04
_SELF_TEST = 0x04
_ALL_SUBPAGES = 0xFF


def begin_nothing(task: DeviceTask, unit: LogicalUnit) -> None:
    """TEST UNIT READY, and PREVENT ALLOW MEDIUM REMOVAL: the medium cannot be removed anyway."""


def begin_report_port_groups(task: DeviceTask, unit: LogicalUnit) -> None:
    """REPORT TARGET PORT GROUPS."""
    task.respond(task.nexus.port.ports.report(), int.from_bytes(task.cdb[6:10], "big"))


def sets_port_groups(task: DeviceTask, unit: LogicalUnit) -> bool:
    """Whether SET TARGET PORT GROUPS is there for the task's nexus: some group is settable, and it
    has access to all LUNs, as it would set the states of all."""
    return bool(unit.server.tpgs(task.nexus) & alua.TPGS_EXPLICIT)


def begin_set_port_groups(task: DeviceTask, unit: LogicalUnit) -> None:
    """SET TARGET PORT GROUPS."""
    if not sets_port_groups(task, unit):
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_OPERATION_CODE, field=0)
    length = int.from_bytes(task.cdb[6:10], "big")
    if length > _MOST_PORT_GROUPS:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)
    if not length:
        return
    task.unit = unit
    task.direction = DATA_OUT
    task.length = length
    task.execute = _set_port_groups


def _set_port_groups(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Execute SET TARGET PORT GROUPS: check all of the list, then set the states at once. Only the
    thread that begins commands gets here, so a command begins either before or after it."""
    ports, name = task.nexus.port.ports, task.nexus.name.initiator.name
    if not sets_port_groups(task, task.unit):  # any more: its Data-Out took a while
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.INVALID_OPERATION_CODE, field=0)
    try:
        groups = alua.decode_set(buffer)
    except RemoteProtocolError:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR) from None
    wanted: dict[int, int] = {}
    for index, (tag, state) in enumerate(groups):
        at = 4 + 4 * index
        port = ports.by_tag.get(tag)
        if state not in _SETTABLE_STATES:
            raise wrong_parameter(at, 3)
        if port is None or tag in wanted:
            raise wrong_parameter(at + 2)
        if not port.settable and state != port.state:
            log.warning("%s: the access state of portal group %d is not settable", name, tag)
            raise wrong_parameter(at + 2)
        wanted[tag] = state
    for tag, state in wanted.items():
        log.info("%s: portal group %d: %s", name, tag, alua.state_words(state))
    task.unit.server.set_port_states(task.nexus, wanted)
    return True


def begin_start_stop(task: DeviceTask, unit: LogicalUnit) -> None:
    """START STOP UNIT: a stop only flushes, as other initiators may use the file."""
    if not task.cdb[4] & (_START | _NO_FLUSH):
        begin_flush(task, unit)


def _pages(unit: LogicalUnit, cdb: bytes) -> bytes:
    control, page, subpage = cdb[2] >> 6, cdb[2] & 0x3F, cdb[3]
    if control == mode.PC_SAVED and not unit.can_save_modes:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.SAVING_NOT_SUPPORTED)
    cached = unit.write_cache
    if control == mode.PC_DEFAULT:
        cached = unit.default_write_cache
    elif control == mode.PC_SAVED:
        cached = unit.saved_write_cache
    pages = [
        each
        for each in _all_pages(unit, cached)
        if page in (mode.ALL, each[0] & mode.PAGE_CODE)
        and subpage in (_ALL_SUBPAGES, mode.subpage(each))
    ]
    if not pages:
        raise invalid_field(3) if _has_page(unit, page) else invalid_field(2, 5)
    if control == mode.PC_CHANGEABLE:
        pages = [mode.changeable(each) for each in pages]
    if unit.can_save_modes:
        pages = [mode.savable(each) for each in pages]
    return b"".join(pages)


def _has_page(unit: LogicalUnit, page: int) -> bool:
    if page == mode.ALL:
        return True
    return any(page == each[0] & mode.PAGE_CODE for each in _all_pages(unit, True))


def _all_pages(unit: LogicalUnit, write_cache: bool) -> list[bytes]:
    """The mode pages, in the order of MODE SENSE."""
    return [
        mode.error_recovery_page(bool(unit.soft_threshold)),
        mode.caching_page(write_cache),
        mode.control_page(unit.tas),
        mode.exceptions_page(),
        mode.provisioning_page(unit.soft_threshold),
    ]


def _specific(unit: LogicalUnit) -> int:
    return mode.DPOFUA | (mode.WP if unit.read_only else 0)


def begin_mode_sense6(task: DeviceTask, unit: LogicalUnit) -> None:
    cdb = task.cdb
    pages = _pages(unit, cdb)
    descriptor = b"" if cdb[1] & DBD else mode.short_descriptor(unit.blocks, unit.block)
    task.respond(mode.encode_sense6(_specific(unit), descriptor, pages), cdb[4])


def begin_mode_sense10(task: DeviceTask, unit: LogicalUnit) -> None:
    cdb = task.cdb
    pages = _pages(unit, cdb)
    if cdb[1] & DBD:
        descriptor = b""
    elif cdb[1] & _LLBAA:
        descriptor = mode.long_descriptor(unit.blocks, unit.block)
    else:
        descriptor = mode.short_descriptor(unit.blocks, unit.block)
    answer = mode.encode_sense10(_specific(unit), descriptor, pages)
    task.respond(answer, int.from_bytes(cdb[7:9], "big"))


def begin_mode_select6(task: DeviceTask, unit: LogicalUnit) -> None:
    _begin_mode_select(task, unit, task.cdb[4])


def begin_mode_select10(task: DeviceTask, unit: LogicalUnit) -> None:
    _begin_mode_select(task, unit, int.from_bytes(task.cdb[7:9], "big"))


def _begin_mode_select(task: DeviceTask, unit: LogicalUnit, length: int) -> None:
    if task.cdb[1] & SP and not unit.can_save_modes:
        raise invalid_field(1, 0)
    if not length:
        return
    if not task.cdb[1] & PF:
        raise invalid_field(1, 4)
    task.unit = unit
    task.direction = DATA_OUT
    task.length = length
    task.execute = _mode_select


def _mode_select(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Execute MODE SELECT: check all of the list, then change WCE, which is all that can be
    changed. Only the thread that begins commands gets here, so a command begins either before or
    after the change. To turn the cache off, which needs a flush, and to save it goes on in a
    thread."""
    unit = task.unit
    long_header = task.cdb[0] == opcodes.MODE_SELECT_10
    try:
        selected = mode.decode_select(buffer, long_header)
    except RemoteProtocolError:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR) from None
    # A block descriptor may repeat the block size and the capacity, or leave the capacity as it is.
    if selected.block_size not in (None, unit.block):
        raise wrong_parameter(8 if long_header else 4)
    if selected.blocks not in (None, 0, unit.blocks, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF):
        raise wrong_parameter(8 if long_header else 4)
    present = not unit.write_through  # also while the cache is being turned off
    write_cache = present
    pages = _all_pages(unit, unit.write_cache)
    for at, page in selected.pages:
        head = mode.head_length(page)
        current = next((each for each in pages if mode.is_same_page(each, page)), None)
        if current is None:
            raise wrong_parameter(at)
        if len(page) != len(current):
            raise wrong_parameter(at + head // 2)
        free = mode.changeable(current)
        for index in range(head, len(page)):
            if (page[index] ^ current[index]) & ~free[index]:
                raise wrong_parameter(at + index)
        if page[0] == mode.CACHING:
            write_cache = mode.has_write_cache(page)
    off = present and not write_cache
    save = unit.write_cache_to_save(write_cache) if task.cdb[1] & SP else None

    def finish(_task: DeviceTask, _buffer: memoryview, nowait: bool) -> bool:
        if nowait:
            return False
        if off:
            unit.drain_cache(task.nexus)
        if save is not None:
            _save(save)
        return True

    if write_cache != present:
        _change_cache(task, unit, write_cache)
    if not off and save is None:
        return True
    task.execute = finish
    return finish(task, buffer, nowait)


def _change_cache(task: DeviceTask, unit: LogicalUnit, write_cache: bool) -> None:
    """Turn the write cache on, or begin to turn it off."""
    log.info("%s: write cache %s", task.nexus.name.initiator.name, "on" if write_cache else "off")
    if write_cache:
        told = unit.write_cache
        unit.write_cache = True
        if not told:
            unit.server.tell_others(task.nexus, sense.MODE_PARAMETERS_CHANGED)
    else:
        unit.write_through = True


def begin_send_diagnostic(task: DeviceTask, unit: LogicalUnit) -> None:
    """SEND DIAGNOSTIC: the default self-test reads the first and the last block. Without SELFTEST
    there is nothing to do, as there are no diagnostic pages. DEVOFFL and UNITOFFL permit effects
    that this test has not."""
    if task.cdb[1] & _SELF_TEST:
        task.unit = unit
        task.may_block = True
        task.execute = _test_itself


def _test_itself(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    unit = task.unit
    block = memoryview(bytearray(unit.block))
    try:
        for lba in (0, unit.blocks - 1):
            unit.store.read_into(block, lba * unit.block, False)
    except OSError as error:
        log.warning("self-test: %s", error)
        raise CheckCondition(sense.HARDWARE_ERROR, sense.FAILED_SELF_TEST) from None
    return True


# -- reservations ----------------------------------------------------------------------------------


def begin_reserve6(task: DeviceTask, unit: LogicalUnit) -> None:
    unit.reservations.reserve(task.nexus)


def begin_release6(task: DeviceTask, unit: LogicalUnit) -> None:
    unit.reservations.release(task.nexus)


# -- persistent reservations -----------------------------------------------------------------------


def begin_reserve_in(task: DeviceTask, unit: LogicalUnit) -> None:
    _, action, allocation = pr.IN_CDB.unpack_from(task.cdb)
    task.respond(unit.reservations.answer(action), allocation)


def _save(save: Callable[[], None]) -> None:
    try:
        save()
    except OSError as error:
        # What has changed holds, until the target ends.
        log.error("the state of a LUN cannot be saved: %s", error)
        raise CheckCondition(sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE) from None


def begin_reserve_out(task: DeviceTask, unit: LogicalUnit) -> None:
    length = int.from_bytes(task.cdb[5:9], "big")
    if not pr.PARAMETER_LENGTH <= length <= pr.MAXIMUM_PARAMETER_LENGTH:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR)
    task.unit = unit
    task.direction = DATA_OUT
    task.length = length
    task.execute = _reserve_out


def _reserve_out(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Change the reservations. Must not block: only the thread that begins commands may change
    them. The wait for tasks of preempted nexuses follows in a thread."""
    unit, name = task.unit, task.nexus.name
    _, action, scope_type, _ = pr.OUT_CDB.unpack_from(task.cdb)
    victims: list[NexusName] = []
    try:
        if action == pr.REGISTER_AND_MOVE:
            unit.reservations.move(name, pr.decode_move_parameters(buffer))
        else:
            parameters = pr.decode_parameters(buffer)
            victims = unit.reservations.change(name, action, scope_type, parameters)
    except RemoteProtocolError:
        raise CheckCondition(sense.ILLEGAL_REQUEST, sense.PARAMETER_LIST_LENGTH_ERROR) from None
    log.info("%s: %s", name.initiator.name, opcodes.name(task.cdb))
    save = unit.reservations_to_save()
    ended = threading.Semaphore(0)
    running = unit.server.end_tasks(victims, ended.release) if victims else 0
    if not running and save is None:
        return True

    def wait(_task: DeviceTask, _buffer: memoryview, nowait: bool) -> bool:
        """Save, and wait for tasks of preempted nexuses: none may write to the medium after
        GOOD."""
        if nowait:
            return False
        if save is not None:
            _save(save)
        for _ in range(running):
            if not ended.acquire(timeout=PREEMPT_TIMEOUT_S):
                raise CheckCondition(sense.HARDWARE_ERROR, sense.INTERNAL_TARGET_FAILURE)
        return True

    task.execute = wait
    return wait(task, buffer, nowait)
