"""Asks all processes on the machine for their metrics at once, and joins what they answer.

No process is trusted, and none is waited for long. One that does not answer, or not as iserblk
does, has a sample that says so, and takes nothing from the others.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trio

from iserblk import __version__
from iserblk.errors import RemoteProtocolError
from iserblk.loop.clock import monotonic
from iserblk.loop.tasks import task_time
from iserblk.metrics.exposition import CONTENT_TYPE, parse_untrusted
from iserblk.metrics.merging import Merger, escaped
from iserblk.metrics.places import Place, Source
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.scraping import REQUEST, body_untrusted

log = logging.getLogger(__name__)

ANSWER_S = 3.0  # until a process has sent its whole answer
ALL_S = 6.0  # until those have answered that had to wait for their turn, too
OWN_AT_ONCE = 512
OTHERS_AT_ONCE = 128  # of all other users together
ANSWERS = 4  # that are as long as can be, of one source
OTHERS_READ_BYTES = 1 << 20  # of another user, that are decoded, which takes long
_CHUNK = 1 << 16

_UP = "iserblk_up"
_SECONDS = "iserblk_scrape_seconds"
_LEFT_OUT = "iserblk_exporter_left_out"
_INFO = "iserblk_exporter_info"
_HELP = {
    _UP: "1: the process that serves there has answered; 0: it is dead, or answers wrongly.",
    _SECONDS: "How long it took until it had answered, or was given up.",
    _LEFT_OUT: "Places that were not asked, because there are too many.",
    _INFO: "The exporter that joins these metrics.",
}


NO_ANSWER = "no answer in time"
NO_PROCESS = "no process serves metrics there"


@dataclass(slots=True, frozen=True)
class Answer:
    """What a place has answered. ``reading``: None: nothing, and ``why`` says why not. ``at``:
    monotonic seconds."""

    place: Place
    reading: ProcessReading | None
    why: str
    at: float


@dataclass(slots=True)
class _Asked:
    """A place, and what became of it. ``why``: it is down, and for this reason; "": it has
    answered with ``text``. ``gone``: the process has ended in order meanwhile."""

    place: Place
    own: bool
    why: str = NO_ANSWER
    text: str = ""
    at: float = 0.0
    seconds: float = 0.0
    gone: bool = False

    @property
    def labels(self) -> str:
        return f'uid="{self.place.uid}",where="{escaped(self.place.where)}"'


@dataclass(slots=True)
class _Room:
    """Bytes that the answers of one source may still have, and one answer may have: so one that
    never ends leaves room for others."""

    left: int
    each: int

    def take(self, count: int, so_far: int) -> None:
        """``so_far``: of this answer, with these ``count`` bytes. Raises RemoteProtocolError."""
        self.left -= count
        if self.left < 0 or so_far > self.each:
            raise RemoteProtocolError("HTTP", "the answer is too long")


@dataclass(slots=True, eq=False)
class _Run:
    """One round of questions. ``document``: None until it has ended well."""

    done: trio.Event = field(default_factory=trio.Event)
    document: bytes | None = None


class Joined:
    """The joined metrics of the places that ``sources`` returns: in each round anew."""

    def __init__(self, sources: Callable[[], Sequence[Source]]) -> None:
        self._sources = sources
        self._run: _Run | None = None
        self._down: dict[Place, str] = {}

    async def document(self) -> tuple[str, bytes]:
        """Content type and text. Requests that come while processes are asked get the same answer:
        no number of them makes more than one round of questions at a time."""
        while True:
            run = self._run
            if run is None:
                run = self._run = _Run()
                try:
                    run.document = await self._ask_all()
                finally:
                    self._run = None
                    run.done.set()
            else:
                await run.done.wait()
            if run.document is not None:
                return CONTENT_TYPE, run.document

    async def answers(self) -> list[Answer]:
        """What each place answers, decoded. Each call asks all of them."""
        asked, _ = await self._round()
        return await trio.to_thread.run_sync(_answers, asked)

    async def _ask_all(self) -> bytes:
        there, left_out = await self._round()
        text = await trio.to_thread.run_sync(_text, there, left_out)
        self._tell(there)
        return text

    async def _round(self) -> tuple[list[_Asked], int]:
        """Ask all places; those that have gone in order are left out. And how many were not asked
        since there are too many."""
        sources = await trio.to_thread.run_sync(self._sources)
        limiters = {True: trio.CapacityLimiter(OWN_AT_ONCE)}
        limiters[False] = trio.CapacityLimiter(OTHERS_AT_ONCE)
        asked: dict[str, _Asked] = {}  # by labels: names that differ may be told in the same way
        with trio.move_on_after(ALL_S):
            async with trio.open_nursery() as nursery:
                for source in sources:
                    room = _Room(source.answer_bytes, source.answer_bytes // ANSWERS)
                    for place in source.places:
                        each = _Asked(place, source.own)
                        if each.labels in asked:
                            continue
                        asked[each.labels] = each
                        nursery.start_soon(_ask, each, room, limiters[source.own])
        there = [each for each in asked.values() if not each.gone]
        return there, sum(source.left_out for source in sources)

    def _tell(self, asked: Iterable[_Asked]) -> None:
        """Log what is down that was not before. Other users have no part in the log."""
        down = {each.place: each.why for each in asked if each.why and each.own}
        for place, why in down.items():
            if place not in self._down:
                log.warning("%s: %s", place.where, why)
        for place in self._down.keys() - down.keys():
            log.info("%s: not down any more", place.where)
        self._down = down


async def _ask(asked: _Asked, room: _Room, limiter: trio.CapacityLimiter) -> None:
    async with limiter:
        began = task_time()
        try:
            with trio.fail_after(ANSWER_S):
                answer = await _answer(asked.place, room)
            asked.at = monotonic()
            asked.text = body_untrusted(answer).decode()
            asked.why = ""
        except trio.TooSlowError:
            pass
        except FileNotFoundError:
            asked.why = "no such socket"
            asked.gone = not asked.place.named
        except OSError as error:
            words = os.strerror(error.errno) if error.errno else str(error)
            asked.why = f"{NO_PROCESS} ({words})"
        except RemoteProtocolError as error:
            asked.why = str(error)
        except UnicodeDecodeError:
            asked.why = "the answer is no text"
        asked.seconds = task_time() - began


async def _answer(place: Place, room: _Room) -> bytes:
    parts = []
    size = 0
    with await _connected(place) as sock:
        left = memoryview(REQUEST)
        while left:
            left = left[await sock.send(left) :]
        while more := await sock.recv(_CHUNK):
            size += len(more)
            room.take(len(more), size)
            parts.append(more)
    return b"".join(parts)


async def _connected(place: Place) -> trio.socket.SocketType:
    """A connection. Raises OSError, RemoteProtocolError: the socket is not its owner's any more."""
    address = place.address
    if not isinstance(address, Path):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return await _connect(family, address)
    # Between a look at the path and a connection to it another file could take its place: the file
    # that is looked at is kept open.
    fd = os.open(address, os.O_PATH | os.O_CLOEXEC | (0 if place.named else os.O_NOFOLLOW))
    try:
        found = os.fstat(fd)
        if not stat.S_ISSOCK(found.st_mode) or not (place.named or str(found.st_uid) == place.uid):
            raise RemoteProtocolError("HTTP", "this is not a socket of its owner")
        return await _connect(socket.AF_UNIX, f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


async def _connect(family: int, address: tuple[str, int] | str) -> trio.socket.SocketType:
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        await sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock


def _answers(asked: Sequence[_Asked]) -> list[Answer]:
    """Runs in a thread. Only what ``Merger`` takes is decoded."""
    found = []
    read: Counter[str] = Counter()  # by user
    for each in asked:
        reading = None
        why = each.why
        read[each.place.uid] += len(each.text)
        if not why and not each.own and read[each.place.uid] > OTHERS_READ_BYTES:
            why = "the answers of this user are too long to be decoded"
        if not why:
            try:
                Merger().take_untrusted(each.labels, each.text)
                reading = parse_untrusted(each.text)
            except RemoteProtocolError as error:
                why = str(error)
        found.append(Answer(each.place, reading, why, each.at))
    return found


def _text(asked: Sequence[_Asked], left_out: int) -> bytes:
    """The whole text; sets ``why`` of those whose own text is wrong. Runs in a thread."""
    merger = Merger()
    for each in asked:
        if each.why:
            continue
        try:
            merger.take_untrusted(each.labels, each.text)
        except RemoteProtocolError as error:
            each.why = str(error)
        each.text = ""
    own = {
        _UP: [f"{{{each.labels}}} {0 if each.why else 1}" for each in asked],
        _SECONDS: [f"{{{each.labels}}} {each.seconds:.6f}" for each in asked],
        _LEFT_OUT: [f" {left_out}"],
        _INFO: [f'{{version="{escaped(__version__)}"}} 1'],
    }
    parts = []
    for name, lines in own.items():
        parts.append(f"# HELP {name} {_HELP[name]}\n# TYPE {name} gauge\n")
        parts += [f"{name}{line}\n" for line in lines]
    return "".join([*parts, merger.text()]).encode()
