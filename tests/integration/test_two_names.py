"""One LUN behind two targets with different names: they are gateways to a third."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from iserblk.errors import BadArgument
from tests.cli.commands import Server, serving
from tests.support import logs
from tests.support.faces import FACES, opened, read, write
from tests.support.target import IQN

pytestmark = pytest.mark.logs(logs.ANOTHER_PORTAL, logs.RECONNECTED, logs.LOST_POWER)

SIZE = 1 << 20
DATA = os.urandom(65536)


class Targets:
    """Targets with names of their own."""

    def __init__(self, stack: ExitStack, place: Path) -> None:
        self._stack = stack
        self._place = place

    def start(self, name: str, *luns: str) -> Server:
        words = [
            word
            for lun in luns
            for word in ("--lun", lun if "://" in lun else f"{self._place}/{lun}")
        ]
        arguments = ["target", "--iqn", f"{IQN}-{name}", "--listen", "127.0.0.1:0", *words]
        log = self._place / f"{name}.log"
        return self._stack.enter_context(serving(*arguments, log=log))


@pytest.fixture
def targets(tmp_path: Path) -> Iterator[Targets]:
    with ExitStack() as stack:
        yield Targets(stack, tmp_path)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("scheme", ["iser", "iscsi"])
async def test_the_same_lun_is_one_disk(face: str, scheme: str, targets: Targets) -> None:
    """When one target ends, the other carries on."""
    behind = f"{targets.start('behind', f'lun:size={SIZE}').url}/0"
    one, two = targets.start("one", behind), targets.start("two", behind)
    urls = [f"{one.url}/0", f"{two.url.replace('iser', scheme, 1)}/0"]
    async with opened(face, *urls) as disks:
        (disk,) = disks.values()
        assert [str(each["portal"]) for each in disk.info.paths] == [
            url.partition(f"/{IQN}")[0] for url in urls
        ]
        await write(disk, DATA, 0)
        one.process.kill()
        assert await read(disk, 0, len(DATA)) == DATA
        await write(disk, DATA[::-1], 0)
        await disk.flush()
        assert await read(disk, 0, len(DATA)) == DATA[::-1]


async def test_other_luns_stay_disks_of_their_own(targets: Targets) -> None:
    one = targets.start("one", f"one:size={SIZE}")
    two = targets.start("two", f"two:size={SIZE}")
    async with opened("async", f"{one.url}/0", f"{two.url}/0") as disks:
        assert sorted(disks) == [f"{IQN}-one:lun0", f"{IQN}-two:lun0"]
        assert all(disk.info.paths == () for disk in disks.values())


async def test_the_same_lun_under_two_numbers(targets: Targets) -> None:
    """Two disks of one LUN would each write again what the other has overwritten."""
    behind = f"{targets.start('behind', f'lun:size={SIZE}').url}/0"
    one = targets.start("one", behind)
    two = targets.start("two", f"other:size={SIZE}", behind)
    with pytest.raises(BadArgument, match="are the same LUN, but have different numbers"):
        async with opened("async", f"{one.url}/0", f"{two.url}/1"):
            pass


async def test_a_target_that_is_down_is_told_of_by_its_login(targets: Targets) -> None:
    one = targets.start("one", f"one:size={SIZE}")
    two = targets.start("two", f"two:size={SIZE}")
    two.process.kill()
    with pytest.raises(Exception, match=r"refused|is the target listening"):
        async with opened("async", f"{one.url}/0", f"{two.url}/0"):
            pass
