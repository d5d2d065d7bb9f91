"""All processes on the machine at once: those that answer, those that do not, and those that
answer in order to do harm."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from iserblk.metrics import joining
from iserblk.metrics.address import socket_of
from iserblk.metrics.joining import NO_PROCESS, Joined
from iserblk.metrics.places import OWN_BYTES, Place, Source, in_directory, named
from tests.metrics.answerers import answering, served
from tests.metrics.test_exposition import EXAMPLE
from tests.metrics.test_merging import TEXT, samples
from tests.support.ports import free_port

# What is told once of each that is down.
pytestmark = pytest.mark.logs(
    "no such socket|no process serves|no answer in time|not a socket of its owner|HTTP: "
    "|Prometheus: |the answer is no text"
)

LIMIT_S = 0.3  # where no process answers
LONG_S = 5.0  # where some do not, and others do


def source_of(directory: Path) -> list[Source]:
    source = in_directory(directory)
    assert source is not None
    return [source]


async def told(sources: Sequence[Source]) -> dict[str, dict[str, float]]:
    """The samples with a place: name → place → value (of several the last)."""
    kind, text = await Joined(lambda: sources).document()
    assert kind.startswith("text/plain; version=0.0.4")
    found: dict[str, dict[str, float]] = {}
    for (name, labels), value in samples(text.decode()).items():
        found.setdefault(name, {})[dict(labels).get("where", "")] = value
    return found


async def test_all_that_answer(tmp_path: Path) -> None:
    async with served(socket_of("/dev/nbd0", tmp_path)), served(socket_of("/mnt/a", tmp_path)):
        found = await told(source_of(tmp_path))
    assert found["iserblk_up"] == {"/dev/nbd0": 1, "/mnt/a": 1}
    assert found["iserblk_size_bytes"] == {"/dev/nbd0": 1 << 30, "/mnt/a": 1 << 30}
    assert set(found["iserblk_scrape_seconds"]) == {"/dev/nbd0", "/mnt/a"}
    assert found["iserblk_exporter_left_out"] == {"": 0}
    assert len(found["iserblk_exporter_info"]) == 1


async def test_none_at_all(tmp_path: Path) -> None:
    found = await told(source_of(tmp_path))
    assert set(found) == {"iserblk_exporter_left_out", "iserblk_exporter_info"}


async def test_at_ports_and_elsewhere(tmp_path: Path) -> None:
    port = ("127.0.0.1", free_port())
    path, missing = tmp_path / "socket", tmp_path / "missing"
    async with served(port), served(path):
        found = await told([named([port, path, missing, ("127.0.0.1", free_port())])])
    up = found["iserblk_up"]
    assert up.pop(str(path)) == up.pop(f"127.0.0.1:{port[1]}") == 1
    assert up.pop(str(missing)) == 0
    assert list(up.values()) == [0]


@asynccontextmanager
async def pouring(path: Path, piece: bytes) -> AsyncIterator[None]:
    """A process that never ends its answer."""

    async def attend(stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError):
            while True:
                await stream.send_all(piece)
                await trio.lowlevel.checkpoint()

    with trio.socket.socket(socket.AF_UNIX) as sock:
        await sock.bind(str(path))
        sock.listen()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, attend, [trio.SocketListener(sock)])
            yield
            nursery.cancel_scope.cancel()


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
WRONG = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-x\r\n",
    "not found": b"HTTP/1.0 404 Not Found\r\n\r\n",
    "not ours": HEAD + b"up 1\n",
    "no text": HEAD + b"\xff\xfe" + TEXT.encode(),
    "cut off": b"HTTP/1.0 200 OK\r\nContent-Length: 999999\r\n\r\n" + TEXT.encode(),
    "a line that is cut": HEAD + TEXT.encode()[:-3].rstrip(b"0123456789."),
    "another's label": HEAD
    + b'iserblk_size_bytes{lun="0",target="t",where="/dev/nbd0",uid="0"} 1\n',
    "breaks the text": HEAD + b'iserblk_size_bytes{lun="0",target="t"} 1 }{\n',
}


async def test_what_is_wrong_with_one_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead, silent, endless and lying processes: one sample each says that they are down."""
    monkeypatch.setattr(joining, "ANSWER_S", LONG_S)
    monkeypatch.setattr(joining, "ALL_S", 3600)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(served(socket_of("good", tmp_path)))
        for name, answer in WRONG.items():
            await stack.enter_async_context(answering(socket_of(name, tmp_path), answer))
        for name, piece in (("drips", b"x"), ("pours", b"x" * 65536)):
            await stack.enter_async_context(pouring(socket_of(name, tmp_path), HEAD + piece))
        dead = stack.enter_context(socket.socket(socket.AF_UNIX))
        dead.bind(str(socket_of("dead", tmp_path)))
        silent = stack.enter_context(socket.socket(socket.AF_UNIX))
        silent.bind(str(socket_of("silent", tmp_path)))
        silent.listen()
        found = await told(source_of(tmp_path))
    down = {*WRONG, "drips", "pours", "dead", "silent"}
    assert found["iserblk_up"] == {"good": 1, **dict.fromkeys(down, 0)}
    assert set(found["iserblk_scrape_seconds"]) == {"good", *down}
    others = {name: each for name, each in found.items() if "exporter" not in name}
    for name, each in others.items():
        if name not in ("iserblk_up", "iserblk_scrape_seconds"):
            assert set(each) == {"good"}, name


