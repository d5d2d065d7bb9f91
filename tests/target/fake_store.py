"""A store in a bytearray that records its calls, and fails when told to."""

from __future__ import annotations

from iserblk.target.store.store import Extent, OnLoss, no_loss


class FakeStore:
    """Implements Store. ``calls``: (name, …) of everything but reads. ``failure``: raised by the
    next call and all after it. ``cached``: False makes a read with ``nowait`` give up."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.on_loss: OnLoss = no_loss
        self.content = bytearray(size)
        self.calls: list[tuple[object, ...]] = []
        self.failure: OSError | None = None
        self.cached = True
        self.holes: list[Extent] | None = None
        self.occupied: tuple[int, int] | None = None

    def _called(self, *call: object) -> None:
        if self.failure is not None:
            raise self.failure
        self.calls.append(call)

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        if self.failure is not None:
            raise self.failure
        assert offset >= 0 and offset + len(buffer) <= self.size
        if nowait and not self.cached:
            return False
        buffer[:] = self.content[offset : offset + len(buffer)]
        return True

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        assert offset >= 0 and offset + len(data) <= self.size
        self._called("write", offset, len(data), durable)
        self.content[offset : offset + len(data)] = data
        return True

    def flush(self) -> None:
        self._called("flush")

    def unmap(self, offset: int, length: int) -> None:
        self.punch(offset, length)

    def punch(self, offset: int, length: int) -> None:
        assert length > 0 and offset + length <= self.size
        self._called("punch", offset, length)
        self.content[offset : offset + length] = bytes(length)

    def zero(self, offset: int, length: int) -> None:
        assert length > 0 and offset + length <= self.size
        self._called("zero", offset, length)
        self.content[offset : offset + length] = bytes(length)

    def extents(self, offset: int, length: int, limit: int) -> list[Extent]:
        self._called("extents", offset, length)
        return [(offset, length, True)] if self.holes is None else self.holes[:limit]

    def usage(self) -> tuple[int, int] | None:
        return self.occupied

    def measure(self) -> int:
        return self.size

    def prefetch(self, offset: int, length: int) -> None:
        self._called("prefetch", offset, length)

    def close(self) -> None:
        self._called("close")
