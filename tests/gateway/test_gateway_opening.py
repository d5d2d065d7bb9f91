"""LUNs of other targets are opened for a target, or are given up meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from iserblk.gateway import opening
from iserblk.gateway.store import DiskStore
from iserblk.scsi import opcodes
from tests.support.fake_disk import AsyncFake, FakeDisk, lun_info
from tests.support.gateway import GATE, store_of

URL = "iser://127.0.0.1/iqn.2026-11.example:fake/0"


class Other:
    """Another target. ``logged_in``: sessions with it; ``at_last``: called when the last answer of
    a login has come."""

    def __init__(self) -> None:
        self.logged_in = 0
        self.at_last: Callable[[], None] = lambda: None

    @asynccontextmanager
    async def open_disks(
        self, _urls: Sequence[str], _options: Mapping[str, str]
    ) -> AsyncIterator[SimpleNamespace]:
        await trio.lowlevel.checkpoint()
        self.logged_in += 1
        self.at_last()
        try:
            yield SimpleNamespace(disks={"": AsyncFake(FakeDisk(lun_info(0)))})
        finally:
            self.logged_in -= 1


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Other:
    other = Other()
    monkeypatch.setattr(opening, "open_disks", other.open_disks)
    return other


async def test_one_that_is_closed_is_logged_out(other: Other) -> None:
    async with opening.open_gateways(GATE) as gateways:
        unit = await gateways.open([URL])
        assert unit.blocks == store_of(unit).size // 512 and other.logged_in == 1
        await trio.to_thread.run_sync(unit.close)
        assert not other.logged_in


async def test_one_that_is_given_up_when_it_is_there_is_logged_out(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled just when the last answer has come: the caller is told, and nothing is left."""
    stores: list[DiskStore] = []

    def noted(*arguments: Any) -> DiskStore:
        stores.append(DiskStore(*arguments))
        return stores[-1]

    monkeypatch.setattr(opening, "DiskStore", noted)
    scope = trio.CancelScope()
    other.at_last = scope.cancel
    told = trio.Event()

    async def open_one(gateways: opening.Gateways) -> None:
        with scope:
            await gateways.open([URL])
        told.set()

    async with opening.open_gateways(GATE) as gateways, trio.open_nursery() as nursery:
        nursery.start_soon(open_one, gateways)
        await trio.testing.wait_all_tasks_blocked()
        left = stores.copy(), other.logged_in, told.is_set()
        for store in stores:  # else it would wait for ever
            store.closing.set()
    assert left == ([], 0, True) and scope.cancelled_caught


async def test_the_unit_says_what_the_lun_says_now(other: Other) -> None:
    """After a refusal of the LUN, or a reconnection."""
    async with opening.open_gateways(GATE) as gateways:
        unit = await gateways.open([URL])
        told: list[frozenset[int]] = []
        server: Any = SimpleNamespace(renewed=lambda: told.append(unit.lacks))
        unit.server = server
        store = store_of(unit)
        assert isinstance(store.disk, AsyncFake)
        for change in ({}, {"can_trim": False}, {"can_trim": False}, {"read_only": True}):
            store.disk.info = lun_info(0, **change)
            store.look()
        assert [opcodes.UNMAP in lacks for lacks in told] == [True, False]
        assert unit.read_only and unit.traits is not None and unit.traits.gateway_to
        await trio.to_thread.run_sync(unit.close)
