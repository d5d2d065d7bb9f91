"""The journal by itself, on both forms of its copies, the compiled one and the plain one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random

import pytest

from iserblk.commands.command import NO_BYTES, SENT, TAKEN, Command, PlainCommand
from iserblk.disk.durability import copies, journal
from iserblk.disk.durability.copies import CHUNK
from iserblk.disk.durability.journal import SMALL, MemoryJournal
from iserblk.scsi import opcodes

BLOCK = 512

Make = Callable[[int], tuple[MemoryJournal, list[PlainCommand]]]


def compiled() -> type[copies.Copies]:
    module = pytest.importorskip(
        "iserblk.disk.durability._copies", reason="not compiled: run scripts/setup"
    )
    form: type[copies.Copies] = module.Copies
    return form


def plain() -> type[copies.Copies]:
    return copies.Copies


@pytest.fixture(params=[plain, compiled])
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(journal, "Copies", request.param())

    def made(limit: int) -> tuple[MemoryJournal, list[PlainCommand]]:
        slots = [PlainCommand(index) for index in range(10)]
        for slot in slots:
            slot.state = SENT
        return MemoryJournal(limit, BLOCK, slots), slots

    return made


def test_the_compiled_form_is_taken() -> None:
    try:
        from iserblk.disk.durability import _copies  # noqa: PLC0415 (may be missing)
    except ImportError:
        assert journal.Copies is copies.Copies  # type: ignore[attr-defined]
    else:
        assert journal.Copies is _copies.Copies  # type: ignore[attr-defined]
        assert _copies.Copies.__module__ == "iserblk.disk.durability._copies"


def _add(
    journal: MemoryJournal,
    slot: Command,
    blocks: range,
    data: memoryview | None,
    command: bytes = b"",
) -> None:
    slot.first, slot.last = blocks.start, blocks.stop - 1
    journal.add(slot, data, command)


def test_copies_go_on_in_the_next_chunk(make: Make) -> None:
    journal, slots = make(8 * CHUNK)
    data = bytes(range(256)) * 2 * 1300  # not a divisor of a chunk
    for number in range(5):
        first = number * 1300
        buffer = bytearray(data)
        _add(journal, slots[number], range(first, first + 1300), memoryview(buffer))
        slots[number].state = TAKEN
        journal.ended(slots[number])
        buffer[:] = bytes(len(buffer))
    assert journal.size == 5 * len(data)
    entries = journal.begin_replay()
    assert b"".join(entry.data or b"" for entry in entries) == data * 5
    at = 0
    for entry in entries:
        assert entry.first == at
        at = entry.last + 1
    # What is flushed meanwhile stays where it is: it is being sent.
    journal.flushed(journal.begin_flush())
    _add(journal, slots[9], range(1), memoryview(bytes(512)))
    slots[9].state = TAKEN
    journal.ended(slots[9])
    assert b"".join(entry.data or b"" for entry in entries) == data * 5
    journal.end_replay()


def test_chunks_that_are_used_again_forget_what_they_held(make: Make) -> None:
    journal, slots = make(8 * CHUNK)
    for content in range(1, 4):
        for number in range(CHUNK // 512 + 3):  # a chunk and a bit of the smallest writes
            _add(journal, slots[0], range(number, number + 1), memoryview(bytes([content]) * 512))
            journal.keep(slots[0])
        entries = journal.begin_replay()
        assert [entry.first for entry in entries] == list(range(CHUNK // 512 + 3))
        assert {bytes(entry.data or b"") for entry in entries} == {bytes([content]) * 512}
        journal.end_replay()
        journal.flushed(journal.begin_flush())
        assert journal.begin_replay() == [] and journal.size == 0
        journal.end_replay()


def test_only_what_succeeded_is_kept(make: Make) -> None:
    journal, slots = make(CHUNK)
    good, bad, _ = slots[:3]
    for number, slot in enumerate(slots[:3]):
        _add(journal, slot, range(number, number + 1), memoryview(bytes((number,)) * 512))
    for slot in (good, bad):
        slot.state = TAKEN
    bad.status = 2
    assert [entry.first for entry in journal.begin_replay()] == [0]  # the journal was not told yet
    journal.end_replay()
    for slot in (good, bad):
        journal.ended(slot)
    assert journal.size == 512 and journal.active
    _add(journal, slots[3], range(10), None, b"command")
    slots[3].state = TAKEN
    journal.ended(slots[3])
    assert journal.size == 512 + SMALL
    assert [entry.command_block for entry in journal.begin_replay()] == [b"", b"command"]


def test_what_a_block_was_changed_to_last(make: Make) -> None:
    """Whatever has become of the change: it is copied, in the caller's buffer, or in one that was
    taken over; a flush is under way, has failed or has succeeded; it fell into two chunks."""
    chance = Random(3)
    journal, slots = make(8 * CHUNK)
    blocks = CHUNK // BLOCK + 40
    last: dict[int, int | None] = {}
    for number in range(1, 300):
        slot = slots[0]
        slot.state = SENT
        first = chance.randrange(blocks)
        count = chance.choice([1, 1, 2, 30, 300])
        changed = range(first, first + count)
        kind = chance.choice(["copied", "view", "taken over", "zero", "unmap", "fails"])
        values = {block: (number + block) % 255 + 1 for block in changed}
        data = b"".join(bytes([value]) * BLOCK for value in values.values())
        buffer = bytearray(data)
        command = {"zero": b"\x93", "unmap": b"\x42"}.get(kind, b"")
        _add(journal, slot, changed, None if command else memoryview(buffer), command)
        assert_newest(journal, last, blocks)  # it has not ended
        slot.state = TAKEN
        slot.status = 2 if kind == "fails" else 0
        if kind == "taken over":
            assert journal.take_over(slot, buffer) is not None
        else:
            journal.ended(slot, copy=kind != "view")
        if kind == "copied":
            buffer[:] = bytes(len(buffer))
        if kind in ("zero", "unmap"):
            last.update(dict.fromkeys(changed, 0 if kind == "zero" else None))
        elif kind != "fails":
            last.update(values)
        if number % 50 == 0:
            journal.not_flushed(journal.begin_flush())
        if number == 150:
            journal.flushed(journal.begin_flush())
            last.clear()
    assert_newest(journal, last, blocks, every=1)


@pytest.mark.parametrize("kinds", list(product(("copied", "view"), repeat=2)))
def test_of_changes_that_were_under_way_at_once_the_last_one_begun_counts(
    make: Make, kinds: tuple[str, str]
) -> None:
    """As when the journal is sent again; in whatever order they have ended."""
    journal, slots = make(CHUNK)
    for number, slot in enumerate(slots[:2], 1):
        _add(journal, slot, range(3, 7), memoryview(bytes([number]) * 4 * BLOCK))
    for slot, kind in zip(reversed(slots[:2]), kinds, strict=True):
        slot.state = TAKEN
        journal.ended(slot, copy=kind != "view")
    assert [journal.newest(block) for block in range(2, 8)] == [None, *[b"\2" * BLOCK] * 4, None]


def assert_newest(
    journal: MemoryJournal, last: dict[int, int | None], blocks: int, every: int = 97
) -> None:
    for block in range(0, blocks + 300, every):
        found, value = journal.newest(block), last.get(block)
        assert (None if found is None else bytes(found)) == (
            None if value is None else bytes([value]) * BLOCK
        )


@pytest.mark.parametrize("kind", ["copied", "view", "zeroes"])
def test_what_is_given_up_is_kept_no_more(make: Make, kind: str) -> None:
    """Until a flush succeeds; what is changed behind that is kept as ever."""
    journal, slots = make(CHUNK)

    def change(slot: PlainCommand, blocks: range, number: int) -> None:
        command = bytes([opcodes.WRITE_SAME_16]) if kind == "zeroes" else b""
        data = None if command else memoryview(bytes([number]) * BLOCK * len(blocks))
        _add(journal, slot, blocks, data, command)
        slot.state = TAKEN
        journal.ended(slot, copy=kind != "view")

    def kept() -> list[tuple[int, int, int]]:
        found = journal.begin_replay()
        journal.end_replay()
        return [(each.first, each.last, (each.data or b"\0")[0]) for each in found]

    change(slots[0], range(2, 8), 1)
    change(slots[1], range(20, 22), 2)
    journal.not_flushed(journal.begin_flush())  # another batch follows
    entries = journal.begin_replay()
    journal.give_up(entries, [(0, 2), (4, 5), (9, 30)])
    journal.end_replay()
    value = 0 if kind == "zeroes" else 1
    assert kept() == [(3, 3, value), (6, 7, value)]
    change(slots[2], range(4, 5), 3)
    assert kept() == [(3, 3, value), (6, 7, value), (4, 4, 3 * value)]
    known = [journal.newest(block) is not None for block in range(2, 9)]
    assert known == [False, True, True, False, True, True, False]
    covered = journal.begin_flush()
    assert kept() == [(3, 3, value), (6, 7, value), (4, 4, 3 * value)]
    journal.flushed(covered)
    assert kept() == [] and journal.size == 0


def test_what_is_left_of_a_change_has_the_data_of_its_own_blocks(make: Make) -> None:
    """Parts of it are given up one after another, in several batches."""
    journal, slots = make(CHUNK)
    data = b"".join(bytes([at]) * BLOCK for at in range(8))
    _add(journal, slots[0], range(10, 18), memoryview(data))
    slots[0].state = TAKEN
    journal.ended(slots[0])
    for lost in (11, 14, 17):
        journal.give_up(journal.begin_replay(), [(lost, lost)])
        journal.end_replay()
        _add(journal, slots[1], range(30, 31), memoryview(data[:BLOCK]))
        slots[1].state = TAKEN
        journal.ended(slots[1])
        journal.not_flushed(journal.begin_flush())
    found = journal.begin_replay()[:3]
    journal.end_replay()
    assert [(each.first, each.last) for each in found] == [(10, 10), (12, 13), (15, 16)]
    for each in found:
        assert bytes(each.data or b"") == data[(each.first - 10) * BLOCK : (each.last - 9) * BLOCK]


@pytest.mark.parametrize("looks", ["behind the flush", "while it is under way"])
@pytest.mark.parametrize("merged", [False, True])
def test_what_is_given_up_before_its_caller_has_looked_stays_so(
    make: Make, merged: bool, looks: str
) -> None:
    """A flush that has begun before does not cover it."""
    journal, slots = make(CHUNK)
    for slot, number in zip(slots, (1, 2), strict=False):
        _add(journal, slot, range(4 * number, 4 * number + 2), memoryview(b"\1" * BLOCK * 2))
        slot.state = TAKEN
    journal.ended(slots[0])
    entries = journal.begin_replay()
    assert [each.first for each in entries] == [4, 8]
    journal.give_up(entries, [(9, 9)])
    journal.end_replay()
    if merged:
        journal.not_flushed(journal.begin_flush())
    covered = journal.begin_flush()
    if looks == "behind the flush":
        journal.flushed(covered)
    journal.ended(slots[1])
    if looks == "while it is under way":
        journal.flushed(covered)
    assert [(each.first, each.last) for each in journal.begin_replay()] == [(8, 8)]
    journal.end_replay()
    assert journal.newest(8) is not None and journal.newest(9) is None
    journal.flushed(journal.begin_flush())
    assert not journal.size and not journal.begin_replay()


def test_changes_of_another_lun_of_the_session_are_not_its_own(make: Make) -> None:
    """The LUNs of a session have one journal each, over the same task slots."""
    journal, slots = make(CHUNK)
    another = MemoryJournal(CHUNK, BLOCK, slots)
    _add(another, slots[1], range(1), memoryview(bytes(512)))
    slots[1].state = TAKEN
    assert another.active and another.has(slots[1])
    assert not journal.active and not journal.has(slots[1]) and journal.begin_replay() == []


def test_a_buffer_that_is_given_back_after_a_flush_began_is_copied(make: Make) -> None:
    """The flush may fail, and then a replay needs the copy."""
    journal, slots = make(CHUNK)
    buffers = [bytearray([number]) * BLOCK for number in range(2)]
    numbers = []
    for number, buffer in enumerate(buffers):
        _add(journal, slots[number], range(number, number + 1), memoryview(buffer))
        slots[number].state = TAKEN
        numbers.append(journal.ended(slots[number], copy=False))
        if not number:
            failed = journal.begin_flush()
    journal.settle(numbers)
    for buffer in buffers:
        buffer[:] = b"\xee" * BLOCK
    entries = journal.begin_replay()
    assert [bytes(entry.data or b"") for entry in entries] == [bytes([n]) * BLOCK for n in (0, 1)]
    journal.end_replay()
    journal.flushed(failed)  # as if another had covered it
    assert [entry.first for entry in journal.begin_replay()] == [1] and journal.size == BLOCK


def test_a_buffer_that_is_gone_leaves_everything_in_order(make: Make) -> None:
    journal, slots = make(CHUNK)
    _add(journal, slots[0], range(1), memoryview(b"1" * BLOCK))
    journal.keep(slots[0])
    gone = memoryview(bytearray(BLOCK))
    gone.release()
    _add(journal, slots[1], range(1, 2), gone)
    with pytest.raises(ValueError, match="released"):
        journal.keep(slots[1])
    journal.changes[1].sequence, journal.changes[1].data = 0, NO_BYTES
    _add(journal, slots[2], range(2, 3), memoryview(b"2" * BLOCK))
    journal.keep(slots[2])
    entries = journal.begin_replay()
    assert [(entry.first, bytes(entry.data or b"")) for entry in entries] == [
        (0, b"1" * BLOCK),
        (2, b"2" * BLOCK),
    ]
    assert journal.size == 2 * BLOCK
