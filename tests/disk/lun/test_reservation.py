"""reserve=exclusive: taking a LUN, finding it again, giving it back. Against our target."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import trio

from iserblk.commands.command import Operation
from iserblk.commands.session import CommandSession
from iserblk.disk.lun.reservation import TYPE, HostLock, Reservation, host_key
from iserblk.errors import (
    Busy,
    ConnectionLost,
    IserblkError,
    NotSupported,
    ReservationConflict,
    ReservationLost,
    TransportError,
)
from iserblk.initiator.session.session import Session
from iserblk.scsi import reservations as pr
from iserblk.target.scsi import reservations as target_reservations
from iserblk.target.scsi.commands import COMMANDS
from iserblk.target.scsi.reservations import Reservations
from tests.support import logs
from tests.support.sessions import LUN, PATIENCE_S, Host, Place, hosts, target
from tests.target.fake_store import FakeStore
from tests.target.scsi.test_reservations_sessions import GatedStore

pytestmark = pytest.mark.logs(logs.RESERVATION)

A, B = 0xA, 0xB
NEW, OLD = b"n" * 512, b"o" * 512


@pytest.fixture(params=["iser", "iscsi"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(1 << 20)


_made: list[Reservation] = []


@pytest.fixture(autouse=True)
def end() -> Iterator[None]:
    yield
    while _made:
        die(_made.pop())


def reservation(key: int = A) -> Reservation:
    name = f"iqn.2026-11.example:{'a' if key == A else 'b'}"
    _made.append(Reservation("lun0", "naa.3", key, name))
    return _made[-1]


async def acquire(host: Host, key: int = A) -> Reservation:
    taken = reservation(key)
    await host.run(taken.acquire(host.session, LUN))
    return taken


async def release(host: Host, taken: Reservation) -> None:
    await host.run(taken.release(host.session, LUN))


async def resume(host: Host, taken: Reservation) -> None:
    await host.run(taken.resume(host.session, LUN))


def die(taken: Reservation) -> None:
    """What the kernel does for a process that is killed."""
    taken._unlock()


def lose_power(place: Place) -> None:
    """The target forgets its reservations, as after a restart."""
    nexuses = place.unit.reservations.nexuses
    place.unit.reservations = Reservations()
    place.unit.reservations.nexuses = nexuses


# -- acquire and release ---------------------------------------------------------------------------


async def test_taken_and_given_back(scheme: str, store: FakeStore) -> None:
    async with hosts(scheme, store, "a", "b") as (a, b):
        taken = await acquire(a)
        assert await b.held() == (A, TYPE, 0)
        await a.write(NEW)
        with pytest.raises(ReservationConflict, match="RESERVATION CONFLICT") as conflict:
            await b.write(OLD)
        assert conflict.value.exit_status == 28
        await release(a, taken)
        assert (await b.keys(), await b.held()) == ([], None)
        assert await b.read() == NEW
        await release(b, await acquire(b, B))


async def test_who_else_has_it_is_named(scheme: str, store: FakeStore) -> None:
    """The refused initiator is not registered either: a registered one would have access."""
    async with hosts(scheme, store, "a", "b") as (a, b):
        await acquire(a)
        with pytest.raises(Busy) as refused:
            await acquire(b, B)
        assert str(refused.value) == (
            "lun0: reserved by iqn.2026-11.example:a (key 0xa, Exclusive Access, Registrants "
            "Only): detach it there; if that host is gone for good, reserve-key=0xa takes over "
            "from it"
        )
        assert refused.value.exit_status == 28
        assert await a.keys() == [A]


@pytest.mark.parametrize("kind", pr.TYPES)
async def test_any_type_is_in_the_way(scheme: str, store: FakeStore, kind: int) -> None:
    async with hosts(scheme, store, "a", "b") as (a, b):
        await a.out(pr.REGISTER, 0, A)
        await a.out(pr.RESERVE, A, kind=kind)
        with pytest.raises(Busy, match=r"reserved by iqn.2026-11.example:a"):
            await acquire(b, B)
        assert await a.keys() == [A]


async def test_others_that_are_registered(scheme: str, store: FakeStore) -> None:
    async with hosts(scheme, store, "a", "b") as (a, b):
        await a.out(pr.REGISTER, 0, A)
        with pytest.raises(Busy, match=r"key 0xa.* would have access, too"):
            await acquire(b, B)
        assert await a.keys() == [A]


async def test_one_key_on_one_machine(scheme: str, store: FakeStore) -> None:
    """A second attach fails while the first lives, though the target cannot tell the two apart."""
    async with hosts(scheme, store, "a", "b") as (a, b):
        taken = await acquire(a)
        with pytest.raises(Busy, match="lun0: in use on this machine already"):
            await acquire(b)
        await a.write(NEW)
        await release(a, taken)
        await acquire(b)


@pytest.mark.parametrize("reserved", [True, False], ids=["reserved", "registered only"])
async def test_what_the_dead_left_behind(scheme: str, store: FakeStore, reserved: bool) -> None:
    async with hosts(scheme, store, "a", "a") as (dead, again):
        if reserved:
            die(await acquire(dead))
        else:
            await dead.out(pr.REGISTER, 0, A)
        taken = await acquire(again)
        assert await again.keys() == [A]
        assert await again.held() == (A, TYPE, 0)
        with pytest.raises(ReservationConflict):
            await dead.write(OLD)
        await again.write(NEW)
        await release(again, taken)
        assert await again.keys() == []


async def test_writes_of_the_dead_end_first(scheme: str) -> None:
    """A write that the target is still executing reaches the medium before ``acquire`` returns."""
    store = GatedStore(1 << 20)
    async with hosts(scheme, store, "a", "a") as (dead, again):
        die(await acquire(dead))
        store.gate.clear()
        acquired = trio.Event()

        async def old_write() -> None:
            with contextlib.suppress(IserblkError):
                await dead.write(OLD)

        async def take_over() -> None:
            await acquire(again)
            acquired.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(old_write)
            assert await trio.to_thread.run_sync(store.waiting.wait, PATIENCE_S)
            nursery.start_soon(take_over)
            with trio.move_on_after(0.1):
                await acquired.wait()
            assert not acquired.is_set()
            store.gate.set()
            await acquired.wait()
            await again.write(NEW)
        assert await again.read() == NEW


async def test_a_target_that_cannot_abort(
    scheme: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(COMMANDS, 0x5F << 8 | pr.PREEMPT_AND_ABORT)
    async with hosts(scheme, store, "a", "a") as (dead, again):
        die(await acquire(dead))
        await acquire(again)
        assert await again.keys() == [A]
        with pytest.raises(ReservationConflict):
            await dead.write(OLD)
    assert "old commands are not waited for" in caplog.text
    caplog.clear()


async def test_two_at_once(scheme: str, store: FakeStore) -> None:
    """One host wins, or none (then each has seen the other); the loser leaves no registration."""
    async with hosts(scheme, store, "a", "b") as two:
        won: list[int] = []

        async def contend(host: Host, key: int) -> None:
            try:
                await acquire(host, key)
            except Busy:
                return
            won.append(key)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(contend, two[0], A)
            nursery.start_soon(contend, two[1], B)
        assert len(won) <= 1
        assert await two[0].keys() == won


async def test_no_persistent_reservations(
    scheme: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for opcode in [code for code in COMMANDS if code >> 8 in (0x5E, 0x5F)]:
        monkeypatch.delitem(COMMANDS, opcode)
    async with hosts(scheme, store, "a") as (a,):
        with pytest.raises(NotSupported, match="leave out reserve=exclusive"):
            await acquire(a)


async def test_a_target_that_cannot_keep_them_after_all(
    scheme: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target reports PTPL_C, but refuses APTPL."""
    monkeypatch.setattr(target_reservations, "ATP_C", 0x05)
    async with hosts(scheme, store, "a") as (a,):
        await acquire(a)
        assert await a.held() == (A, TYPE, 0)


