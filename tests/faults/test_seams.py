"""Fault wrappers around queue pairs and streams, between our initiator and a real target."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from iserblk.errors import ConnectionLost, TransportError
from iserblk.initiator.connecting import iwarp
from tests.support import logs
from tests.support.faces import FACES, QUEUE, one_disk, read, write
from tests.support.faults.seams import FaultyQueuePair, FaultyStream, Script, memory_short
from tests.support.target import TargetProcess, running_target

pytestmark = pytest.mark.logs(logs.LOST_POWER, logs.RECONNECTED)

SEAMS = {"iser": "IwarpQueuePair", "iscsi": "SocketStream"}
LOSES = {"iser": ("post", "progress"), "iscsi": ("send", "receive")}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetProcess]:
    place = tmp_path_factory.mktemp("lun")
    with running_target([f"{place}/lun:size=16M"], place / "target.log") as running:
        yield running


Wrap = Callable[[Any], Any]


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Wrap], None]:
    """Wrap every new connection of the transport with ``wrap``."""

    real_ones = {name: getattr(iwarp, name) for name in SEAMS.values()}

    def install(transport: str, wrap: Wrap) -> None:
        real = real_ones[SEAMS[transport]]

        def make(*args: Any, **kwargs: Any) -> Any:
            return wrap(real(*args, **kwargs))

        monkeypatch.setattr(iwarp, SEAMS[transport], make)

    return install


async def exercise(face: str, url: str) -> None:
    async with one_disk(face, url) as disk:
        for number, size in enumerate((512, 8192, 65536, 512 << 10)):
            data = random.Random(number).randbytes(size)
            await write(disk, data, 4096)
            assert await read(disk, 4096, size) == data
        await disk.flush()


def url_of(target: TargetProcess, transport: str) -> str:
    return f"{target.url}/0".replace("iser:", f"{transport}:")


@pytest.mark.parametrize("face", (*FACES, QUEUE))
async def test_a_stream_in_sips(
    target: TargetProcess, wrapped: Callable[[str, Wrap], None], face: str
) -> None:
    made: list[FaultyStream] = []

    def wrap(stream: Any) -> FaultyStream:
        made.append(FaultyStream(stream, Script(), sips=3000, seed=len(made)))
        return made[-1]

    wrapped("iscsi", wrap)
    await exercise(face, url_of(target, "iscsi") + "?header_digest=crc32c&data_digest=crc32c")
    assert made and made[0].script.calls["receive"] > 400


@pytest.mark.parametrize("face", (*FACES, QUEUE))
async def test_memory_that_is_short_now_and_then(
    target: TargetProcess, wrapped: Callable[[str, Wrap], None], face: str
) -> None:
    scripts: list[Script] = []

    def wrap(pair: Any) -> FaultyQueuePair:
        scripts.append(memory_short(0.5, len(scripts)))
        return FaultyQueuePair(pair, scripts[-1])

    wrapped("iser", wrap)
    async with one_disk(face, url_of(target, "iser")) as disk:
        data = random.Random(1).randbytes(8 << 20)
        await write(disk, data, 0)
        assert await read(disk, 0, len(data)) == data
    assert scripts[0].log


@pytest.mark.parametrize("face", (*FACES, QUEUE))
@pytest.mark.parametrize("transport", SEAMS)
@pytest.mark.parametrize("which", [0, 1])
async def test_the_connection_is_lost_at_any_call(
    target: TargetProcess,
    wrapped: Callable[[str, Wrap], None],
    face: str,
    transport: str,
    which: int,
) -> None:
    """The n-th call loses the connection: a documented error or success, never wrong data."""
    name = LOSES[transport][which]
    for count in (0, 3, 17, 60):
        script = Script({(name, count): ConnectionLost("cut by the test")})
        around: Any = FaultyQueuePair if transport == "iser" else FaultyStream
        scripts = iter([script])

        def wrap(inner: Any, scripts: Iterator[Script] = scripts, around: Any = around) -> Any:
            return around(inner, next(scripts, Script()))

        wrapped(transport, wrap)
        try:
            await exercise(face, url_of(target, transport) + "?io-timeout=2")
        except TransportError:
            assert script.log == [(name, count)]
        else:
            assert count > 3


def test_a_script_is_replayable() -> None:
    def run(seed: int) -> list[tuple[str, int]]:
        script = Script(chance=0.2, fragile=("post",), seed=seed)
        for _ in range(200):
            for name in ("post", "progress"):
                try:
                    script.at(name)
                except ConnectionLost:
                    assert name == "post"
        return script.log

    assert run(1) == run(1) != run(2) and 20 < len(run(1)) < 70
