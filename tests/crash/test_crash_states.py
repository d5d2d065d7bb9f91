"""Which disks a power failure can leave, of a record made by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from iserblk.target.store.lunfile import open_file
from tests.crash.recording import Journal, RecordingStore, data_of
from tests.crash.states import Medium, pieces, read_record

BLOCK = 512
SIZE = 8 * BLOCK


def block(letter: str) -> bytes:
    return letter.encode() * BLOCK


def disks(directory: Path, lines: str, line: int, samples: int = 40) -> dict[str, str]:
    """Name of a state → the first letters of the blocks. ``lines`` of the journal: their data is
    block N of the file of data, which has the Nth letter."""
    journal = directory / "journal"
    journal.write_text(lines)
    data_of(journal).write_bytes(b"".join(map(block, "ABCDEFGH")))
    medium = Medium(read_record(journal), journal, directory / "base", SIZE)
    found = {}
    for state in medium.states(line, random.Random(7), samples, BLOCK):
        image = directory / "image"
        state.write(image)
        content = image.read_bytes()
        letters = [content[at : at + 1].replace(b"\0", b".") for at in range(0, SIZE, BLOCK)]
        found[state.name] = b"".join(letters).decode()
    medium.close()
    return found


FLUSHED = """\
B 1 W 0 1024 0
E 1 W
B 2 W 1024 512 1024
B 3 F 0 0 0
E 2 W
E 3 F
B 4 W 512 512 1536
E 4 W
"""


@pytest.mark.parametrize(
    ("line", "none", "all_of_it"),
    [
        (0, None, "........"),
        (1, "........", "AB......"),
        (5, "........", "ABC....."),  # the flush has not ended
        (6, "AB......", "ABC....."),  # the write that it met under way is not covered
        (8, "AB......", "ADC....."),
    ],
)
def test_moments(tmp_path: Path, line: int, none: str | None, all_of_it: str) -> None:
    found = disks(tmp_path, FLUSHED, line)
    assert found["all"] == all_of_it
    assert found.get("none") == none


def test_each_block_of_what_is_pending_may_be_there_or_not(tmp_path: Path) -> None:
    found = set(disks(tmp_path, FLUSHED, 8).values())
    assert found == {"AB......", "ADC.....", "ABC.....", "AD......"}
    found = set(disks(tmp_path, FLUSHED, 2).values())
    assert found == {"........", "AB......", "A.......", ".B......"}


def test_a_durable_write_is_there_over_older_ones(tmp_path: Path) -> None:
    lines = "B 1 W 0 1024 0\nE 1 W\nB 2 D 512 512 1024\nE 2 D\n"
    assert set(disks(tmp_path, lines, 4).values()) == {"AC......", ".C......"}
    assert disks(tmp_path, lines, 3)["none"] == "........"  # not yet acknowledged


def test_pieces_are_aligned(tmp_path: Path) -> None:
    """Blocks 1 to 4, in pieces of two."""
    lines = "B 1 W 512 2048 0\nE 1 W\n"
    journal = tmp_path / "journal"
    journal.write_text(lines)
    (operation,) = read_record(journal).operations
    assert list(pieces(operation, 1024)) == [(0, 512), (512, 1536), (1536, 2048)]


def test_zeroes(tmp_path: Path) -> None:
    lines = "B 1 W 0 1024 0\nE 1 W\nB 2 F 0 0 0\nE 2 F\nB 3 Z 0 512 0\nE 3 Z\n"
    found = disks(tmp_path, lines, 6)
    assert (found["none"], found["all"]) == ("AB......", ".B......")


def test_what_a_store_records(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    notes = Journal(journal)
    store = RecordingStore(open_file(str(tmp_path / "lun"), size=SIZE), journal)
    assert not store.write(memoryview(block("x")), 0, False, True)  # and nothing is recorded
    store.write(memoryview(block("a")), BLOCK, False, False)
    notes.note(what="made")
    store.write(memoryview(block("b")), 0, True, False)
    store.punch(0, BLOCK)
    store.flush()
    buffer = bytearray(2 * BLOCK)
    store.read_into(memoryview(buffer), 0, False)
    assert buffer == bytes(BLOCK) + block("a")
    store.close()
    notes.close()
    record = read_record(journal)
    kinds = [(each.kind, each.offset, each.length) for each in record.operations]
    assert kinds == [("W", BLOCK, BLOCK), ("D", 0, BLOCK), ("Z", 0, BLOCK), ("F", 0, 0)]
    assert record.begin() == 2 and record.flushes == [7, 8]
    assert data_of(journal).read_bytes() == block("a") + block("b")
