"""A flush that fails is told to every session whose writes may be lost, not only to the first."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable

import pytest

from iserblk.scsi import cdb, opcodes, sense
from iserblk.scsi import status as sam
from iserblk.target.scsi import unflushed as unflushed_module
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.scsi.unflushed import Unflushed
from iserblk.target.seam import Nexus
from iserblk.target.store.status import LostError, WritebackError
from tests.support import logs
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import GOOD, IQN, Client

pytestmark = pytest.mark.logs(logs.FILE_ERRORS)

LOST = (sense.MEDIUM_ERROR, sense.WRITE_ERROR)
FLUSH = cdb.synchronize_cache16(0, 0)
FUA = 0x08


def write(client: Client, flags: int = 0) -> tuple[int, int]:
    command = bytes((opcodes.WRITE_10, flags, 0, 0, 0, 0, 0, 0, 1, 0))
    return client.code(command, bytes(512))


def fails(store: FakeStore, ask: Callable[[], tuple[int, int]], number: int = errno.EIO) -> None:
    """``ask`` meets an error of the store, which is reported once, as the kernel does."""
    store.failure = OSError(number, "lost")
    assert ask() != GOOD
    store.failure = None


@pytest.fixture
def store() -> FakeStore:
    return FakeStore(1 << 20)


@pytest.fixture
def server(store: FakeStore) -> DeviceServer:
    return DeviceServer({0: LogicalUnit(store, serial="S")}, IQN)


def test_each_that_has_written_meets_the_error_once(server: DeviceServer, store: FakeStore) -> None:
    one, other = Client(server, isid=b"one..."), Client(server, isid=b"other.")
    reader, clean = Client(server, isid=b"reader"), Client(server, isid=b"clean.")
    assert write(clean) == GOOD and clean.code(FLUSH) == GOOD
    assert write(one) == write(other) == GOOD
    fails(store, lambda: one.code(FLUSH))
    assert one.code(FLUSH) == GOOD, "it has been told"
    assert other.code(FLUSH) == LOST
    for client in (one, other, reader, clean):
        assert client.code(FLUSH) == GOOD


@pytest.mark.parametrize(
    ("command", "data"),
    [
        (cdb.write_same16(0, 1), b"x" * 512),
        (cdb.write_same16(0, 8, ndob=True), b""),
        (cdb.unmap(24), b"\0\x16\0\x10" + bytes(15) + b"\x08" + bytes(4)),
        (cdb.compare_and_write(0, 1), bytes(1024)),
    ],
    ids=["WRITE SAME", "zeroes", "UNMAP", "COMPARE AND WRITE"],
)
def test_whatever_changes_the_lun_counts(
    server: DeviceServer, store: FakeStore, command: bytes, data: bytes
) -> None:
    one, other = Client(server, isid=b"one..."), Client(server, isid=b"other.")
    assert other.code(command, data) == GOOD
    fails(store, lambda: one.code(FLUSH))
    assert other.code(FLUSH) == LOST


def test_a_session_that_came_back_hears_of_it(server: DeviceServer, store: FakeStore) -> None:
    one, other = Client(server, isid=b"one..."), Client(server, isid=b"other.")
    assert write(other) == GOOD
    server.detach(other.nexus)
    fails(store, lambda: one.code(FLUSH))
    assert Client(server, isid=b"other.").code(FLUSH) == LOST


def test_other_ways_to_take_the_error(server: DeviceServer, store: FakeStore) -> None:
    """A FUA read, which flushes, and a durable write may meet EIO. A write that meets ENOSPC says
    nothing of other sessions' data."""
    one, other = Client(server, isid=b"one..."), Client(server, isid=b"other.")
    fua_read = bytes((opcodes.READ_10, FUA, 0, 0, 0, 0, 0, 0, 1, 0))
    for ask in (lambda: one.code(fua_read), lambda: write(one, FUA)):
        assert write(other) == GOOD
        fails(store, ask)
        assert other.code(FLUSH) == LOST
    assert write(other) == GOOD
    fails(store, lambda: write(one, FUA), errno.ENOSPC)
    assert other.code(FLUSH) == GOOD
    assert write(other) == GOOD
    fails(store, lambda: one.code(FLUSH))
    assert other.code(fua_read) != GOOD


