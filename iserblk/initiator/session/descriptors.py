"""The descriptors of several connections as one, for a driver that polls only one."""

from __future__ import annotations

from contextlib import suppress

from iserblk.initiator.session.connection import Connection
from iserblk.loop.gathering import Gathering


class Descriptors:
    """A descriptor, which is readable while a connection has something to do."""

    def __init__(self) -> None:
        self._gathering = Gathering()
        self._writing: dict[int, bool] = {}  # by descriptor

    def fileno(self) -> int:
        return self._gathering.fileno()

    def add(self, connection: Connection) -> None:
        fd = connection.datamover.fileno()
        if fd >= 0 and fd not in self._writing and not self._gathering.closed:
            self._gathering.add(fd)
            self._writing[fd] = False
        self.update(connection)

    def update(self, connection: Connection) -> None:
        """Wait for room in the socket while the connection has bytes that it did not take."""
        fd = connection.datamover.fileno()
        if fd not in self._writing:
            return
        wants = connection.datamover.wants_write()
        if wants is not self._writing[fd]:
            self._gathering.watch_output(fd, wants)
            self._writing[fd] = wants

    def remove(self, connection: Connection) -> None:
        """The connection is about to be terminated."""
        fd = connection.datamover.fileno()
        if self._writing.pop(fd, None) is not None:
            with suppress(OSError):  # it may be closed
                self._gathering.remove(fd)

    def close(self) -> None:
        self._writing.clear()
        self._gathering.close()