async def test_answers_have_a_limit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of one user; another's processes have their own."""
    monkeypatch.setattr(joining, "ANSWERS", 1)
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    mine.mkdir()
    theirs.mkdir()
    size = len(TEXT) + 1000
    async with AsyncExitStack() as stack:
        for folder, count in ((mine, 3), (theirs, 1)):
            for number in range(count):
                path = socket_of(f"{folder.name}{number}", folder)
                await stack.enter_async_context(served(path))
        found = await told(
            [
                Source(source_of(mine)[0].places, True, 2 * size),
                Source(source_of(theirs)[0].places, False, 2 * size),
            ]
        )
    up = found["iserblk_up"]
    assert up.pop("theirs0") == 1
    assert sorted(up.values()) == [0, 1, 1]


async def test_an_answer_has_a_limit(tmp_path: Path) -> None:
    """One that never ends leaves room for the others of its user."""
    async with served(socket_of("good", tmp_path)), pouring(socket_of("pours", tmp_path), HEAD):
        (source,) = source_of(tmp_path)
        enough = Source(source.places, True, joining.ANSWERS * (len(TEXT) + 1000))
        assert (await told([enough]))["iserblk_up"] == {"good": 1, "pours": 0}


async def test_many_that_hang_take_no_longer_than_all_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "OWN_AT_ONCE", 2)
    monkeypatch.setattr(joining, "ALL_S", LIMIT_S)
    monkeypatch.setattr(joining, "ANSWER_S", 3600)
    async with AsyncExitStack() as stack:
        for number in range(5):
            silent = stack.enter_context(socket.socket(socket.AF_UNIX))
            silent.bind(str(socket_of(f"silent{number}", tmp_path)))
            silent.listen()
        found = await told(source_of(tmp_path))
    assert found["iserblk_up"] == {f"silent{number}": 0 for number in range(5)}


async def test_one_that_ends_meanwhile_is_not_down(tmp_path: Path) -> None:
    """A process removes its socket when it ends in order."""
    path = socket_of("/dev/nbd0", tmp_path)
    async with served(path):
        sources = source_of(tmp_path)
    assert "iserblk_up" not in await told(sources)


async def test_a_link_that_takes_the_place_of_a_socket(tmp_path: Path) -> None:
    """It is not followed: a user could have root's exporter speak with any server."""
    asked = trio.Event()

    async def attend(stream: trio.SocketStream) -> None:
        asked.set()
        await stream.aclose()

    path = tmp_path / "a.metrics"
    with trio.socket.socket(socket.AF_UNIX) as sock:
        await sock.bind(str(tmp_path / "elsewhere"))
        sock.listen()
        path.symlink_to(tmp_path / "elsewhere")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, attend, [trio.SocketListener(sock)])
            uid = str((tmp_path / "elsewhere").stat().st_uid)
            found = await told([Source((Place("a", uid, path),), True, OWN_BYTES)])
            assert found["iserblk_up"] == {"a": 0}
            assert not asked.is_set()
            # The same socket under its own name, but as if it were another user's.
            other = Place("b", "4294967294", tmp_path / "elsewhere")
            found = await told([Source((other,), True, OWN_BYTES)])
            assert found["iserblk_up"] == {"b": 0}
            assert not asked.is_set()
            nursery.cancel_scope.cancel()


