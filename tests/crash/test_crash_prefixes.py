"""Every state that a power failure could leave of file systems and a database on a LUN, through
FUSE. (tests/lab/guest/test_none_crash.py has /dev/nbdX.)"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crash.prefixes import Recorded, check_all, moments, play, some
from tests.crash.recording import FAULTS
from tests.crash.workloads import Lost, Versions
from tests.support.fuse import need_fuse, need_loop_mounts, running_mount


@contextmanager
def mounted(url: str, directory: Path) -> Iterator[Path]:
    with running_mount([url], directory / "luns") as luns:
        yield luns / "lun0"


def through_fuse(
    directory: Path, kind: str, workload: str, steps: int, block: int = 512, fault: str = ""
) -> Recorded:
    need_fuse()
    need_loop_mounts(kind)
    return play(directory, kind, workload, steps, mounted, block, fault)


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    seed = random.SystemRandom().getrandbits(32)
    yield random.Random(seed)
    print(f"{request.node.name}: seed {seed}")


@pytest.mark.parametrize("workload", ["files", "sqlite"])
def test_some_prefixes(tmp_path: Path, chance: random.Random, workload: str) -> None:
    recorded = through_fuse(tmp_path, "ext4", workload, 40)
    lines = moments(recorded.record, 10, chance)
    assert len(lines) > 40
    assert Versions(recorded.record.notes).done >= 20
    assert check_all(recorded, some(lines, 10), 1, chance) > 15


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(tmp_path: Path, chance: random.Random, fault: str) -> None:
    recorded = through_fuse(tmp_path, "ext4", "files", 40, fault=fault)
    with pytest.raises(Lost):
        check_all(recorded, moments(recorded.record, 0, chance)[10::3], 1, chance)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("kind", "workload", "block"),
    [
        ("ext4", "files", 512),
        ("ext4", "files", 4096),
        ("ext4", "sqlite", 512),
        ("ext4", "sqlite-rollback", 512),
        ("xfs", "files", 512),
        ("xfs", "sqlite", 4096),
        ("btrfs", "files", 4096),
        ("btrfs", "sqlite-rollback", 512),
    ],
)
def test_every_prefix(
    tmp_path: Path, chance: random.Random, kind: str, workload: str, block: int
) -> None:
    recorded = through_fuse(tmp_path, kind, workload, 60, block)
    lines = moments(recorded.record, 60, chance)
    count = check_all(recorded, lines, 2, chance)
    print(f"{kind}, {workload}, blocks of {block} bytes: {count} states at {len(lines)} moments")
    assert count > 200