def test_a_write_with_fua_that_fails_tells_of_itself_alone(
    server: DeviceServer, store: FakeStore
) -> None:
    """The kernel reports what it has lost of earlier writes to whatever waits for the disk next."""
    client = Client(server)
    assert write(client) == GOOD
    fails(store, lambda: write(client, FUA))
    assert client.code(FLUSH) == LOST
    assert client.code(FLUSH) == GOOD
    fails(store, lambda: write(client, FUA))
    assert client.code(FLUSH) == GOOD, "there was nothing else to lose"


def test_a_lun_that_comes_later_knows_the_sessions(server: DeviceServer) -> None:
    """A session that is there, and is told, leaves nothing for others."""
    store = FakeStore(1 << 20)
    unit = LogicalUnit(store, serial="T")
    one, other = (Client(server, isid=name, lun=5, ready=False) for name in (b"one...", b"other."))
    server.add_luns({5: unit})
    for client in (one, other):
        for _ in range(2):  # takes the unit attentions
            client.code(bytes(6))
        assert write(client) == GOOD
    fails(store, lambda: one.code(FLUSH))
    assert other.code(FLUSH) == LOST
    assert not unit.unflushed.owed
    late = Client(server, isid=b"late..", lun=5)
    assert late.code(FLUSH) == GOOD


def test_flushes_at_the_same_time() -> None:
    """One flush meets the error; the other began before it, and may have lost the same data."""
    unflushed = Unflushed()
    nexus, late = Nexus("iqn.x:y", b"nexus."), Nexus("iqn.x:y", b"late..")

    def failing() -> None:
        unflushed.wrote(late, unflushed.failures)  # while the flush is under way
        raise OSError(errno.ENOSPC, "lost")

    def meanwhile() -> None:
        with pytest.raises(OSError, match="lost"):
            unflushed.flush(nexus, failing)

    for who in (nexus, late):
        with pytest.raises(OSError, match="meanwhile") as caught:
            unflushed.flush(who, meanwhile if who is nexus else lambda: None)
        assert caught.value.errno == errno.ENOSPC
        unflushed.flush(who, lambda: None)


def test_a_write_that_is_noted_behind_the_flush_that_has_lost_it() -> None:
    """A thread that has written may wait a long time for its turn to say so."""
    unflushed = Unflushed()
    one, other = nexus("one"), nexus("other")
    since = unflushed.failures

    def failing() -> None:  # covers what ``one`` has written, and does not know of it
        raise OSError(errno.EIO, "lost")

    with pytest.raises(OSError, match="lost"):
        unflushed.flush(other, failing)
    unflushed.wrote(one, since)
    assert hears(unflushed, one) and not hears(unflushed, one)


def test_each_hears_once_of_a_loss_that_the_store_tells() -> None:
    """Flushes at the same time all fail, in whatever order they end."""
    for first in (0, 1):
        unflushed = Unflushed()
        both = [nexus("one"), nexus("other")]
        for each in both:
            unflushed.attach(each)
            unflushed.wrote(each, unflushed.failures)
        begun = [unflushed.begin() for _ in both]
        unflushed.failed(OSError(errno.EIO, "lost"))
        for at in (first, 1 - first):
            told = unflushed.end(both[at], begun[at], WritebackError(errno.EIO, "lost"))
            assert told is not None
            unflushed.answered(both[at], told)
        assert not any(hears(unflushed, each) for each in both) and not unflushed.owed


def test_a_command_that_flushes_tells_of_itself_alone() -> None:
    """UNMAP without a write cache fails for what it has changed, also where the flush of another
    command has met the error; and leaves it to a flush to tell of other writes."""
    unflushed = Unflushed()
    one, other = nexus("one"), nexus("other")
    unflushed.wrote(one, unflushed.failures)
    since = unflushed.failures

    def failing() -> None:
        raise OSError(errno.ENOSPC, "lost")

    for _ in range(2):
        with pytest.raises(WritebackError, match="lost"):
            unflushed.bring(failing, unflushed.failures)
    with pytest.raises(WritebackError, match="meanwhile") as caught:
        unflushed.bring(lambda: None, since)
    assert caught.value.errno == errno.ENOSPC
    unflushed.bring(lambda: None, unflushed.failures)
    with pytest.raises(WritebackError):
        unflushed.bring_all(one, lambda: None)
    unflushed.bring_all(other, lambda: None)
    assert hears(unflushed, one) and not hears(unflushed, one) and not hears(unflushed, other)


