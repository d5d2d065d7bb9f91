"""A medium below the page cache of a target's kernel."""

from __future__ import annotations

from random import Random

from tests.model.machine import PAGE, Media


class LingeringMedia(Media):
    """A file of Linux that could not be written: the page is taken for clean, so reads show it
    until the kernel needs its memory, and then what is on the medium. ``content``: that."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.shown = bytearray(size)

    def evict(self, chance: Random, share: float) -> bool:
        """Show ``share`` of the pages that are not on the medium no longer. Returns whether there
        were any."""
        some = False
        for at in range(0, self.size, PAGE):
            page = slice(at, at + PAGE)
            if self.shown[page] != self.content[page] and chance.random() < share:
                self.shown[page] = self.content[page]
                some = True
        return some

    def read_into(self, buffer: memoryview, offset: int, nowait: bool) -> bool:
        buffer[:] = self.shown[offset : offset + len(buffer)]
        return True

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        self.shown[offset : offset + len(data)] = data
        return super().write(data, offset, durable, nowait)

    def zero(self, offset: int, length: int) -> None:
        self.shown[offset : offset + length] = bytes(length)
        super().zero(offset, length)

    def punch(self, offset: int, length: int) -> None:
        self.shown[offset : offset + length] = bytes(length)
        super().punch(offset, length)
