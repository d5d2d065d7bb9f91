"""The receive buffers of a queue pair.

The device has as many as the caller has posted; spare buffers replace those whose messages the
caller is still reading. Threads: the queue pair calls all of it under its lock.
"""

from __future__ import annotations

from iserblk.rcap.verbs import api
from iserblk.rcap.verbs.engine import Engine
from iserblk.rcap.verbs.pool import Register, Strip

RECEIVE = 1 << 62  # bit in the number of a work request: it is a receive
PIECE_OVERHEAD = 64


class Inbox:
    """The receives and received messages of one queue pair."""

    def __init__(
        self, engine: Engine, register: Register, *, size: int, room: int, spare: int
    ) -> None:
        """``size``: bytes of each buffer. ``room``: receives that the device takes. ``spare``:
        messages that the caller reads at a time, at most; so many buffers are added."""
        self._engine = engine
        self._size = size
        self._room = room
        self._spare = spare
        self._memory = Strip(register, api.LOCAL_WRITE, 0)
        self._buffers: list[tuple[memoryview, int, int]] = []  # view, address, key
        self._free: list[int] = []
        self._lent: list[int] = []
        self._at_device = 0
        self._owed = 0  # receives that the caller posted, but the device had no room for
        self._advance = 0  # receives that were posted before the caller posted them
        self.received = 0

    def begin(self, count: int) -> None:
        """Post ``count`` receives in advance: the first ``count`` of ``add`` are these. Raises
        OSError."""
        self._give(count)
        self._advance = count

    def add(self, count: int) -> None:
        """Post ``count`` more receives. Raises OSError."""
        ahead = min(count, self._advance)
        self._advance -= ahead
        self._give(count - ahead)

    def _give(self, count: int) -> None:
        count += self._owed
        now = min(count, self._room - self._at_device)
        self._owed = count - now
        if now <= 0:
            return
        free, buffers = self._free, self._buffers
        while len(free) < now:
            expected = (now - len(free) + self._spare) * (self._size + PIECE_OVERHEAD)
            buffers.append(self._memory.cut(self._size, expected))
            free.append(len(buffers) - 1)
        for _ in range(now):
            index = free.pop()
            _, address, key = buffers[index]
            self._engine.receive(RECEIVE | index, address, self._size, key)
        self._engine.post_receives()
        self._at_device += now

    def recycle(self) -> None:
        """Reuse the buffers of all messages taken so far: the caller no longer reads them."""
        if self._lent:
            self._free += self._lent
            self._lent.clear()

    def settle(self) -> None:
        """Post receives that the device had no room for, as far as it has now. Raises OSError."""
        if self._owed:
            self._give(0)

    def take(self, number: int, count: int) -> memoryview:
        """The message of ``count`` bytes that completed as ``number``; readable until
        ``recycle``."""
        index = number ^ RECEIVE
        self._lent.append(index)
        self._at_device -= 1
        self.received += 1
        return self._buffers[index][0][:count]

    def close(self) -> None:
        self._buffers.clear()
        self._memory.close()