def test_a_flush_that_breaks_off_leaves_everything_as_it_was() -> None:
    unflushed = Unflushed()
    one, other = nexus("one"), nexus("other")
    unflushed.wrote(one, unflushed.failures)

    def broken() -> None:
        raise RuntimeError("the target ends")

    with pytest.raises(RuntimeError):
        unflushed.flush(other, broken)
    with pytest.raises(RuntimeError):
        unflushed.bring(broken, 0)
    unflushed.failed(OSError(errno.EIO, "lost"))
    assert hears(unflushed, one) and not hears(unflushed, other)


def test_busy_of_the_kernel_is_a_loss() -> None:
    """Only a store that is a LUN itself refuses a flush for now."""
    unflushed = Unflushed()
    one, other = nexus("one"), nexus("other")
    unflushed.wrote(other, unflushed.failures)
    assert unflushed.end(one, unflushed.begin(), OSError(errno.EBUSY, "busy")) is not None
    assert hears(unflushed, other)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_flush_that_fails_is_a_write_error(
    server: DeviceServer, store: FakeStore, number: int
) -> None:
    """Hosts take it as lost then: a disk that is full, or read-only, is no reason to go on."""
    client = Client(server)
    assert write(client) == GOOD
    store.failure = OSError(number, "lost")
    assert client.code(FLUSH) == LOST


def test_a_read_that_flushes_does_not_take_the_error_from_the_flush(
    server: DeviceServer, store: FakeStore
) -> None:
    """A host knows from a READ that fails nothing of its writes."""
    client, reader = Client(server), Client(server, isid=b"reader")
    fua_read = bytes((opcodes.READ_10, FUA, 0, 0, 0, 0, 0, 0, 1, 0))
    unreadable = (sense.MEDIUM_ERROR, sense.UNRECOVERED_READ_ERROR)
    assert write(client) == GOOD
    store.failure = OSError(errno.EIO, "lost")
    assert client.code(fua_read) == reader.code(fua_read) == unreadable
    store.failure = None
    assert client.code(fua_read) == unreadable, "it is not on the medium"
    assert reader.code(fua_read) == GOOD
    assert client.code(FLUSH) == LOST
    assert client.code(FLUSH) == client.code(fua_read) == reader.code(FLUSH) == GOOD


def test_another_answer_does_not_tell_of_a_loss(server: DeviceServer, store: FakeStore) -> None:
    """A flush has failed, and its session ends before it is answered; a command that was answered
    with an error in between has told nothing."""
    client = Client(server)
    assert write(client) == GOOD
    store.failure = OSError(errno.EIO, "lost")
    task = server.begin(client.nexus, 0, FLUSH)
    assert server.run(task, None)
    store.failure = None
    other = server.begin(client.nexus, 0, cdb.compare_and_write(0, 1))
    assert server.run(other, memoryview(bytearray(b"x" * 1024)))
    assert task.status == other.status == sam.CHECK_CONDITION
    other.was_answered()
    server.detach(client.nexus)
    assert Client(server).code(FLUSH) == LOST


def nexus(name: str) -> Nexus:
    return Nexus(f"iqn.x:{name}", bytes(6))


def hears(unflushed: Unflushed, who: Nexus) -> bool:
    """Its flush fails, and is answered so."""
    try:
        unflushed.flush(who, lambda: None)
    except OSError as error:
        unflushed.answered(who, error)
        return True
    return False


def lose(unflushed: Unflushed, *writers: Nexus) -> None:
    """They have written, and a flush of another has failed."""
    for each in writers:
        unflushed.wrote(each, unflushed.failures)
    unflushed.failed(OSError(errno.EIO, "lost"))


def test_a_flush_covers_writers_that_another_one_fails_for() -> None:
    """It has begun before the other one, which therefore does not know of them."""
    unflushed = Unflushed()
    one, other, writer = nexus("one"), nexus("other"), nexus("writer")
    unflushed.wrote(writer, unflushed.failures)
    begun = unflushed.begin()
    second = unflushed.begin()
    assert unflushed.end(other, second, OSError(errno.EIO, "lost")) is not None
    assert unflushed.end(one, begun, None) is not None
    assert hears(unflushed, writer)


def test_losses_that_are_those_of_writers() -> None:
    """The flush was carried out: who has written nothing has lost nothing."""
    unflushed = Unflushed()
    reader, writer = nexus("reader"), nexus("writer")
    unflushed.attach(writer)
    unflushed.wrote(writer, unflushed.failures)

    def flush() -> None:
        raise LostError(errno.EREMOTEIO, "lost", 2)

    unflushed.flush(reader, flush)
    assert hears(unflushed, writer) and not hears(unflushed, writer)
    unflushed.wrote(writer, unflushed.failures)
    with pytest.raises(LostError):
        unflushed.flush(writer, flush)
    unflushed.detach(writer)  # before it was answered: another one hears in its place
    with pytest.raises(LostError) as told:
        unflushed.flush(reader, flush)
    unflushed.answered(reader, told.value)
    assert not unflushed.owed


