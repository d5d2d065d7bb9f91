"""The table of STags."""

from __future__ import annotations

import pytest

from iserblk.errors import LocalProtocolError
from iserblk.rcap.seam import REMOTE_READ, REMOTE_WRITE
from iserblk.rcap.stags import FIRST_ENTRIES, LEAST_FREE, StagTable


def test_an_index_comes_again_last_and_with_another_key() -> None:
    table = StagTable()
    buffer = memoryview(bytearray(8))
    keys: dict[int, list[int]] = {}
    for n in range(3 * FIRST_ENTRIES):
        stag = table.advertise(buffer, REMOTE_WRITE)
        keys.setdefault(stag >> 8, []).append(stag & 255)
        assert (stag >> 8) == n % FIRST_ENTRIES + 1
        table.release(table.owned(stag))
    assert all(len(set(used)) == 3 for used in keys.values())


def test_the_table_grows_with_what_is_advertised_at_once() -> None:
    table = StagTable()
    buffer = memoryview(bytearray(8))
    stags = [table.advertise(buffer, REMOTE_READ) for _ in range(2 * FIRST_ENTRIES)]
    assert len(set(stags)) == len(stags) == table.count()
    assert all(table.find(stag) is not None for stag in stags)
    for stag in stags:
        region = table.owned(stag)
        region.valid = False
        table.release(region)
        assert table.find(stag) is None
    assert table.count() == 0


def test_the_key_wraps() -> None:
    table = StagTable()
    buffer = memoryview(bytearray(8))
    stags = []
    for _ in range(256 * FIRST_ENTRIES + 1):
        stags.append(table.advertise(buffer, REMOTE_READ))
        table.release(table.owned(stags[-1]))
    assert len(set(stags)) == 256 * FIRST_ENTRIES
    assert stags[-1] == stags[0]
    assert {stag & 255 for stag in stags if stag >> 8 == 1} == set(range(256))


@pytest.mark.parametrize("in_use", [1, FIRST_ENTRIES - 1, FIRST_ENTRIES, 1024])
def test_an_index_rests_however_many_are_in_use(in_use: int) -> None:
    """What a peer has in flight for an STag of before must not find another buffer there."""
    table = StagTable()
    buffer = memoryview(bytearray(8))
    for _ in range(in_use - 1):
        table.advertise(buffer, REMOTE_READ)
    indexes = []
    for _ in range(4 * LEAST_FREE):
        stag = table.advertise(buffer, REMOTE_READ)
        indexes.append(stag >> 8)
        table.release(table.owned(stag))
    for at in range(len(indexes) - LEAST_FREE):
        assert len(set(indexes[at : at + LEAST_FREE])) == LEAST_FREE
    assert len(table.regions) <= max(FIRST_ENTRIES, in_use) + LEAST_FREE + 1


@pytest.mark.parametrize("stag", [0, 1, 255, 256, 0x100, 0xFFFFFFFF])
def test_numbers_that_were_never_handed_out(stag: int) -> None:
    table = StagTable()
    table.advertise(memoryview(bytearray(8)), REMOTE_READ)  # 0x101
    assert table.find(stag) is None
    with pytest.raises(LocalProtocolError):
        table.owned(stag)


def test_what_can_be_advertised() -> None:
    table = StagTable()
    with pytest.raises(LocalProtocolError):
        table.advertise(memoryview(bytes(8)), REMOTE_WRITE)
    with pytest.raises(LocalProtocolError):
        table.advertise(memoryview(bytearray(8))[::2], REMOTE_READ)
    words = memoryview(bytearray(16)).cast("I")
    region = table.owned(table.advertise(words, REMOTE_READ | REMOTE_WRITE))
    assert region.length == 16
    assert table.owned(table.advertise(memoryview(b""), REMOTE_READ)).length == 0


@pytest.mark.parametrize("by", ["release", "clear"])
def test_other_threads_may_let_go_of_all_memory_while_some_of_it_dies(by: str) -> None:
    """They run while memory is unmapped. This memory does it itself, and looks what is left."""
    table = StagTable()
    left: list[int] = []

    class Memory(bytearray):
        def __del__(self) -> None:
            table.clear()
            left.append(len(region.view) + region.length)

    region = table.owned(table.advertise(memoryview(Memory(8)), REMOTE_WRITE))
    if by == "release":
        table.release(region)
    else:
        table.clear()
    assert left == [0]
