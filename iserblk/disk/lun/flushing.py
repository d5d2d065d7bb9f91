"""Flushing: what the caller asks for, and what a full journal makes necessary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iserblk.disk.durability.promise import Flushed
from iserblk.errors import IserblkError
from iserblk.initiator.commands import check_time, command
from iserblk.initiator.session.slots import Operation
from iserblk.scsi import cdb

if TYPE_CHECKING:
    from iserblk.disk.lun.operations import DiskCore

AGAIN_S = 0.02  # between two looks whether a connection that is to be replaced has ended


def flush(core: DiskCore, deadline: float) -> Operation[None]:
    """SYNCHRONIZE CACHE of the whole LUN, where it has a write cache. Raises IserblkError also
    when the target reports that writes since the last flush were lost, and are not kept."""
    pack = cdb.synchronize_cache16 if core.geometry.long_cdbs else cdb.synchronize_cache10
    while True:
        token = core.durability.begin_flush()
        done = False
        try:
            # (Where nothing can be written there may be something that was, before.)
            if core.durability.volatile and (token.needed or not core.info.read_only):
                yield from command(
                    core.session, core.lun, pack(0, 0), core.info.name, deadline=deadline
                )
            done = True
        finally:
            outcome = core.durability.end_flush(token, done)
        if outcome is Flushed.DONE:
            return
        if outcome is Flushed.LOST:
            raise IserblkError(
                f"{core.info.name}: writes since the last flush were lost at the target; "
                "its log may say why"
            )
        yield AGAIN_S  # until the connection is found lost; then it waits for a new one
        check_time(core.session, deadline, core.info.name)


def make_room(core: DiskCore, length: int, deadline: float) -> Operation[None]:
    """Flush when the journal has no room for a write of so many bytes. One does, the others wait
    for it; nobody holds a slot or a range meanwhile."""
    journal = core.durability.journal
    while journal is not None and journal.full(length):
        waiter = core.session.new_waiter()
        check_time(core.session, deadline, core.info.name)
        if journal.claim_flush(waiter):
            try:
                yield from flush(core, deadline)
            finally:
                journal.end_flush()
        while waiter.pending:
            yield waiter
