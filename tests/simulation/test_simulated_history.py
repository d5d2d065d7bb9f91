"""The checker: what is right passes, and each rule that is broken is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.history import Change, History, Wrong, content

SIZE = 512
BLOCKS = 4


class Play:
    """A history with a clock that goes on by one with each step."""

    def __init__(self, keeps: bool = True) -> None:
        self.history = History(BLOCKS, SIZE, keeps)
        self.now = 0.0

    def step(self) -> float:
        self.now += 1.0
        return self.now

    def begin(
        self, at: int = 0, count: int = 1, zeroes: bool = False, trim: bool = False
    ) -> Change:
        return self.history.begin_change(0, 1, self.step(), zeroes or trim, trim)

    def end(self, change: Change, done: bool = True, fua: bool = False) -> None:
        self.history.end_change(change, self.step(), done, fua)

    def write(self, fua: bool = False) -> Change:
        change = self.begin()
        self.end(change, fua=fua)
        return change

    def read(self, version: int, at: int = 0) -> None:
        read = self.history.begin_read(at, self.step())
        self.history.end_read(read, content(version, at, SIZE), self.step())

    def refuses(self, version: int) -> None:
        with pytest.raises(Wrong, match=f"version {version}"):
            self.read(version)

    def flush(self) -> None:
        begun = self.step()
        self.history.end_flush(begun, self.step())

    def tell(self) -> None:
        begun = self.step()
        self.history.end_flush_with_loss(begun, self.step())

    def strike(self, kept: int = 0, in_place: bool = False, unnoticed: bool = False) -> None:
        """The medium has what was bound: ``kept``, else nothing."""
        medium = content(kept, 0, SIZE) + bytes((BLOCKS - 1) * SIZE)
        self.history.struck(self.step(), medium, in_place, unnoticed)

    def lose_line(self) -> None:
        self.history.disturbed(self.step())

    def evict(self) -> None:
        self.history.evicted()

    def die(self) -> None:
        self.history.died(self.step())


@pytest.fixture
def play() -> Play:
    return Play()


@pytest.fixture
def careless() -> Play:
    """The client keeps nothing."""
    return Play(keeps=False)


# -- reads -----------------------------------------------------------------------------------------


def test_nothing_was_written(play: Play) -> None:
    play.read(0)
    play.refuses(1)


def test_the_last_that_is_done(play: Play) -> None:
    first, second = play.write(), play.write()
    play.read(second.version)
    play.refuses(first.version)
    play.refuses(0)


def test_one_that_is_under_way_may_be_seen_or_not(play: Play) -> None:
    first = play.write()
    second = play.begin()
    play.read(first.version)
    play.read(second.version)
    play.end(second)
    play.refuses(first.version)


def test_one_that_has_failed_may_be_seen_or_not(play: Play) -> None:
    first, second = play.write(), play.begin()
    play.end(second, done=False)
    play.read(first.version)
    play.read(second.version)


def test_of_two_at_a_time_either_may_be_last(play: Play) -> None:
    for last in (0, 1):
        both = [play.begin(), play.begin()]
        for change in both:
            play.end(change)
        play.lose_line()  # what was read before says nothing now
        play.read(both[last].version)


def test_a_read_that_began_before_it_may_miss_it(play: Play) -> None:
    read = play.history.begin_read(0, play.step())
    change = play.write()
    play.history.end_read(read, content(0, 0, SIZE), play.step())
    play.read(change.version)


def test_what_was_seen_stays(play: Play) -> None:
    """Also of changes that are not done: until a connection is lost."""
    first = play.begin()
    play.end(first, done=False)
    second = play.begin()
    play.read(second.version)
    play.refuses(first.version)
    play.lose_line()
    play.read(first.version)


def test_what_was_seen_may_have_been_lost_before(careless: Play) -> None:
    """And was shown by a kernel that has dropped the page since then."""
    first, second = careless.write(fua=True), careless.write()
    careless.strike(kept=first.version, in_place=True)
    careless.read(second.version)
    careless.refuses(first.version)
    careless.evict()
    careless.read(first.version)


def test_what_was_seen_while_a_connection_was_lost_says_nothing(play: Play) -> None:
    """It may have been read before that."""
    first = play.begin()
    play.end(first, done=False)
    second = play.begin()
    read = play.history.begin_read(0, play.step())
    play.lose_line()
    play.history.end_read(read, content(second.version, 0, SIZE), play.step())
    play.read(first.version)


def test_of_two_reads_at_a_time_either_may_be_first(play: Play) -> None:
    first = play.begin()
    play.end(first, done=False)
    second = play.begin()
    read = play.history.begin_read(0, play.step())
    play.read(second.version)
    play.history.end_read(read, content(first.version, 0, SIZE), play.step())


def test_zeroes_are_those_of_any_change(play: Play) -> None:
    """They do not tell of which: of one that is newer than what was read before."""
    change = play.begin()
    play.end(change, done=False)
    play.read(change.version)
    play.begin(zeroes=True)
    play.read(0)


def test_a_slow_read_shows_what_was_there_when_it_began(play: Play) -> None:
    play.write()
    play.flush()
    read = play.history.begin_read(0, play.step())
    for _ in range(3):
        play.write()
        play.flush()
    play.history.end_read(read, content(1, 0, SIZE), play.step())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: bytes(SIZE - 16) + data[:16],
        lambda data: data[:256] + bytes(256),
        lambda _data: content(1, 1, SIZE),
        lambda _data: b"\xee" * SIZE,
    ],
    ids=["moved", "half", "of another block", "junk"],
)
def test_bytes_that_nobody_wrote(play: Play, spoil: Callable[[bytes], bytes]) -> None:
    change = play.write()
    data = play.history.data(change)
    read = play.history.begin_read(0, play.step())
    with pytest.raises(Wrong, match="nobody has written"):
        play.history.end_read(read, spoil(data), play.step())


def test_zeroes_and_trims(play: Play) -> None:
    play.write()
    play.end(play.begin(trim=True))
    play.read(1)
    play.read(0)
    play.end(play.begin(zeroes=True))
    play.refuses(1)
    play.history.check_hole(0, BLOCKS, play.step())
    change = play.write()
    with pytest.raises(Wrong, match="hole"):
        play.history.check_hole(0, BLOCKS, play.step())
    play.read(change.version)


# -- flushes, and losses of the client -------------------------------------------------------------


def test_a_flush_binds(play: Play) -> None:
    first = play.write()
    play.flush()
    second = play.write()
    play.die()
    play.refuses(0)
    play.read(first.version)
    play.refuses(second.version)  # it has shown what is there


def test_what_is_not_flushed_may_be_there(play: Play) -> None:
    play.write()
    play.flush()
    second = play.write()
    play.die()
    play.read(second.version)
    play.refuses(1)


def test_fua_binds(play: Play) -> None:
    change = play.write(fua=True)
    play.die()
    play.refuses(0)
    play.read(change.version)


def test_a_flush_does_not_bind_what_was_under_way(play: Play) -> None:
    change = play.begin()
    begun = play.step()
    play.end(change)
    play.history.end_flush(begun, play.step())
    play.die()
    play.read(0)


def test_a_journal_hides_what_the_target_loses(play: Play) -> None:
    change = play.write()
    play.strike()
    with pytest.raises(Wrong, match="nothing was lost"):
        play.tell()
    play.refuses(0)
    play.read(change.version)
    play.flush()
    with pytest.raises(Wrong, match="nothing was lost"):
        play.tell()


def test_a_journal_hides_what_a_loss_meets_while_it_is_under_way(play: Play) -> None:
    first, change = play.write(), play.begin()
    play.strike()
    play.end(change)
    play.refuses(first.version)


# -- losses that are told --------------------------------------------------------------------------


def test_what_is_overwritten_may_be_there_behind_a_loss(careless: Play) -> None:
    """Also several changes before."""
    for _ in range(4):
        careless.write()
    careless.strike()
    for version in (0, 1, 2, 4):
        careless.lose_line()  # what was read before says nothing now
        careless.read(version)


def test_a_write_with_fua_that_a_loss_meets_is_there(careless: Play) -> None:
    first, change = careless.write(), careless.begin()
    careless.strike()
    careless.end(change, fua=True)
    careless.refuses(first.version)


def test_a_flush_binds_what_a_loss_met_while_it_was_under_way(careless: Play) -> None:
    first = careless.write()
    careless.flush()
    change = careless.begin()
    careless.strike(kept=first.version)
    careless.end(change)
    careless.flush()
    careless.refuses(first.version)


def test_a_write_with_fua_that_has_failed_may_be_told(careless: Play) -> None:
    careless.flush()
    careless.end(careless.begin(), done=False, fua=True)
    careless.lose_line()
    careless.tell()


def test_a_flush_beside_a_change_that_met_a_lost_connection(careless: Play) -> None:
    """It covers no change that ends behind its begin: a later one may tell."""
    change = careless.begin()
    careless.lose_line()
    begun = careless.step()
    careless.end(change)
    careless.history.end_flush(begun, careless.step())
    careless.tell()


def test_a_flush_that_was_carried_out_before_a_loss_leaves_nothing_to_tell(careless: Play) -> None:
    history = careless.history
    careless.write()
    begun = careless.step()
    careless.strike()
    history.end_flush(begun, careless.step())
    history.end_flush(careless.step(), careless.step(), history.begin_hearer())


def test_who_begins_behind_a_lost_connection_may_be_told(careless: Play) -> None:
    history = careless.history
    careless.write()
    careless.lose_line()
    late = history.begin_hearer()
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=late)


def test_who_begins_anew_where_nothing_was_lost(careless: Play) -> None:
    careless.history.settle_hearer(careless.history.begin_hearer(anew=True))
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()


def test_who_may_be_another_lets_others_be_told_again(careless: Play) -> None:
    history = careless.history
    history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    history.begin_hearer(anew=True)
    careless.tell()


def test_who_has_ended_is_owed_nothing(careless: Play) -> None:
    history = careless.history
    history.end_hearer(history.begin_hearer())
    careless.write()
    careless.strike()
    careless.tell()
    late = history.begin_hearer(anew=True)
    history.settle_hearer(late)
    history.end_flush(careless.step(), careless.step(), late)


def test_who_ends_behind_a_lost_connection(careless: Play) -> None:
    """It may come back, and be told: others may be, too."""
    history = careless.history
    other = history.begin_hearer()
    careless.write()
    careless.lose_line()
    careless.flush()
    history.end_hearer(other)
    careless.tell()


@pytest.mark.parametrize("anew", [False, True])
def test_who_ends_and_has_not_flushed_is_told_when_it_comes_back(
    careless: Play, anew: bool
) -> None:
    """Another was told before."""
    history = careless.history
    other = history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    if anew:
        other = history.begin_hearer(anew=True)
        history.settle_hearer(other)
    history.end_hearer(other)
    with pytest.raises(Wrong, match="was not told"):
        history.end_flush(careless.step(), careless.step(), history.begin_hearer())


def test_who_ends_and_was_told_leaves_nothing(careless: Play) -> None:
    history = careless.history
    other, told = history.begin_hearer(), history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=told)
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=other, hears=False)
    history.end_hearer(other)
    again = history.begin_hearer()
    history.end_hearer(told)
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=again)
    history.end_flush(careless.step(), careless.step(), history.begin_hearer())


def test_a_loss_is_told_once(careless: Play) -> None:
    change = careless.write()
    careless.strike()
    careless.read(0)
    careless.read(change.version)
    careless.tell()
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()
    careless.flush()
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()
    assert careless.history.losses == 1


def test_a_loss_that_is_not_told(careless: Play) -> None:
    careless.write()
    careless.strike()
    with pytest.raises(Wrong, match="was not told"):
        careless.flush()


def test_what_the_medium_has_is_not_lost(careless: Play) -> None:
    """It may have got there by itself: so it need not be told, but may be."""
    for _ in range(2):
        change = careless.write()
        careless.strike(kept=change.version)
        careless.flush()
    careless.write()
    careless.strike(kept=change.version)
    with pytest.raises(Wrong, match="was not told"):
        careless.flush()


def test_in_trouble_a_loss_may_be_told(careless: Play) -> None:
    careless.history.trouble()
    careless.tell()
    careless.tell()
    careless.die()
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()


def test_fua_is_no_change_that_a_lost_connection_may_lose(careless: Play) -> None:
    careless.write()
    careless.flush()
    careless.write(fua=True)
    careless.lose_line()
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()


def test_a_change_that_met_a_loss_hides_nothing(careless: Play) -> None:
    """It may have been carried out before the loss: no flush has bound it."""
    careless.write()
    change = careless.begin()
    careless.strike()
    careless.end(change)
    careless.read(1)


def test_quiet(careless: Play) -> None:
    careless.strike()
    assert careless.history.is_quiet(careless.step())
    since = careless.step()
    careless.lose_line()
    assert not careless.history.is_quiet(since)
    careless.history.trouble()
    assert not careless.history.is_quiet(careless.step())
    careless.die()
    assert careless.history.is_quiet(careless.step())


def test_a_change_that_met_a_loss_may_be_told(careless: Play) -> None:
    """Also behind a flush that told of it before the change ended; but not for ever."""
    careless.write()
    change = careless.begin()
    careless.strike()
    careless.tell()
    careless.end(change)
    careless.tell()
    careless.write()
    careless.flush()
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()


def test_a_trim_that_is_lost_may_be_told(careless: Play) -> None:
    careless.flush()
    careless.end(careless.begin(trim=True))
    careless.lose_line()
    careless.tell()


def test_what_was_flushed_is_not_lost(careless: Play) -> None:
    change = careless.write()
    careless.flush()
    careless.strike(kept=change.version)
    careless.flush()
    careless.refuses(0)
    careless.read(change.version)


def test_a_loss_of_nothing_is_not_told(careless: Play) -> None:
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()
    careless.write()
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()


def test_a_lost_connection_may_be_taken_for_a_loss(careless: Play) -> None:
    careless.write()
    careless.lose_line()
    careless.flush()  # or not
    careless.write()
    careless.lose_line()
    careless.tell()


def test_a_connection_that_is_lost_with_a_change_under_way(careless: Play) -> None:
    """A flush may tell of it before the change has ended."""
    careless.flush()
    careless.begin()
    careless.lose_line()
    careless.tell()


@pytest.mark.parametrize("keeps", [True, False])
def test_a_flush_that_the_target_could_not_carry_out(keeps: bool) -> None:
    """It tells of that, whatever was lost; where its answer was not heard, another may."""
    play = Play(keeps)
    play.history.end_flush_with_loss(play.step(), play.step(), failed=True)
    with pytest.raises(Wrong, match="nothing was lost"):
        play.tell()
    play.history.end_flush_with_loss(play.step(), play.step(), failed=True, hears=False)
    if not keeps:
        play.tell()


def test_what_a_flush_that_failed_was_to_cover_may_be_lost_later(careless: Play) -> None:
    first = careless.write()
    careless.flush()
    careless.write()
    careless.history.end_flush_with_loss(careless.step(), careless.step(), failed=True)
    careless.refuses(first.version)
    careless.strike(kept=first.version)
    careless.flush()
    careless.read(first.version)


def test_a_change_that_ends_while_its_loss_is_told(careless: Play) -> None:
    """Nothing is promised of it: it is not lost once more."""
    change = careless.begin()
    careless.strike()
    begun = careless.step()
    careless.end(change)
    careless.history.end_flush_with_loss(begun, careless.step())
    careless.strike()
    careless.flush()


def test_flushes_at_a_time_may_tell_both(careless: Play) -> None:
    careless.write()
    careless.strike()
    first, second = careless.step(), careless.step()
    careless.history.end_flush_with_loss(first, careless.step())
    careless.history.end_flush_with_loss(second, careless.step())


def test_a_flush_that_meets_a_loss_beside_another(careless: Play) -> None:
    """It began before the other had bound the change: it may tell of it. No later one may."""
    change = careless.write()
    first = careless.step()
    careless.flush()
    second = careless.step()
    careless.strike(kept=change.version)
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.history.end_flush_with_loss(second, careless.step())
    careless.history.end_flush_with_loss(first, careless.step())


def test_a_loss_that_meets_a_flush_which_tells_of_an_older_one(careless: Play) -> None:
    """The report of it comes later, and may be told then; but not twice."""
    history = careless.history
    careless.write()
    careless.strike()
    begun = careless.step()
    careless.strike(in_place=True)
    history.end_flush_with_loss(begun, careless.step())
    careless.tell()
    with pytest.raises(Wrong, match="nothing was lost"):
        careless.tell()


def test_each_who_flushes_is_told(careless: Play) -> None:
    history = careless.history
    other = history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    careless.flush()
    with pytest.raises(Wrong, match="was not told"):
        history.end_flush(careless.step(), careless.step(), other)
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=other)
    history.end_flush(careless.step(), careless.step(), other)
    with pytest.raises(Wrong, match="nothing was lost"):
        history.end_flush_with_loss(careless.step(), careless.step(), hearer=other)


def test_who_has_not_heard_is_told_again(careless: Play) -> None:
    history = careless.history
    careless.write()
    careless.strike()
    history.end_flush_with_loss(careless.step(), careless.step(), hears=False)
    with pytest.raises(Wrong, match="was not told"):
        careless.flush()
    careless.tell()
    careless.flush()


def test_who_begins_behind_a_loss(careless: Play) -> None:
    """It is told of what nobody was told of."""
    history = careless.history
    careless.write()
    careless.strike()
    early = history.begin_hearer()
    careless.tell()
    late = history.begin_hearer()
    history.end_flush(careless.step(), careless.step(), late)
    with pytest.raises(Wrong, match="was not told"):
        history.end_flush(careless.step(), careless.step(), early)
    with pytest.raises(Wrong, match="nothing was lost"):
        history.end_flush_with_loss(careless.step(), careless.step(), hearer=late)


def test_who_ends_without_being_told(careless: Play) -> None:
    """It may come back as another: others may be told once more."""
    history = careless.history
    other = history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    history.end_hearer(other)
    careless.tell()


@pytest.mark.parametrize("first", [True, False])
def test_who_comes_back_is_told_what_it_has_not_heard(careless: Play, first: bool) -> None:
    """Though another was told, before its end or behind it; until one that came back was told."""
    history = careless.history
    other = history.begin_hearer()
    careless.write()
    careless.strike()
    if first:
        careless.tell()
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=other, hears=False)
    history.end_hearer(other)
    if not first:
        careless.tell()
    again, third = history.begin_hearer(), history.begin_hearer()
    with pytest.raises(Wrong, match="was not told"):
        history.end_flush(careless.step(), careless.step(), again)
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=again)
    with pytest.raises(Wrong, match="was not told"):
        history.end_flush(careless.step(), careless.step(), third)
    history.end_flush(careless.step(), careless.step(), history.begin_hearer())


def test_who_had_begun_before_is_not_the_one_that_comes_back(careless: Play) -> None:
    """What it is told ends nothing that another has not heard."""
    history = careless.history
    other, late = history.begin_hearer(), history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=other, hears=False)
    history.end_hearer(other)
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=late)
    with pytest.raises(Wrong, match="was not told"):
        history.end_flush(careless.step(), careless.step(), history.begin_hearer())


def test_who_begins_while_another_is_told(careless: Play) -> None:
    """It may have begun before that, or behind it: it may be told, or not."""
    history = careless.history
    careless.write()
    careless.strike()
    both = [history.begin_hearer() for _ in range(2)]
    careless.tell()
    for each in both:
        history.settle_hearer(each)
    history.end_flush(careless.step(), careless.step(), both[0])
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=both[1])


@pytest.mark.parametrize("hears", [False, True])
def test_who_may_be_another_is_told_what_that_one_was_not(careless: Play, hears: bool) -> None:
    """It comes again before its end is noticed. Where the other hears meanwhile, it is not that
    one; which of both was first, it cannot know."""
    history = careless.history
    other = history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    late = history.begin_hearer(anew=True)
    if hears:
        history.end_flush_with_loss(careless.step(), careless.step(), hearer=other)
        history.settle_hearer(late)
        history.end_flush(careless.step(), careless.step(), late)
        return
    history.settle_hearer(late)
    with pytest.raises(Wrong, match="was not told"):
        history.end_flush(careless.step(), careless.step(), late)
    for each in (late, other):
        history.end_flush_with_loss(careless.step(), careless.step(), hearer=each)
    last = history.begin_hearer(anew=True)
    history.settle_hearer(last)
    history.end_flush(careless.step(), careless.step(), last)


def test_who_has_not_begun_leaves_nothing(careless: Play) -> None:
    history = careless.history
    other = history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    history.end_hearer(history.begin_hearer(anew=True))
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=other)
    history.end_flush(careless.step(), careless.step(), history.begin_hearer())


def test_what_is_lost_while_one_begins_is_told(careless: Play) -> None:
    history = careless.history
    careless.write()
    late = history.begin_hearer()
    careless.strike()
    history.settle_hearer(late)
    with pytest.raises(Wrong, match="was not told"):
        history.end_flush(careless.step(), careless.step(), late)


def test_who_begins_while_another_ends_is_a_later_one(careless: Play) -> None:
    """What the other had not heard is over when the later one was told."""
    history = careless.history
    other = history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    late = history.begin_hearer()
    history.end_hearer(other)
    history.settle_hearer(late)
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=late)
    history.end_flush(careless.step(), careless.step(), history.begin_hearer())


def test_an_answer_that_may_not_have_been_heard(careless: Play) -> None:
    """Who was told may be told again, and so may others."""
    careless.write()
    careless.strike()
    careless.tell()
    careless.history.leave()
    careless.tell()
    late = careless.history.begin_hearer()
    careless.history.end_flush_with_loss(careless.step(), careless.step(), hearer=late)


def test_a_flush_that_the_target_had_done_before_its_loss(careless: Play) -> None:
    change = careless.write()
    begun = careless.step()
    careless.strike()
    careless.history.end_flush(begun, careless.step())
    careless.flush()
    careless.die()
    careless.read(change.version)


def test_a_change_behind_a_loss_counts(careless: Play) -> None:
    first = careless.write()
    careless.strike()
    careless.tell()
    second = careless.write()
    careless.refuses(first.version)
    careless.flush()
    careless.die()
    careless.refuses(0)
    careless.read(second.version)


def test_what_a_flush_that_told_was_to_cover_is_told(careless: Play) -> None:
    """Also changes behind the loss: it may have made them durable, or not."""
    careless.write()
    careless.strike()
    careless.write()
    careless.tell()
    careless.strike()
    careless.flush()
    careless.write()
    careless.strike()
    with pytest.raises(Wrong, match="was not told"):
        careless.flush()


def test_changes_are_forgotten_in_time(play: Play) -> None:
    """A long run needs no more memory, nor time, than a short one: also behind a read."""
    play.read(0)
    for _ in range(50):
        play.write()
        play.flush()
    assert play.history.candidates(0) <= 3


# -- another host ----------------------------------------------------------------------------------


def test_a_refused_change_never_shows(play: Play) -> None:
    play.write()
    change = play.begin()
    play.end(change, done=False)
    play.history.never(change)
    play.refuses(change.version)
    play.read(1)


def _read_from_outside(play: Play, version: int) -> None:
    read = play.history.begin_read(0, play.step(), foreign=True)
    play.history.end_read(read, content(version, 0, SIZE), play.step())


def test_another_host_sees_what_was_written(play: Play) -> None:
    play.write()
    play.flush()
    play.write()
    _read_from_outside(play, 2)
    play.flush()
    for version in (0, 1):
        with pytest.raises(Wrong, match=f"version {version}"):
            _read_from_outside(play, version)


def test_a_slow_read_by_another_host_shows_what_was_there_when_it_began(play: Play) -> None:
    """Before it was written again, and flushed."""
    play.write()
    play.write()
    play.strike(kept=1)
    read = play.history.begin_read(0, play.step(), foreign=True)
    play.flush()
    play.history.end_read(read, content(1, 0, SIZE), play.step())
    with pytest.raises(Wrong, match="version 1"):
        _read_from_outside(play, 1)


def test_another_host_may_see_what_is_written_again_later(play: Play) -> None:
    """The client itself does not."""
    play.write()
    play.flush()
    play.write()
    play.strike(kept=1)
    _read_from_outside(play, 1)
    play.refuses(1)


@pytest.fixture
def behind(play: Play) -> Play:
    """A report of the loss of what was not flushed may be on its way on another connection."""
    play.history = History(BLOCKS, SIZE, several=True)
    play.write()
    play.flush()
    play.write()
    play.strike(kept=1, in_place=True)
    return play


def test_a_report_may_come_behind_a_read(behind: Play) -> None:
    """What was flushed is there all the same."""
    behind.read(1)
    behind.read(2)
    behind.refuses(0)


@pytest.mark.parametrize(
    "ends",
    [
        lambda play: play.history.heard(),
        lambda play: play.flush(),
        lambda play: play.strike(kept=1),
    ],
    ids=["heard", "flushed", "connections lost"],
)
def test_behind_a_report_a_read_shows_what_was_written(
    behind: Play, ends: Callable[[Play], None]
) -> None:
    ends(behind)
    behind.read(2)
    behind.refuses(1)


def test_behind_a_flush_no_report_is_on_its_way(behind: Play) -> None:
    """Also for what the flush does not cover."""
    begun = behind.step()
    behind.write()
    behind.history.end_flush(begun, behind.step())
    behind.read(3)
    behind.refuses(2)


@pytest.mark.parametrize(("several", "in_place"), [(False, True), (True, False)])
def test_a_report_on_its_way_needs_another_connection(
    play: Play, several: bool, in_place: bool
) -> None:
    play.history = History(BLOCKS, SIZE, several=several)
    play.write()
    play.strike(in_place=in_place)
    play.refuses(0)


def _unnoticed() -> Play:
    """The target has dropped what was not flushed, and tells of it with the next flush."""
    play = Play()
    play.write()
    play.flush()
    play.write()
    play.strike(kept=1, in_place=True, unnoticed=True)
    return play


def test_what_is_dropped_unnoticed_shows_what_was_flushed() -> None:
    """Also once the flush has failed, until the client has heard of that; and no less."""
    play = _unnoticed()
    play.read(1)
    play.strike(kept=1, in_place=True)
    play.read(1)
    play.refuses(0)
    play.history.heard()
    play.read(2)
    play.refuses(1)


@pytest.mark.parametrize("begins", ["before the loss", "before it is heard", "behind that"])
def test_a_read_during_which_something_is_dropped_unnoticed(begins: str) -> None:
    """A part of it may have been read meanwhile."""
    play = Play()
    play.write()
    play.flush()
    play.write()
    read = play.history.begin_read(0, play.step())
    play.strike(kept=1, in_place=True, unnoticed=True)
    if begins == "before it is heard":
        read = play.history.begin_read(0, play.step())
    play.strike(kept=1, in_place=True)  # a flush has failed
    play.history.heard()
    if begins == "behind that":
        read = play.history.begin_read(0, play.step())
        with pytest.raises(Wrong, match="version 1"):
            play.history.end_read(read, content(1, 0, SIZE), play.step())
    else:
        play.history.end_read(read, content(1, 0, SIZE), play.step())


def test_what_is_dropped_unnoticed_may_be_a_hole_again() -> None:
    play = Play()
    play.write()
    play.strike(in_place=True, unnoticed=True)
    play.history.check_hole(0, 1, play.step())
    play.strike(in_place=True)  # a flush has failed
    play.history.heard()
    with pytest.raises(Wrong, match="hole"):
        play.history.check_hole(0, 1, play.step())


def test_a_write_with_fua_that_was_given_up_may_have_told_of_a_loss() -> None:
    play = Play()
    play.history = History(BLOCKS, SIZE, keeps=False)
    play.write()
    with pytest.raises(Wrong, match="nothing was lost"):
        play.tell()
    play.history.given_up()
    play.tell()


def test_what_is_dropped_while_the_journal_is_sent_again_is_not_heard_with_it() -> None:
    play = _unnoticed()
    play.strike(kept=1, in_place=True)  # a flush has failed
    play.strike(kept=1, in_place=True, unnoticed=True)
    play.history.heard()
    play.read(1)
    play.flush()
    play.refuses(1)


def _hindered() -> Play:
    """One that is hindered has written twice, and the target has lost what was not flushed."""
    hindered = Play()
    hindered.history = History(BLOCKS, SIZE, hindered=True)
    hindered.write()
    hindered.flush()
    hindered.write()
    hindered.strike(kept=1)
    return hindered


def test_a_client_that_is_hindered_may_take_anything_for_a_loss() -> None:
    """So it does where the other host refuses what it writes again."""
    hindered = Play()
    hindered.history = History(BLOCKS, SIZE, hindered=True)
    hindered.tell()


def test_a_client_that_is_hindered_may_lose_and_tells() -> None:
    hindered = _hindered()
    hindered.read(1)
    hindered.tell()
    hindered.flush()
    hindered.read(1)


def test_a_client_that_is_hindered_and_tells_nothing_has_lost_nothing() -> None:
    hindered = _hindered()
    hindered.flush()
    hindered.read(2)
    hindered.refuses(1)


# -- the client dies ------------------------------------------------------------------------------


def test_what_a_client_saw_that_has_died(play: Play) -> None:
    """The target has lost its cache with it: what was there may be older."""
    first = play.begin()
    play.end(first, done=False)
    second = play.begin()
    play.read(second.version)
    play.die()
    play.read(first.version)


def test_what_was_under_way_of_a_client_that_has_died_is_overwritten(play: Play) -> None:
    change = play.begin()
    play.die()
    play.write()
    play.refuses(change.version)


def test_a_report_on_its_way_to_a_client_that_has_died(behind: Play) -> None:
    behind.die()
    behind.write()
    behind.refuses(1)


def test_what_a_client_that_has_died_was_owed_is_not_the_next_one_s(careless: Play) -> None:
    """Nor what was told of it, nor what it has not flushed."""
    history = careless.history
    careless.write()
    careless.strike()
    careless.die()
    careless.flush()
    history.end_flush(careless.step(), careless.step(), history.begin_hearer())

    other = history.begin_hearer()
    careless.write()
    careless.strike()
    careless.tell()
    history.end_flush_with_loss(careless.step(), careless.step(), hearer=other, hears=False)
    history.end_hearer(other)
    careless.die()
    history.end_flush(careless.step(), careless.step(), history.begin_hearer())

    careless.write()
    careless.die()
    careless.strike()
    careless.flush()


def test_the_next_client_is_told_of_its_own(careless: Play) -> None:
    careless.die()
    careless.write()
    careless.strike()
    with pytest.raises(Wrong, match="was not told"):
        careless.flush()


def test_a_change_of_a_client_that_has_died(play: Play) -> None:
    """It has ended with its client."""
    change = play.begin()
    play.die()
    play.end(change)
    play.read(0)


def test_a_read_of_a_client_that_has_died(play: Play) -> None:
    """Whatever it shows: nobody sees it."""
    read = play.history.begin_read(0, play.step())
    play.die()
    play.history.end_read(read, content(7, 0, SIZE), play.step())