async def test_release_when_it_is_anothers(scheme: str, store: FakeStore) -> None:
    async with hosts(scheme, store, "a", "b") as (a, b):
        taken = await acquire(a)
        await b.out(pr.REGISTER, 0, B)
        await b.out(pr.PREEMPT, B, A)
        await release(a, taken)
        assert await b.held() == (B, TYPE, 0)


async def test_release_without_a_session(scheme: str, store: FakeStore) -> None:
    """The reservation stays, the lock does not."""
    async with hosts(scheme, store, "a", "a") as (a, again):
        taken = await acquire(a)
        a.session.fail(TransportError("cut off"))
        await release(a, taken)
        assert await again.held() == (A, TYPE, 0)
        await acquire(again)


# -- resume ----------------------------------------------------------------------------------------


async def test_resume_on_the_same_nexus(
    scheme: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("iserblk.names.secrets.token_bytes", lambda n: b"s" * n)
    async with target(scheme, store) as place:
        a = await place.log_in("a")
        taken = await acquire(a)
        again = await place.log_in("a")
        for _ in range(3):
            await resume(again, taken)
            assert await again.keys() == [A]
        await again.write(NEW)
        await release(again, taken)
        assert await again.keys() == []


async def test_resume_on_another_path(scheme: str, store: FakeStore) -> None:
    """The registration of the old nexus goes, with its tasks."""
    async with hosts(scheme, store, "a", "a") as (a, again):
        taken = await acquire(a)
        await resume(again, taken)
        assert await again.keys() == [A]
        assert await again.held() == (A, TYPE, 0)
        await again.write(NEW)
        with pytest.raises(ReservationConflict):
            await a.write(OLD)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("back", [True, False], ids=["back", "on to a third"])
async def test_a_path_that_fails_on_the_way(
    scheme: str, store: FakeStore, step: int, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own change, whose answer was lost, is not taken for another host's."""
    async with hosts(scheme, store, "a", "a", "a") as (a, second, third):
        taken = await acquire(a)
        looked = 0
        look = taken._look

        def failing(session: Session, lun: bytes) -> Operation[object]:
            nonlocal looked
            looked += 1
            if looked == step:
                raise ConnectionLost("on the way")
            return (yield from look(session, lun))

        with monkeypatch.context() as patch:
            patch.setattr(taken, "_look", failing)
            with pytest.raises(ConnectionLost):
                await resume(second, taken)
        after = a if back else third
        await resume(after, taken)
        assert await after.keys() == [A]
        await after.write(NEW)


async def test_resume_beside_a_late_registration(
    scheme: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host registered while we were away, without preempting us: we still hold it."""
    monkeypatch.setattr("iserblk.names.secrets.token_bytes", lambda n: b"s" * n)
    async with target(scheme, store) as place:
        taken = await acquire(await place.log_in("a"))
        b = await place.log_in("b")
        await b.out(pr.REGISTER, 0, B)
        again = await place.log_in("a")
        await resume(again, taken)
        assert await again.held() == (A, TYPE, 0)


@pytest.mark.parametrize("what", ["held", "gone", "cleared", "by our key"])
async def test_preempted(scheme: str, store: FakeStore, what: str) -> None:
    """Another initiator preempted us, and may have left again: we do not register again."""
    async with hosts(scheme, store, "a", "b", "a") as (a, b, again):
        taken = await acquire(a)
        other = A if what == "by our key" else B
        await b.out(pr.REGISTER, 0, other)
        if what == "cleared":
            await b.out(pr.CLEAR, other)
        else:
            await b.out(pr.PREEMPT, other, A)
        if what == "gone":
            await b.out(pr.REGISTER, other, 0)
        keys, held = await b.keys(), await b.held()
        words = r"taken over the reservation \(key 0xb\)" if what == "held" else "was removed"
        for host in (a, again):
            with pytest.raises(ReservationLost, match=words):
                await resume(host, taken)
        assert (await b.keys(), await b.held()) == (keys, held)


async def test_taken_over_with_our_key_and_a_generation_of_ours(
    scheme: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target has lost its power, kept its registrations, and counts from 0 again: a generation
    that we know says nothing. Another host has our key, as the message of its refusal asks for."""
    monkeypatch.setattr("iserblk.names.secrets.token_bytes", lambda n: b"s" * n)
    async with target(scheme, store) as place:
        taken = await acquire(await place.log_in("a"))
        before = place.unit.reservations.generation
        b = await place.log_in("b")
        await b.out(pr.REGISTER, 0, A)
        await b.out(pr.PREEMPT, A, A)
        place.unit.reservations.generation = before
        again = await place.log_in("a")
        keys, held = await b.keys(), await b.held()
        with pytest.raises(ReservationLost, match="was removed"):
            await resume(again, taken)
        assert (await b.keys(), await b.held()) == (keys, held)
        await b.write(NEW)


async def test_taken_over_with_our_key_while_we_come_back(
    scheme: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the look at who is registered, before we register: who has taken the LUN over stays,
    and we are not registered."""
    looked, over = trio.Event(), trio.Event()

    def registers(self: Reservation, session: CommandSession, lun: bytes) -> Operation[None]:
        looked.set()
        while not over.is_set():
            yield 0.001
        yield from register(self, session, lun)

    async with target(scheme, store) as place:
        taken = await acquire(await place.log_in("a"))
        b, again = await place.log_in("b"), await place.log_in("a")
        register = Reservation._register
        monkeypatch.setattr(Reservation, "_register", registers)

        async def come_back() -> None:
            with pytest.raises(ReservationLost, match="another initiator has taken over"):
                await resume(again, taken)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(come_back)
            await looked.wait()
            await b.out(pr.REGISTER, 0, A)
            await b.out(pr.PREEMPT_AND_ABORT, A, A)
            over.set()
        assert (await b.keys(), await b.held()) == ([A], (A, TYPE, 0))
        await b.write(NEW)
        with pytest.raises(ReservationConflict):
            await again.write(OLD)


async def test_resume_after_the_target_lost_everything(scheme: str, store: FakeStore) -> None:
    async with target(scheme, store) as place:
        a = await place.log_in("a")
        taken = await acquire(a)
        lose_power(place)
        await resume(a, taken)
        assert await a.held() == (A, TYPE, 0)
        # This time another host reserves first.
        lose_power(place)
        b = await place.log_in("b")
        other = reservation(B)
        await b.run(other.acquire(b.session, LUN))
        with pytest.raises(ReservationLost, match="key 0xb"):
            await resume(a, taken)
        await release(b, other)
        with pytest.raises(ReservationLost, match="was removed"):
            await resume(a, taken)
        assert await b.keys() == []


# -- a living session ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["preempted", "cleared"])
async def test_what_puts_it_in_doubt_cuts_the_connection(
    scheme: str, store: FakeStore, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with hosts(scheme, store, "a", "b") as (a, b):
        taken = await acquire(a)
        taken.watch(a.session)
        a.session.listeners.add(LUN, taken)
        await b.out(pr.REGISTER, 0, B)
        await (b.out(pr.PREEMPT, B, A) if how == "preempted" else b.out(pr.CLEAR, B))
        with pytest.raises(IserblkError):
            await a.write(OLD)
        assert a.session.error is not None
        assert bytes(store.content[:512]) == bytes(512)
        assert "the reservation may be lost" in caplog.text
        caplog.clear()


# -- keys and locks --------------------------------------------------------------------------------


def test_the_key_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "iqn.2026-11.example:a"
    key = host_key(name)
    assert 0 < key < 1 << 64
    assert host_key(name.upper()) == key == host_key(name)
    assert host_key(name + "b") != key
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert host_key(name) != key


def test_the_lock_is_one() -> None:
    lock = HostLock("something")
    other = HostLock("something else")
    found: list[str] = []

    def in_thread() -> None:
        try:
            HostLock("something")
        except Busy as error:
            found.append(str(error))

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert len(found) == 1
    lock.close()
    HostLock("something").close()
    other.close()