@pytest.mark.parametrize("how", ["aborted", "gone", "answered", "another"])
def test_the_answer_has_to_be_sent(how: str) -> None:
    """Else the initiator gets it again, when it has logged in anew."""
    unflushed = Unflushed()
    one = nexus("one")
    unflushed.attach(one)
    lose(unflushed, one)
    with pytest.raises(OSError) as told:
        unflushed.flush(one, lambda: None, lambda: how != "aborted")
    if how == "answered":
        unflushed.answered(one, told.value)
    elif how == "another":  # command failed meanwhile, and its status was sent before
        unflushed.answered(one, OSError(errno.EIO, "lost"))
    unflushed.detach(one)
    assert unflushed.owed == (how != "answered")
    unflushed.attach(one)
    assert not unflushed.owed and hears(unflushed, one) == (how != "answered")
    assert not hears(unflushed, one)


def test_what_a_session_leaves_is_for_those_that_begin_later() -> None:
    unflushed = Unflushed()
    gone, present, later, last = (nexus(name) for name in ("gone", "present", "later", "last"))
    unflushed.attach(gone)
    lose(unflushed, gone)
    unflushed.attach(present)
    unflushed.detach(gone)
    for each in (later, last):
        unflushed.attach(each)
    assert not hears(unflushed, present) and unflushed.owed
    assert hears(unflushed, later) and not hears(unflushed, later) and not unflushed.owed
    assert hears(unflushed, last)
    after = nexus("after")
    unflushed.attach(after)
    assert not hears(unflushed, after)


def test_a_loss_that_is_told_to_no_initiator(store: FakeStore) -> None:
    """The end of the target tells."""
    unit = LogicalUnit(store, serial="S")
    server = DeviceServer({0: unit}, IQN)
    one, other = Client(server, isid=b"one..."), Client(server, isid=b"other.")
    assert write(other) == GOOD
    fails(store, lambda: one.code(FLUSH))
    server.detach(other.nexus)
    with pytest.raises(OSError, match="an initiator was not told"):
        unit.close()


def test_nexuses_that_come_and_go_take_no_place_of_one_that_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The names that are kept have a bound; who has a session is told of a failure nevertheless,
    whenever it wrote."""
    monkeypatch.setattr(unflushed_module, "MOST_NAMES", 4)
    unflushed = Unflushed()
    first, last = (Nexus(f"iqn.x:{name}", bytes(6)) for name in ("first", "last"))
    unflushed.attach(first)
    unflushed.wrote(first, unflushed.failures)
    for number in range(100):
        passing = Nexus(f"iqn.x:{number}", bytes(6))
        unflushed.attach(passing)
        unflushed.wrote(passing, unflushed.failures)
        unflushed.detach(passing)
    unflushed.attach(last)
    unflushed.wrote(last, unflushed.failures)
    begun = unflushed.begin()
    assert len(begun.writers) <= 5
    unflushed.end(Nexus("iqn.x:else", bytes(6)), begun, OSError(errno.EIO, "lost"))
    for nexus in (first, last):
        with pytest.raises(OSError, match="another session"):
            unflushed.flush(nexus, lambda: None)


def test_one_that_logs_in_later_is_told_for_names_that_gave_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unflushed_module, "MOST_NAMES", 4)
    unflushed = Unflushed()
    for number in range(100):
        passing = Nexus(f"iqn.x:{number}", bytes(6))
        unflushed.attach(passing)
        unflushed.wrote(passing, unflushed.failures)
        unflushed.detach(passing)
        unflushed.failed(OSError(errno.EIO, "lost"))
    assert unflushed.owed
    later = Nexus("iqn.x:later", bytes(6))
    unflushed.attach(later)
    error = unflushed.end(later, unflushed.begin(), None)
    assert error is not None
    unflushed.answered(later, error)
    assert not unflushed.owed


def test_no_session_is_kept(server: DeviceServer) -> None:
    """A session that has ended is gone with its memory, although it wrote last."""
    client = Client(server)
    assert write(client) == GOOD
    server.detach(client.nexus)
    gone = weakref.ref(client)
    del client
    gc.collect()
    assert gone() is None
