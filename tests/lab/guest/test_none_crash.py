"""Every state that a power failure could leave of a file system on /dev/nbdX, with the guest's own
block layer above the server (tests/crash)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash.prefixes import check_all, moments, play, some
from tests.crash.workloads import Lost, Versions
from tests.lab.guest.attached import attached


@contextmanager
def device(url: str, _directory: Path) -> Iterator[Path]:
    with attached(f"{url}/0") as path:
        yield path


def test_some_prefixes(tmp_path: Path) -> None:
    recorded = play(tmp_path, "ext4", "files", 16, device)
    chance = random.Random(1)
    lines = moments(recorded.record, 4, chance)
    assert len(lines) > 16
    assert Versions(recorded.record.notes).done >= 8
    assert check_all(recorded, some(lines, 8), 1, chance) > 8


@pytest.mark.long  # tests/crash/test_crash_prefixes.py has it through FUSE
def test_a_flush_that_is_not_carried_out_is_found(tmp_path: Path) -> None:
    recorded = play(tmp_path, "ext4", "files", 24, device, fault="flush")
    chance = random.Random(1)
    with pytest.raises(Lost):
        check_all(recorded, moments(recorded.record, 0, chance)[4::2], 1, chance)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kind", "workload", "block"),
    [
        ("ext4", "files", 512),
        ("ext4", "files", 4096),
        ("ext4", "sqlite", 512),
        ("ext4", "sqlite-rollback", 4096),
        ("xfs", "files", 512),
        ("btrfs", "files", 4096),
    ],
)
def test_every_prefix(tmp_path: Path, kind: str, workload: str, block: int) -> None:
    recorded = play(tmp_path, kind, workload, 40, device, block)
    chance = random.Random(f"{kind} {workload} {block}")
    lines = moments(recorded.record, 20, chance)
    count = check_all(recorded, lines, 2, chance)
    print(f"{kind}, {workload}, blocks of {block} bytes: {count} states at {len(lines)} moments")
    assert count > 100
