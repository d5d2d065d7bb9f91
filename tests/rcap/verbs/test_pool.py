"""Chunks of registered memory: budgets, sizes, what gives way; and the limit on locked memory."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from iserblk.errors import Busy, NotSupported
from iserblk.rcap.verbs import memlock, queuepair
from iserblk.rcap.verbs.pool import SMALLEST, Chunk, Memory, Pool, Strip
from tests.rcap.verbs.fake import FakeEnd


def pool(budget: int = 1 << 20, limit: int = 1 << 40) -> tuple[Pool, FakeEnd]:
    end = FakeEnd(windows=False, limit=limit)
    return Pool(end.register, 0, budget), end


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
    kept: list[Chunk] = [chunks.take(size) for size in (1, 5000, 70000)]
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


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """A process like most: no capability, and this much of the limit used."""

    def limit(size: int, used_kib: int = 0, capabilities: str = "0000000000000000") -> None:
        status = tmp_path / "status"
        status.write_text(
            f"Name:\tx\nVmLck:\t0 kB\nVmPin:\t{used_kib} kB\nCapEff:\t{capabilities}\n"
        )
        monkeypatch.setattr(memlock, "STATUS", status)
        monkeypatch.setattr(resource, "getrlimit", lambda _which: (size, size))

    return limit


def test_no_limit(limited: object) -> None:
    limited(resource.RLIM_INFINITY)  # type: ignore[operator]
    assert memlock.lockable() is None
    limited(1 << 20, 0, "000001ffffffffff")  # type: ignore[operator]
    assert memlock.lockable() is None, "root may"
    assert queuepair.pool_budget(16, 8268) == queuepair.POOL_BYTES


def test_what_is_left_is_shared_out(limited: object) -> None:
    limited(16 << 20, 1024)  # type: ignore[operator]
    assert memlock.lockable() == 15 << 20
    budget = queuepair.pool_budget(144, 8268)
    assert 5 << 20 < budget < 15 << 19


@pytest.mark.parametrize("size", [0, 64 << 10, 2 << 20])
def test_too_little_is_said_with_the_remedy(limited: object, size: int) -> None:
    limited(size)  # type: ignore[operator]
    with pytest.raises(NotSupported, match=r"locked-memory limit.*KiB are needed.*ulimit -l"):
        queuepair.pool_budget(144, 8268)


def test_the_real_limit_is_read() -> None:
    shown = subprocess.check_output(
        [sys.executable, "-c", "from iserblk.rcap.verbs import memlock; print(memlock.lockable())"],
        text=True,
    )
    assert shown.strip() == "None" or int(shown) >= 0
