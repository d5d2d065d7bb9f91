"""LOG SENSE: which log pages there are, and how much space the LUN occupies."""

from __future__ import annotations

from iserblk.scsi import log
from iserblk.target.scsi.ended import invalid_field
from iserblk.target.scsi.task import DeviceTask
from iserblk.target.scsi.unit import THRESHOLD_SET, LogicalUnit
from iserblk.target.seam import DATA_IN

_PAGES = (
    (log.SUPPORTED_PAGES, 0),
    (log.SUPPORTED_PAGES, log.ALL_SUBPAGES),
    (log.LOGICAL_BLOCK_PROVISIONING, 0),
)
_MOST = 64  # bytes: no page here is longer
_LAST_PARAMETER = log.USED_RESOURCE


def begin_log_sense(task: DeviceTask, unit: LogicalUnit) -> None:
    _, _, control_page, subpage, pointer, allocation = log.CDB.unpack_from(task.cdb)
    control, page = control_page >> 6, control_page & 0x3F
    if (page, subpage) not in _PAGES:
        raise invalid_field(3 if any(page == code for code, _ in _PAGES) else 2, None)
    if page == log.SUPPORTED_PAGES:
        if pointer:
            raise invalid_field(5)
        if subpage:
            task.respond(log.encode_supported_subpages(_PAGES), allocation)
        else:
            codes = sorted({code for code, _ in _PAGES})
            task.respond(log.encode_supported(codes), allocation)
        return
    if control != log.PC_CUMULATIVE:
        raise invalid_field(2, 7)  # the counts have no thresholds or defaults of their own
    if pointer > _LAST_PARAMETER:
        raise invalid_field(5)
    if not allocation:
        return
    task.unit = unit
    task.offset = pointer
    task.direction = DATA_IN
    task.length = min(allocation, _MOST)
    task.may_block = True
    task.execute = _provisioning


def _provisioning(task: DeviceTask, buffer: memoryview, nowait: bool) -> bool:
    """Execute LOG SENSE for page 0Ch; ``offset`` is the parameter pointer. The store has the space
    that is free in its file system in common with others."""
    usage = task.unit.store.usage()
    resources = []
    if usage is not None:
        used, available = usage
        resources = [
            (log.AVAILABLE_RESOURCE, available // THRESHOLD_SET, log.SCOPE_SHARED),
            (log.USED_RESOURCE, -(-used // THRESHOLD_SET), log.SCOPE_DEDICATED),
        ]
    answer = log.encode_provisioning(each for each in resources if each[0] >= task.offset)
    task.transferred = min(len(answer), task.length)
    buffer[: task.transferred] = answer[: task.transferred]
    return True
