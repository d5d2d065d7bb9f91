"""Data buffers of the target's sessions: memory is reused, and all sessions share a limit.

**One account.** ``DataBudget`` knows all memory that grows with what peers send or do not take: the
buffers in use, the free ones, and what is kept beside them. What one peer can make grow has a bound
of its own as well; the budget bounds the sum, and what the sessions of one address have of it. The
pool of a session is the session's part of the account.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from ctypes import addressof, c_ubyte
from mmap import MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

_SMALLEST: Final = 12  # 4 KiB (2^12): the most frequent size of requests
_LARGE: Final = 20  # 1 MiB
_HUGE_PAGE: Final = 1 << 21
_KEPT_BYTES: Final = 16 << 20  # of free buffers


GUARANTEED = 2 << 20  # bytes that each session may have whatever the others have
# As GUARANTEED, for data that comes unasked. It is less: whoever floods has many sessions, and a
# command that finds no memory is repeated.
UNASKED: Final = 512 << 10
BESIDE: Final = 128 << 10  # as GUARANTEED, for what is no data buffer: the first slots for answers
TOTAL: Final = 1 << 30  # bytes of all sessions together
# Of the limit: what all sessions may have of what is guaranteed to each of them, beyond the limit.
SET_ASIDE: Final = 4


def size_of(length: int) -> int:
    """Bytes of the buffer that ``BufferPool.take`` hands out for so many."""
    return 1 << max(_SMALLEST, (length - 1).bit_length())


class _Share:
    """What the sessions of one address have together, in bytes. ``pools``: how many they are."""

    __slots__ = ("held", "pools")

    def __init__(self) -> None:
        self.held = 0
        self.pools = 0


class DataBudget:
    """The limit on the memory that all sessions of a target have together. So peers that ask for
    much data and do not receive it cannot use up the machine's memory. Not thread-safe.

    ``used``: bytes that the pools have handed out. ``free``: bytes that they keep to be used again.
    ``beside``: bytes that connections hold otherwise: PDUs that came before their turn, answers
    that are not acknowledged, slots for answers. ``waiting``: callbacks of the connections that
    wait for room, and their addresses. ``keepers``: called when there is none: they let go of what
    is only kept for retransmission. ``share``: bytes of the sessions of one address. ``refused``:
    how often data that cannot wait has found no room.

    The sessions of one address ("": not known) have no more than half of the limit, so that they
    leave as much to the others. Data that comes unasked has no more than three quarters of either:
    commands that hold some and wait for the rest of their memory do not wait for each other alone.

    What is guaranteed to each session may lie beyond the limit, by a quarter of it (SET_ASIDE) for
    all together: where there are many sessions, each is guaranteed less.
    """

    def __init__(self, most: int = TOTAL) -> None:
        self._most = most
        self.share = most // 2
        self._aside = most // SET_ASIDE
        self.refused = 0
        self.used = 0
        self.free = 0
        self.beside = 0
        self.waiting: dict[Callable[[], None], str] = {}  # oldest first
        self.keepers: dict[Callable[[], None], None] = {}
        self._pools: dict[BufferPool, None] = {}
        self._shares: dict[str, _Share] = {}
        self._waking = False
        self._woken: Callable[[], None] | None = None  # whom ``wake`` is calling
        self._waits_on = False  # and that one waits again

    def fits(self, length: int, address: str = "") -> bool:
        total = self.used + self.beside + length
        if total <= self.share:
            return True  # whoever holds it leaves half
        return total <= self._most and self._has_share(length, address, self.share)

    def fits_unasked(self, length: int, address: str = "") -> bool:
        """As ``fits``, for data that comes unasked."""
        total = self.used + self.beside + length
        share = self.share - self.share // 4
        if total <= share:
            return True
        return total <= self._most - self._most // 4 and self._has_share(length, address, share)

    def guarantees(self, held: int, length: int, most: int) -> bool:
        """Whether a session that holds ``held`` bytes may have ``length`` more, because up to
        ``most`` are guaranteed to each."""
        of_each = self._aside // max(1, len(self._pools))
        return (
            held + length <= min(most, of_each)
            and self.used + self.beside + length <= self._most + self._aside
        )

    def _has_share(self, length: int, address: str, share: int) -> bool:
        return not address or self.used_by(address) + length <= share

    def used_by(self, address: str) -> int:
        """Bytes that the sessions of an address have."""
        share = self._shares.get(address)
        return share.held if share is not None else 0

    @property
    def most(self) -> int:
        """Bytes of all sessions together."""
        return self._most

    def held_by_address(self) -> dict[str, int]:
        """Bytes that the sessions of each address hold, free buffers left out; none that hold
        nothing."""
        return {address: share.held for address, share in self._shares.items() if share.held}

    def largest(self) -> int:
        """Bytes of the session that holds most, free buffers left out."""
        largest = 0
        for pool in self._pools:
            largest = max(largest, pool.used + pool.beside)
        return largest

    def admits(self, length: int, address: str) -> bool:
        """As ``fits``; where that helps, what is kept for retransmission gives way."""
        if self.fits(length, address):
            return True
        if self.used + self.beside + length <= self._most:
            return False  # the address has its share
        self.press()
        return self.fits(length, address)

    def press(self) -> None:
        """Memory is wanted."""
        for let_go in list(self.keepers):
            let_go()

    def open(self, pool: BufferPool) -> _Share:
        """Returns what is known of its address."""
        self._pools[pool] = None
        share = self._shares.setdefault(pool.address, _Share())
        share.pools += 1
        return share

    def close(self, pool: BufferPool) -> None:
        """Does nothing for a pool that is closed."""
        if pool not in self._pools:
            return
        del self._pools[pool]
        share = self._shares[pool.address]
        share.pools -= 1
        if not share.pools:
            del self._shares[pool.address]

    def allocate(self, size: int) -> None:
        """A pool is about to take ``size`` bytes from the system: if there is too much in all, free
        buffers of all pools go back there."""
        if self.free and self.used + self.free + self.beside + size > self._most:
            for pool in self._pools:
                pool.trim()

    def wait(self, wake: Callable[[], None], address: str = "") -> None:
        """Have ``wake`` called once, when there may be room for a session of ``address``. Whoever
        waits already keeps its place."""
        if wake == self._woken:
            self._waits_on = True
        else:
            self.waiting[wake] = address

    def forget(self, wake: Callable[[], None]) -> None:
        self.waiting.pop(wake, None)

    def wake(self) -> None:
        """Call the callbacks that wait, oldest first, while there is room. If one finds too little,
        the others of its address are not called: many that wait make no call of this long."""
        if self._waking:
            return
        self._waking = True
        try:
            blocked: set[str] = set()
            for wake, address in list(self.waiting.items()):
                if self.used + self.beside >= self._most:
                    return
                if wake not in self.waiting or address in blocked:
                    continue
                self._woken, self._waits_on = wake, False
                wake()
                if self._waits_on:
                    blocked.add(address)
                else:
                    self.forget(wake)
        finally:
            self._waking = False
            self._woken = None


def _large_buffers(size: int) -> list[memoryview]:
    """Buffers of ``size`` bytes, a power of two, that fill huge pages, where the system has them.

    The MiB of a large read or write is gone through several times, and each time the processor
    would have to look up 256 pages: in a virtual machine that is a sixteenth of the target's time
    (1 MiB reads at depth 8)."""
    length = max(size, _HUGE_PAGE)
    # Older kernels do not align it by themselves. What is not touched costs nothing.
    memory = mmap(-1, length + _HUGE_PAGE, MAP_PRIVATE | MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(MADV_HUGEPAGE)
    start = -addressof(c_ubyte.from_buffer(memory)) % _HUGE_PAGE
    # Each is an object of its own, which ``obj`` of all its views names. The mapping lives as long
    # as the last of them.
    return [
        memoryview((c_ubyte * size).from_buffer(memory, at)).cast("B")
        for at in range(start, start + length, size)
    ]


class BufferPool:
    """Hands out memoryviews of exact length over reused memory. Not thread-safe.

    ``used``: bytes handed out and not given back. ``beside``: bytes that the session holds
    otherwise. A buffer still holds what its last user left: fill it before you send it.
    """

    def __init__(self, budget: DataBudget, address: str = "") -> None:
        """``address``: of the peer, which the budget gives a share."""
        self._budget = budget
        self.address = address
        self._free: list[list[memoryview]] = [[] for _ in range(40)]
        self._kept = 0
        self.used = 0
        self.beside = 0
        self._share = budget.open(self)

    def take(self, length: int) -> memoryview:
        """Hand out a writable memoryview of ``length`` bytes (at least 1)."""
        order = max(_SMALLEST, (length - 1).bit_length())
        size = 1 << order
        budget = self._budget
        free = self._free[order]
        if not free:
            budget.allocate(size)
            if order >= _LARGE:
                free += _large_buffers(size)
                self._kept += size * len(free)
                budget.free += size * len(free)
        self.used += size
        self._share.held += size
        budget.used += size
        if free:
            self._kept -= size
            budget.free -= size
            whole = free.pop()
        else:
            whole = memoryview(bytearray(size))
        return whole if length == size else whole[:length]

    def give(self, buffer: memoryview) -> None:
        """Take back a buffer of ``take``, which the caller no longer uses."""
        memory = buffer.obj
        size = len(memory)  # type: ignore[arg-type]  # a bytearray, or an array of bytes
        whole = buffer
        if len(buffer) != size:
            whole = memoryview(memory).cast("B")
        self.used -= size
        self._share.held -= size
        self._budget.used -= size
        if self._kept + size <= _KEPT_BYTES:
            self._kept += size
            self._budget.free += size
            self._free[size.bit_length() - 1].append(whole)

    def grow(self, buffer: memoryview | None, filled: int, length: int) -> memoryview:
        """Replace ``buffer`` by a buffer of ``length`` bytes; the first ``filled`` are copied."""
        larger = self.take(length)
        if buffer is not None:
            larger[:filled] = buffer[:filled]
            self.give(buffer)
        return larger

    def trim(self) -> None:
        """Keep no free buffers."""
        if not self._kept:
            return
        for free in self._free:
            free.clear()
        self._budget.free -= self._kept
        self._kept = 0

    def may_hold(self, length: int) -> bool:
        """Whether the session may hold so many bytes more beside data buffers."""
        return self._budget.guarantees(self.beside, length, BESIDE) or self._budget.admits(
            length, self.address
        )

    def account(self, length: int) -> None:
        """The session holds so many bytes more beside data buffers; less, if it is negative."""
        self.beside += length
        self._share.held += length
        self._budget.beside += length

    def close(self) -> None:
        """Give all buffers back to the budget. No thread may use any of them any more."""
        self._budget.used -= self.used
        self._share.held -= self.used
        self.used = 0
        self.trim()
        self._budget.close(self)
        self._budget.wake()
