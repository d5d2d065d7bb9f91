"""A peer's LUN loses what was not flushed, and comes back: what our initiator makes of it.

With a journal it is there again, and the next flush succeeds. Without one, or where another host
writes, too, the next flush fails, once: whatever the peer reports.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from iserblk.disk.seam import AsyncDisk
from iserblk.errors import IserblkError
from tests.support.endurance import disk_and_session
from tests.support.faces import read, write
from tests.support.until import until

KIB, MIB = 1 << 10, 1 << 20
SIZE = 4 * MIB  # of the part of the LUN that is used
PATIENCE_S = 300.0  # the machine may be emulated
Step = Callable[[], Awaitable[None]]


class Case(NamedTuple):
    """``options``: of the initiator. ``repaired``: what was lost is written again; else it is
    told. ``ran``: for interop-results."""

    options: Mapping[str, str]
    repaired: bool
    ran: str


CASES = {
    "journal": Case({}, True, "it is written again, and the next flush succeeds"),
    "journal=off": Case({"journal": "off"}, False, "without a journal the next flush fails, once"),
    "shared=yes": Case({"shared": "yes"}, False, "with shared=yes the next flush fails, once"),
}


class Medium:
    """The first ``size`` bytes of the file behind a peer's LUN. ``keep`` remembers what is in it,
    as if all that comes later were in a cache; ``lose`` puts that back, while the peer does not
    run."""

    def __init__(self, file: Path, size: int = SIZE) -> None:
        self._file = file
        self._size = size
        self._kept = b""

    def keep(self) -> None:
        self._kept = self.content()

    def lose(self) -> None:
        with self._file.open("r+b") as file:
            file.write(self._kept)

    def content(self) -> bytes:
        with self._file.open("rb") as file:
            return file.read(self._size)


# Offset and data of what is flushed, and of what is not: whole blocks and parts of them, some of
# them over what was flushed, and some not.
_FLUSHED = ((0, b"A" * 64 * KIB), (MIB, b"a" * 700))
_UNFLUSHED = (
    (4 * KIB, b"B" * 64 * KIB),
    (MIB + 100, b"b" * 9000),
    (3 * MIB, b"C" * MIB),
    (8 * KIB, b"D" * 512),
)


def _put(model: bytearray, changes: tuple[tuple[int, bytes], ...]) -> bytes:
    for offset, data in changes:
        model[offset : offset + len(data)] = data
    return bytes(model)


async def _write(disk: AsyncDisk, changes: tuple[tuple[int, bytes], ...]) -> None:
    for offset, data in changes:
        await write(disk, data, offset)


async def loses_its_cache(
    url: str, medium: Medium, outage: Step, case: Case, connections: int = 1
) -> None:
    """``outage``: the peer ends, ``medium.lose`` is called, and the peer comes back."""
    options = {"io-timeout": "120", "connections": str(connections), **case.options}
    async with disk_and_session("async", url, options) as (disk, session):

        async def all_there() -> None:
            with trio.fail_after(PATIENCE_S):
                await until(lambda: session.count == connections)

        await all_there()
        assert disk.info.write_cache
        model = bytearray(await read(disk, 0, SIZE))
        flushed = _put(model, _FLUSHED)
        await _write(disk, _FLUSHED)
        await disk.flush()
        medium.keep()
        written = _put(model, _UNFLUSHED)
        await _write(disk, _UNFLUSHED)
        await outage()
        there = await read(disk, 0, SIZE)
        if case.repaired:
            assert there == written, "reads go back in time"
            await disk.flush()
            assert medium.content()[:SIZE] == written
        else:
            assert there == flushed
            with pytest.raises(IserblkError, match="lost"):
                await disk.flush()
            await disk.flush()  # told once
            assert medium.content()[:SIZE] == flushed
        # Life goes on, with all connections.
        await all_there()
        await _write(disk, _UNFLUSHED)
        await disk.flush()
        assert await read(disk, 0, SIZE) == written
        assert session.counts.reconnects >= 1 and session.error is None


async def loses_nothing(url: str, medium: Medium, outage: Step, options: Mapping[str, str]) -> None:
    """``outage``: the peer ends and comes back with all that it was sent. With a journal, or where
    it is all there as ``shared=yes`` finds, no flush fails."""
    async with disk_and_session("async", url, {"io-timeout": "120", **options}) as (disk, session):
        model = bytearray(await read(disk, 0, SIZE))
        await _write(disk, _FLUSHED)
        await disk.flush()
        await _write(disk, _UNFLUSHED)
        written = _put(model, (*_FLUSHED, *_UNFLUSHED))
        await outage()
        assert await read(disk, 0, SIZE) == written
        await disk.flush()
        assert medium.content()[:SIZE] == written
        assert session.counts.reconnects >= 1 and session.error is None
