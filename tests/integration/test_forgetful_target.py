"""A target that leaves commands unanswered: with a limit for a command, beside that for a request,
each is sent again, and its request succeeds; nothing is lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from iserblk.errors import CommandTimeout
from iserblk.scsi import opcodes
from iserblk.target.lunspec import open_lun, parse_lun_spec
from tests.support import logs
from tests.support.faces import NBD, one_disk, read, write
from tests.support.profiles.forgetful import Device
from tests.support.target import IQN
from tests.support.target_here import serve
from tests.support.transports import by

pytestmark = pytest.mark.logs(
    logs.DEADLINES,
    logs.LOST_POWER,
    logs.RECONNECTED,
    r"the target may have failed a flush .*; what was not flushed is sent again",
)
KIB = 1 << 10


@asynccontextmanager
async def forgetful(tmp_path: Path) -> AsyncIterator[tuple[str, Device]]:
    """The URL of its LUN."""
    made: list[Device] = []

    def make(*words: object) -> Device:
        made.append(Device(*words))  # type: ignore[arg-type]
        return made[0]

    unit = open_lun(parse_lun_spec(f"{tmp_path}/lun:size=8M"), "test")
    send, receive = trio.open_memory_channel[str](1)
    try:
        async with trio.open_nursery() as nursery:
            target = partial(serve, make_device=make)
            nursery.start_soon(target, "127.0.0.1:0", IQN, {0: unit}, send.send_nowait)
            yield f"{await receive.receive()}/0", made[0]
            nursery.cancel_scope.cancel()
    finally:
        unit.close()


@pytest.mark.parametrize(
    ("transport", "face"), [("iser", "async"), ("iscsi", "async"), ("iser", NBD)]
)
async def test_what_is_forgotten_is_sent_again(tmp_path: Path, transport: str, face: str) -> None:
    """Of each kind of command one, and two at once. A flush that was aborted counts as in doubt:
    what it was to cover is written again before the next one."""
    async with (
        forgetful(tmp_path) as (url, device),
        one_disk(face, by(transport, url, "io-timeout=forever/1")) as disk,
    ):
        await write(disk, b"0" * 512, 0)
        device.forgets = (opcodes.WRITE_16, opcodes.READ_16)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write, disk, b"1" * 128 * KIB, 0)
            nursery.start_soon(read, disk, 1 << 20, 64 * KIB)
        device.forgets = (opcodes.SYNCHRONIZE_CACHE_16,)
        await disk.flush()
        assert await read(disk, 0, 128 * KIB) == b"1" * 128 * KIB
        assert sorted(device.forgot) == sorted(
            (opcodes.WRITE_16, opcodes.READ_16, opcodes.SYNCHRONIZE_CACHE_16)
        )


async def test_one_limit_for_both(tmp_path: Path) -> None:
    """As a user has set it: the request fails when its command is aborted."""
    async with (
        forgetful(tmp_path) as (url, device),
        one_disk("async", f"{url}?io-timeout=1") as disk,
    ):
        device.forgets = (opcodes.WRITE_16,)
        with pytest.raises(CommandTimeout, match="raise io-timeout"):
            await write(disk, bytes(512), 0)
        await write(disk, bytes(512), 0)
