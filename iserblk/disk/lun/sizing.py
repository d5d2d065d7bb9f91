"""The size of a LUN, which may change while it is in use."""

from __future__ import annotations

import logging

from iserblk.commands.command import Command, Operation
from iserblk.commands.running import command
from iserblk.commands.session import CommandSession
from iserblk.scsi import capacity, cdb
from iserblk.scsi import sense as sense_data

log = logging.getLogger(__name__)


class Sizing:
    """The size of one LUN. ``changed``: the target has reported another capacity that was not read
    yet. ``told``: bytes that the LUN has told, of which not all may be used: another size makes it
    doubtful which LUN it is."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.changed = False
        self.told = size
        self._size = size  # bytes that are used
        self._before = size  # the largest that it was
        self._untold = False  # a warning has told that the capacity cannot be told

    def hear(self, slot: Command) -> None:
        """A command of this LUN ended with ``slot.sense``."""
        sense = sense_data.decode(slot.sense)
        if sense.is_unit_attention and sense.code == sense_data.CAPACITY_CHANGED:
            self.changed = True

    def ask(
        self, session: CommandSession, lun: bytes, block: int, long_cdbs: bool, deadline: float
    ) -> Operation[int]:
        """Send READ CAPACITY; returns the size in bytes. An error leaves ``changed`` as it was.
        Where the LUN has become too large for READ CAPACITY(10), the size is that told before."""
        before, self.changed = self.changed, False
        answer = memoryview(bytearray(32 if long_cdbs else 8))
        try:
            yield from command(
                session,
                lun,
                cdb.read_capacity16(32) if long_cdbs else cdb.read_capacity10(),
                self.name,
                data_in=answer,
                short_ok=long_cdbs,
                deadline=deadline,
            )
            decode = capacity.decode16 if long_cdbs else capacity.decode10
            return decode(answer).blocks * block
        except capacity.UntoldCapacity as error:
            if not self._untold:  # it is asked again and again
                self._untold = True
                log.warning("%s: %s; %d bytes of it are used", self.name, error, self._size)
            return self.told
        except BaseException:
            self.changed = self.changed or before
            raise

    def take(self, size: int) -> None:
        if size > self._size:
            log.info("%s: the LUN has grown from %d to %d bytes", self.name, self._size, size)
        elif size < self._size:
            log.error(
                "%s: the LUN has SHRUNK from %d to %d bytes; what was behind is out of reach",
                self.name,
                self._size,
                size,
            )
        self._before = max(self._before, size)
        self._size = size

    def words(self) -> str:
        """The size for messages: ``1024 bytes``, and what it was before the LUN shrank."""
        was = f" (it had {self._before} before it shrank)" if self._before > self._size else ""
        return f"{self._size} bytes{was}"
