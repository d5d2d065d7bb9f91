"""LIO with a write cache that is lost: its first LUN, whose file is put back as it was flushed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from tests.lab.guest import lio
from tests.support import greeting
from tests.support.lost_cache import Medium

in_thread = trio.to_thread.run_sync


class Lossy:
    """As after a power failure of LIO's machine: all sessions end, what was not flushed is gone,
    and the portal group comes back. A new nexus hears of nothing."""

    def __init__(self) -> None:
        self.url = os.environ["LAB_URL"]
        self.medium = Medium(Path("/run/lab-luns/disk0"))

    async def lose(self) -> None:
        await in_thread(lio.disable)
        self.medium.lose()
        await in_thread(lio.enable)

    async def lose_nothing(self) -> None:
        await in_thread(lio.disable)
        await in_thread(lio.enable)

    async def heard(self, **options: object) -> list[list[str]]:
        """What a new nexus hears first, and one behind a loss."""
        told = []
        for suffix in ("-another", "-other"):
            name = os.environ["LAB_INITIATOR"] + suffix
            told.append(await greeting.greeting(self.url, name, **options))
            await self.lose()
            told.append(await greeting.greeting(self.url, name, **options))
        name = os.environ["LAB_INITIATOR"]
        told.append(await greeting.greeting(self.url, name, **options))
        return told


@contextmanager
def lossy(connections: int = 1) -> Iterator[Lossy]:
    """LIO says that it has a write cache, and takes so many connections of a session."""
    cache = lio.store() / "attrib/emulate_write_cache"
    cache.write_text("1")
    made = Lossy()
    made.medium.keep()
    try:
        with lio.connections(connections):
            yield made
    finally:
        cache.write_text("0")
