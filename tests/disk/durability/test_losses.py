"""Each client hears of each loss once, and no client's flush takes it from another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from iserblk.commands.command import Operation
from iserblk.disk.durability.losses import Losses
from iserblk.disk.seam import NO_CLIENT, FlushClient, LossCount
from iserblk.errors import IserblkError, WritesLost
from tests.disk.durability.test_promise import BLOCK, DEFERRED, MEDIUM_ERROR, POWER_ON, SYNC, Bench
from tests.support import logs


def hears(client: FlushClient, losses: Losses) -> bool:
    """Its flush fails, and the answer reaches it."""
    owed = client.owed
    client.told(losses.count if owed else 0)
    return owed


def test_each_client_hears_once() -> None:
    losses = Losses()
    one, other = losses.new_client(), losses.new_client()
    losses.add()
    assert hears(one, losses) and not hears(one, losses)
    assert hears(other, losses) and not hears(other, losses)
    losses.add()
    losses.add()
    assert hears(one, losses) and not hears(one, losses)


def test_a_new_client_hears_of_what_no_client_was_told_of() -> None:
    losses = Losses()
    losses.add()
    new = losses.new_client()
    assert losses.untold and hears(new, losses)
    assert not losses.untold and not hears(losses.new_client(), losses)


def test_what_a_client_has_not_heard_is_left_to_those_that_begin_later() -> None:
    losses = Losses()
    one, other = losses.new_client(), losses.new_client()
    losses.add()
    one.ended()
    assert hears(other, losses)  # which is not one of the later ones
    assert losses.untold
    later, last = losses.new_client(), losses.new_client()
    assert hears(later, losses)
    assert not hears(losses.new_client(), losses)  # one of the later ones was told
    assert hears(last, losses)  # it began before that


def test_a_client_that_ends_behind_the_others_leaves_it_too() -> None:
    losses = Losses()
    one, other = losses.new_client(), losses.new_client()
    losses.add()
    assert hears(one, losses) and not losses.untold
    other.ended()
    assert losses.untold and hears(losses.new_client(), losses)
    one.ended()
    assert not losses.untold


def test_a_later_end_is_for_clients_later_still() -> None:
    losses = Losses()
    one, other = losses.new_client(), losses.new_client()
    losses.add()
    one.ended()
    between = losses.new_client()
    other.ended()
    assert hears(between, losses)
    assert hears(losses.new_client(), losses) and not losses.untold


def test_an_answer_that_has_not_arrived_after_all() -> None:
    losses = Losses()
    one = losses.new_client()
    losses.add()
    assert hears(one, losses) and not losses.untold
    one.unheard()
    one.ended()
    assert losses.untold and hears(losses.new_client(), losses)


def test_a_failed_flush_tells_of_what_was_lost_by_then() -> None:
    losses = Losses()
    client = losses.new_client()
    losses.add()
    failed_with = losses.count
    losses.add()
    client.told(failed_with)
    assert client.owed and hears(client, losses)


@pytest.mark.parametrize("told", [3, 2])
def test_losses_that_another_process_has_counted(told: int) -> None:
    losses = Losses()
    changes: list[LossCount] = []
    client = losses.only_client(LossCount(3, told), lambda: changes.append(client.count))
    assert client.count == (3, told) and hears(client, losses) == (told < 3)
    changes.clear()
    losses.add()
    assert hears(client, losses) and changes == [(4, 3), (4, 4)]
    client.unheard()
    assert changes[-1] == (4, 3) and hears(client, losses)


def test_losses_that_another_process_counts_meanwhile() -> None:
    """Of which the client is told, and which no client that begins later has to hear of."""
    losses = Losses()
    changes: list[LossCount] = []
    client = losses.only_client(LossCount(3, 3), lambda: changes.append(client.count))
    client.lost_elsewhere(2)
    assert changes == [(5, 3)] and hears(client, losses) and not hears(client, losses)
    assert changes[-1] == (5, 5) and not losses.untold
    NO_CLIENT.lost_elsewhere(2)
    assert losses.count == 5


# -- the flushes of a LUN -------------------------------------------------------------------------


pytestmark = pytest.mark.logs(logs.LOST_WRITES)

Change = Callable[[Bench], Operation[None]]
_CHANGES: dict[str, Change] = {
    "fua": lambda bench: bench.disk.write(BLOCK, 0, True),
    "part of a block": lambda bench: bench.disk.write(BLOCK[:100], 7, True),
    "trim": lambda bench: bench.disk.trim(0, 4096, True),
    "zero": lambda bench: bench.disk.zero(0, 512, False, False, True),
}


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Its LUN has no FUA: a flush stands in for it."""
    made = Bench()
    made.disk.info = replace(made.disk.info, fua=False)
    yield made
    made.session.fail(IserblkError("end of test"))
    made.peer.close()


