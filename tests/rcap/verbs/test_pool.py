"""Chunks of registered memory: budgets, sizes, what gives way; and the limit on locked memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from iserblk.errors import Busy, NotSupported
from iserblk.rcap.verbs.pool import SMALLEST, Memory, Pool, PoolChunk, Strip
from tests.rcap.verbs.chunks import pool
from tests.rcap.verbs.fake import FakeEnd


@pytest.mark.parametrize(
    ("asked", "size"),
    [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (65536, 65536), (1 << 19, 1 << 19)],
)
def test_sizes(asked: int, size: int) -> None:
    chunks, end = pool()
    chunk = chunks.take(asked)
    assert chunk.size == len(chunk.view) == size == end.registered
    chunk.view[:] = b"x" * size


def test_a_chunk_is_used_again_and_a_larger_one_rather_than_a_new_one() -> None:
    chunks, end = pool()
    first = chunks.take(16384)
    chunks.give(first)
    assert chunks.take(9000) is first
    chunks.give(first)
    assert chunks.take(4096) is first
    assert chunks.take(4096) is not first
    assert end.registered == 16384 + 4096


def test_the_budget_holds_and_other_sizes_give_way() -> None:
    chunks, end = pool(budget=64 << 10)
    small = [chunks.take(4096) for _ in range(16)]
    with pytest.raises(Busy, match="until a transfer ends"):
        chunks.take(4096)
    for chunk in small[:8]:
        chunks.give(chunk)
    assert chunks.take(32768).size == 32768
    assert end.registered == 64 << 10
    with pytest.raises(Busy):
        chunks.take(4096)


def test_what_never_fits_is_said() -> None:
    chunks, _ = pool(budget=64 << 10)
    with pytest.raises(NotSupported, match="LimitMEMLOCK"):
        chunks.take(65537)


def test_a_system_that_refuses_is_a_smaller_budget() -> None:
    chunks, _ = pool(limit=10000)
    first = chunks.take(8192)
    with pytest.raises(Busy):
        chunks.take(4096)
    chunks.give(first)
    assert chunks.take(4096).size == 8192
    empty, _ = pool(limit=100)
    with pytest.raises(NotSupported, match="cannot be registered"):
        empty.take(1)


def test_another_error_of_the_system_comes_out() -> None:
    def broken(address: int, length: int, access: int) -> object:
        raise OSError(19, "No such device")

    with pytest.raises(OSError, match="No such device"):
        Pool(broken, 0, 1 << 20).take(1)  # type: ignore[arg-type]


def test_closing_gives_everything_back() -> None:
    chunks, end = pool()
    kept: list[PoolChunk] = [chunks.take(size) for size in (1, 5000, 70000)]
    chunks.give(kept[1])
    chunks.close()
    assert end.registered == 0


def test_memory_is_not_handed_to_children() -> None:
    memory = Memory(SMALLEST)
    region = f"{memory.address:x}-"
    blocks = Path("/proc/self/smaps").read_text().split("\nVmFlags:")
    # Each block's flags stand at the head of the text behind it.
    at = next(i for i, block in enumerate(blocks) if region in block)
    assert " dc" in blocks[at + 1].splitlines()[0]
    memory.close()


def test_slices_outlive_their_memory() -> None:
    memory = Memory(SMALLEST)
    part = memory.view[10:20]
    part[:] = b"0123456789"
    memory.close()
    assert bytes(part) == b"0123456789"


def test_a_strip_is_cut_and_grows() -> None:
    end = FakeEnd(windows=False)
    strip = Strip(end.register, 0, 8192)
    seen = set()
    for size in (1, 76, 8268, 64, 0):
        view, address, key = strip.cut(size)
        assert len(view) == size and address % 64 == 0
        assert end.regions[key].allows(address, size, 0)
        assert address not in seen
        seen.add(address)
    strip.cut(100, 10 * 164)
    strip.close()
    assert end.registered == 0


# --- the limit on locked memory ---
