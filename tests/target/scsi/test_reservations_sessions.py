"""Persistent reservations between sessions: our own initiator, raw commands, both transports."""

from __future__ import annotations

import threading

import pytest
import trio

from iserblk.errors import IserblkError, ReservationConflict, TransportError
from iserblk.scsi import reservations as pr
from tests.support.sessions import PATIENCE_S, hosts
from tests.target.fake_store import FakeStore

A, B = 0xA, 0xB
EA_RO = pr.EXCLUSIVE_ACCESS_REGISTRANTS
NEW, OLD = b"n" * 512, b"o" * 512


class GatedStore(FakeStore):
    """Durable writes wait at ``gate``, in their thread."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()

    def write(self, data: memoryview, offset: int, durable: bool, nowait: bool) -> bool:
        if durable:
            self.waiting.set()
            assert self.gate.wait(PATIENCE_S)
        return super().write(data, offset, durable, nowait)


@pytest.fixture(params=["iser", "iscsi"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def conflict(operation: object) -> None:
    with pytest.raises(ReservationConflict):
        await operation  # type: ignore[misc]


async def test_reserve_preempt_and_what_the_others_see(scheme: str) -> None:
    async with hosts(scheme, FakeStore(1 << 20), "a", "b") as (a, b):
        await a.out(pr.REGISTER, 0, A)
        await a.out(pr.RESERVE, A)
        await a.write(NEW)
        await conflict(b.read())
        await conflict(b.write(OLD))
        await conflict(b.out(pr.RESERVE, B))
        _, registrations = pr.decode_full_status(await b.ask(pr.READ_FULL_STATUS))
        assert [each.key for each in registrations] == [A]
        assert registrations[0].initiator is not None
        assert registrations[0].initiator.name == "iqn.2026-11.example:a"
        assert pr.decode_reservation(await b.ask(pr.READ_RESERVATION)) == (1, (A, EA_RO, 0))
        await b.out(pr.REGISTER, 0, B)
        assert await b.read() == NEW, "registered"
        await b.out(pr.PREEMPT, B, A)
        await conflict(a.write(OLD))
        await conflict(a.out(pr.RELEASE, A))
        assert pr.decode_keys(await a.ask(pr.READ_KEYS)) == (3, [B])
        await b.out(pr.CLEAR, B)
        assert await a.read() == NEW


async def test_the_same_name_after_a_lost_connection(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same name and ISID is the same nexus: it still holds what it held."""
    monkeypatch.setattr("iserblk.names.secrets.token_bytes", lambda n: b"s" * n)
    async with hosts(scheme, FakeStore(1 << 20), "a", "b", "a") as (first, b, again):
        await again.out(pr.REGISTER, 0, A)
        await again.out(pr.RESERVE, A)
        assert first.session.error is not None, "reinstated by the later one"
        await conflict(b.read())
        assert await again.read() == bytes(512)


@pytest.mark.parametrize("cut", [False, True], ids=["living", "cut off"])
async def test_preempt_and_abort_answers_after_the_last_write(scheme: str, cut: bool) -> None:
    """After GOOD no write of the victim reaches the medium, even if its session has ended."""
    store = GatedStore(1 << 20)
    async with hosts(scheme, store, "a", "b") as (a, b):
        await a.out(pr.REGISTER, 0, A)
        await a.out(pr.RESERVE, A)
        await b.out(pr.REGISTER, 0, B)
        store.gate.clear()
        errors: list[IserblkError] = []
        answered = trio.Event()

        async def victim() -> None:
            try:
                await a.write(OLD)
            except IserblkError as error:
                errors.append(error)

        async def preempt() -> None:
            await b.out(pr.PREEMPT_AND_ABORT, B, A)
            answered.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(victim)
            assert await trio.to_thread.run_sync(store.waiting.wait, PATIENCE_S)
            if cut:
                a.session.fail(TransportError("cut off"))
            nursery.start_soon(preempt)
            with trio.move_on_after(0.1):
                await answered.wait()
            assert not answered.is_set(), "the write is under way"
            assert bytes(store.content[:512]) == bytes(512)
            store.gate.set()
            await answered.wait()
            assert bytes(store.content[:512]) == OLD
            await b.write(NEW)
        assert len(errors) == cut
        if not cut:
            await conflict(a.write(OLD))
        assert await b.read() == NEW