def flush_fails(bench: Bench, client: FlushClient | None) -> bool:
    """Whether it does; the client is told then."""
    try:
        bench.run(bench.disk.flush(client=client))
    except WritesLost as error:
        if client is not None:
            client.told(error.losses)
        return True
    return False


def lose(bench: Bench) -> None:
    bench.write(7)
    bench.read(DEFERRED)


def test_clients_of_a_lun(bench: Bench) -> None:
    clients = [bench.disk.durability.losses.new_client() for _ in range(2)]
    lose(bench)
    for each in (*clients, None):  # the last is the disk's own
        assert flush_fails(bench, each) and not flush_fails(bench, each)


def test_until_the_answer_has_arrived_a_client_is_owed_it(bench: Bench) -> None:
    client = bench.disk.durability.losses.new_client()
    lose(bench)
    for _ in range(2):
        with pytest.raises(WritesLost):
            bench.run(bench.disk.flush(client=client))
    assert flush_fails(bench, client) and not flush_fails(bench, client)


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_a_change_that_ends_with_a_flush_pays_for_no_other(bench: Bench, change: Change) -> None:
    lose(bench)
    for _ in range(2):
        bench.run(change(bench))
    assert bench.peer.heard[-1].operation == SYNC
    assert bench.flush_fails() and not bench.flush_fails()


@pytest.mark.parametrize("length", [1024, 4096], ids=["full", "larger than the journal"])
def test_a_flush_for_the_journal_pays_for_no_client(bench: Bench, length: int) -> None:
    bench.disk.keep_journal(1024)
    lose(bench)
    for _ in range(2):
        bench.run(bench.disk.write(memoryview(bytes(length)), 0))
    assert SYNC in [heard.operation for heard in bench.peer.heard]
    assert bench.flush_fails() and not bench.flush_fails()


@pytest.mark.parametrize("change", ["fua", "zero"])
def test_a_change_that_was_lost_itself_is_made_again(bench: Bench, change: str) -> None:
    """The loss is heard of when the change has been carried out, and its flush is on its way."""
    operation = bench.begin(_CHANGES[change](bench))
    reading = bench.begin(bench.disk.read(memoryview(bytearray(512)), 0))
    bench.answer(b"")
    next(operation)  # it flushes
    bench.answer(POWER_ON, b"")
    first = len(bench.peer.heard)
    bench.end(operation)
    bench.end(reading)
    sent = [heard.operation for heard in bench.peer.heard[first:]]
    assert sent.count(SYNC) == 1 and bench.peer.heard[0].operation in sent
    assert bench.flush_fails() and not bench.flush_fails()


def test_a_change_that_is_lost_again_and_again_fails(bench: Bench) -> None:
    operation = bench.begin(bench.disk.write(BLOCK, 0, True))
    with pytest.raises(WritesLost, match="this write, twice"):
        for sense in (b"", DEFERRED, b"", b"", DEFERRED, b""):
            bench.answer(sense)
            next(operation)
    assert bench.flush_fails() and not bench.flush_fails()


def test_a_flush_that_fails_by_itself_takes_no_loss(bench: Bench) -> None:
    lose(bench)
    client = bench.disk.durability.losses.new_client()
    with pytest.raises(IserblkError) as caught:
        bench.run(bench.disk.flush(client=client), MEDIUM_ERROR)
    assert not isinstance(caught.value, WritesLost)
    client.told(caught.value.losses)
    assert flush_fails(bench, None)
