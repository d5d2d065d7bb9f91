"""The memory of an NBD server: bounded for each client and for all together, and used again."""

from __future__ import annotations

from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Final

from mypy_extensions import mypyc_attr

GUARANTEED: Final = 1 << 20  # bytes that each client may have whatever the others have; less where
GUARANTEED_ALL: Final = 256 << 20  # bytes of all clients would be more than this
GUARANTEED_REQUESTS: Final = 16  # that each client may have open whatever the others have
TOTAL_REQUESTS: Final = 16 << 10  # open, of all clients: each takes up to 5 KiB beside its data
CLIENT_BYTES = 5 << 20  # bytes of the requests of one client; a single one may be larger
TOTAL_BYTES: Final = 64 << 20  # bytes of all clients
KEPT_BYTES: Final = 16 << 20  # of buffers that no request uses
HEADROOM: Final = 64  # bytes in front of the data of a buffer, for the header of its reply
LEAST: Final = 4096  # bytes that the smallest buffer has behind its headroom
INTAKE: Final = 256 << 10  # bytes
_KEPT_INTAKES: Final = 4  # a client with small requests needs two


def size_of(length: int) -> int:
    """Bytes of the buffer for so many bytes of data: what such a request is counted with. At most
    a quarter more than ``length``, or LEAST."""
    if length <= LEAST:
        return LEAST
    step = 1 << ((length - 1).bit_length() - 3)
    return (length + step - 1) & -step


class Intake:
    """Memory that bytes of a client are received into, as they come. ``users``: requests whose data
    is in it. It occupies no more than what has been received: most clients use little of it."""

    __slots__ = ("data", "users", "view")

    def __init__(self) -> None:
        self.data = mmap(-1, INTAKE, MAP_PRIVATE | MAP_ANONYMOUS)
        self.view = memoryview(self.data)
        self.users = 0


@mypyc_attr(allow_interpreted_subclasses=True)  # of tests: a memory that is exhausted
class Memory:
    """Of one server, used by one thread. ``used``: bytes of requests of all clients. ``open``: how
    many requests these are. ``of_one``: bytes of the requests of one client; a single one may be
    larger. ``guaranteed``: bytes that each client may have in any case. ``kept``: bytes that are
    kept for requests to come, those that clients keep included. ``starved``: clients wait for what
    others have. ``given_back``: something was, since ``share_out`` has looked."""

    def __init__(self, total: int = TOTAL_BYTES) -> None:
        self.total = total
        self.used = 0
        self.open = 0
        self.of_one = CLIENT_BYTES
        self.guaranteed = GUARANTEED
        self.starved = False
        self.given_back = False
        self._waiting: dict[Callable[[], None], None] = {}  # oldest first
        self._buffers: dict[int, list[bytearray]] = {}
        self.kept = 0
        self._intakes: list[Intake] = []

    def guarantee(self, clients: int) -> None:
        """There are so many clients now."""
        self.guaranteed = min(GUARANTEED, GUARANTEED_ALL // max(1, clients))

    def fits(self, length: int) -> bool:
        return self.used + length <= self.total

    def wait(self, wake: Callable[[], None]) -> None:
        """``wake`` is called once, when bytes have been given back."""
        self._waiting[wake] = None
        self.starved = True

    def forget(self, wake: Callable[[], None]) -> None:
        self._waiting.pop(wake, None)
        self.starved = bool(self._waiting)

    def give_back(self, length: int) -> None:
        """So many bytes of ``used`` are free again; ``share_out`` is to follow."""
        self.used -= length
        self.given_back = True

    def share_out(self) -> None:
        """Where something was given back: clients that wait look again, in the order in which they
        came."""
        if self.starved and self.given_back:
            self.starved = self.given_back = False
            waiting, self._waiting = self._waiting, {}
            for wake in waiting:
                wake()

    def buffer(self, size: int) -> bytearray:
        """HEADROOM bytes, and ``size`` more, which is one that ``size_of`` returns. What is in it
        is what its last user left: the caller must fill what it sends."""
        free = self._buffers.get(size)
        if free:
            self.kept -= size
            return free.pop()
        return bytearray(HEADROOM + size)

    def keep(self, buffer: bytearray) -> None:
        """Take back a ``buffer`` that is not used any more."""
        size = len(buffer) - HEADROOM
        if self.kept + size > KEPT_BYTES:
            # Perhaps they are of sizes that no client asks for any more.
            self.kept -= sum(each * len(free) for each, free in self._buffers.items())
            self._buffers.clear()
        if self.keeps(size):
            self.kept += size
            self._buffers.setdefault(size, []).append(buffer)

    def keeps(self, length: int) -> bool:
        """There is room to keep a buffer of so many bytes."""
        return self.kept + length <= KEPT_BYTES

    def intake(self) -> Intake:
        return self._intakes.pop() if self._intakes else Intake()

    def keep_intake(self, intake: Intake) -> None:
        if len(self._intakes) < _KEPT_INTAKES:
            self._intakes.append(intake)