async def test_two_that_say_they_are_the_same(tmp_path: Path) -> None:
    """The first counts: no series is there twice."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    async with served(socket_of("/dev/nbd0", one)), served(socket_of("/dev/nbd0", two)):
        sources = [*source_of(one), *source_of(two)]
        _, text = await Joined(lambda: sources).document()
    assert text.decode().count("\niserblk_up{") == 1


async def test_two_that_are_told_in_the_same_way(tmp_path: Path) -> None:
    """Bytes of a name that are no text become question marks."""
    async with served(tmp_path / "%FE.metrics"), served(tmp_path / "%FF.metrics"):
        sources = source_of(tmp_path)
        _, text = await Joined(lambda: sources).document()
    assert text.decode().count("\niserblk_up{") == 1


async def test_requests_at_once_share_a_round(tmp_path: Path) -> None:
    rounds = []
    go_on = trio.Event()

    async def attend(stream: trio.SocketStream) -> None:
        await go_on.wait()
        await stream.send_all(HEAD + TEXT.encode())
        await stream.aclose()

    def sources() -> list[Source]:
        rounds.append(1)
        return source_of(tmp_path)

    joined = Joined(sources)
    texts = []

    async def ask() -> None:
        texts.append(await joined.document())

    with trio.socket.socket(socket.AF_UNIX) as sock:
        await sock.bind(str(socket_of("/dev/nbd0", tmp_path)))
        sock.listen()
        async with trio.open_nursery() as servers:
            servers.start_soon(trio.serve_listeners, attend, [trio.SocketListener(sock)])
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(ask)
                await trio.testing.wait_all_tasks_blocked()
                go_on.set()
            assert (len(texts), len(set(texts)), len(rounds)) == (20, 1, 1)
            await joined.document()
            assert len(rounds) == 2
            servers.cancel_scope.cancel()


async def test_a_round_that_fails_is_not_shared(tmp_path: Path) -> None:
    """A bug in one round is the error of its request; the next one asks anew."""
    fail = [True]

    def sources() -> list[Source]:
        if fail.pop():
            fail.append(False)
            raise ZeroDivisionError
        fail.append(False)
        return source_of(tmp_path)

    joined = Joined(sources)
    with pytest.raises(ZeroDivisionError):
        await joined.document()
    assert b"iserblk_exporter_info" in (await joined.document())[1]


async def test_the_log_tells_a_change_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    joined = Joined(lambda: source_of(tmp_path))
    path = socket_of("/dev/nbd0", tmp_path)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        for _ in range(3):
            await joined.document()
    assert [each.message for each in caplog.records] == [
        "/dev/nbd0: no process serves metrics there (Connection refused)"
    ]
    async with served(path):
        await joined.document()


# --- decoded -------------------------------------------------------------------------------------


async def test_answers_are_decoded(tmp_path: Path) -> None:
    async with served(socket_of("/dev/nbd0", tmp_path)):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(socket_of("/dev/nbd1", tmp_path)))
            async with answering(socket_of("/dev/nbd2", tmp_path), b"HTTP/1.0 200 OK\r\n\r\nno"):
                found = await Joined(lambda: source_of(tmp_path)).answers()
    by_place = {each.place.where: each for each in found}
    assert by_place["/dev/nbd0"].reading == EXAMPLE
    assert (by_place["/dev/nbd0"].why, by_place["/dev/nbd0"].at > 0) == ("", True)
    assert by_place["/dev/nbd1"].reading is None
    assert by_place["/dev/nbd1"].why.startswith(NO_PROCESS)
    assert "not the metrics of iserblk" in by_place["/dev/nbd2"].why


async def test_no_user_has_much_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another user: the first answers only; this user's own have no such limit."""
    monkeypatch.setattr(joining, "OTHERS_READ_BYTES", len(TEXT) * 3 // 2)
    async with served(socket_of("/dev/nbd0", tmp_path)), served(socket_of("/dev/nbd1", tmp_path)):
        own = source_of(tmp_path)
        assert all(each.reading for each in await Joined(lambda: own).answers())
        others = [replace(each, own=False) for each in own]
        found = await Joined(lambda: others).answers()
    assert [each.reading is None for each in found].count(True) == 1
    assert "too long" in "".join(each.why for each in found)
