"""The server of one device, as a process of its own:

    python -P -m iserblk.nbd.kernel.serving SOCKET FD HOW uri=URL… NAME=VALUE…

It listens at SOCKET, and serves until its last client has gone: the kernel. To the descriptor FD it
writes that it is ready, or why it cannot serve (module ``orders``). It logs to syslog.

HOW is ``listen``; or it takes the kernel's connections over from the server that runs (module
``succession``): ``take`` opens the LUN before that, ``take-first`` when the old server has ended.
Then it listens when the old server has ended, and closes FD not before that.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from iserblk.background import log_to_syslog, release_streams
from iserblk.disk.ending import NotFlushed
from iserblk.disk.seam import LossCount
from iserblk.disk.writers import is_shared, note_use
from iserblk.errors import IserblkError
from iserblk.limited_log import limited_lines
from iserblk.loop.stopping import is_stopping, mount_unit, own_unit
from iserblk.metrics.records import Recorded
from iserblk.nbd.client import PausedConnection
from iserblk.nbd.kernel import client
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.handover import State
from iserblk.nbd.kernel.orders import LISTEN, READY, TAKE_FIRST, NoHandOver, from_words, refusal
from iserblk.nbd.kernel.owed import Owed
from iserblk.nbd.kernel.state import Home
from iserblk.nbd.kernel.succession import Giver, Taker, listening_for_successors
from iserblk.nbd.listening import listen_unix
from iserblk.nbd.server import NbdServer
from iserblk.nbd.serving import Terms, serve

log = logging.getLogger(__name__)


class Report:
    """The pipe to attach."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._pipe = descriptor

    def say(self, words: bytes) -> bool:
        """False: attach has gone, or has heard everything."""
        try:
            os.write(self._pipe, words)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


class DeviceSuccession:
    """Implements Succession: of the servers of ``home``."""

    def __init__(self, home: Home, how: str, report: Report) -> None:
        self.inherits = how != LISTEN
        self.opens_last = how == TAKE_FIRST
        self.taken: list[PausedConnection] = []
        self.successors: socket.socket | None = None  # where they connect
        self._home = home
        self._report = report
        self._taker = Taker(home.successors) if self.inherits else None
        self._owed = Owed(home.owed)
        self._losses = LossCount()
        self._giver = Giver(lambda: self._losses)

    @property
    def given(self) -> bool:
        return self._giver.state is State.GIVEN

    def losses_before(self) -> LossCount:
        return self._owed.read() if self._taker is None else self._taker.losses

    def counted(self, count: LossCount) -> None:
        self._losses = count
        if not self.given:
            self._owed.write(count)  # first: what the successor writes then is the last word
        if not self._giver.tell() and self.given:  # it is gone: the server that follows it tells
            self._owed.write(LossCount(count.losses, 0))

    async def take(self) -> list[PausedConnection]:
        assert self._taker is not None
        self.taken = await self._taker.take()
        return self.taken

    async def predecessor_ended(self, lost: Callable[[int], object]) -> None:
        assert self._taker is not None
        await self._taker.old_server_ended(lost)

    async def offer(self, server: NbdServer, flush: Callable[[], Awaitable[None]]) -> None:
        with contextlib.ExitStack() as places:
            try:
                sockets = [] if self.successors else self.listen(places)
            except (IserblkError, OSError) as error:
                log.warning("no successor will find this server: %s", error)
                return
            finally:
                self._report.close()
            assert self.successors is not None
            async with server.listening(sockets):
                await self._giver.offer(self.successors, server, flush)

    def listen(self, places: contextlib.ExitStack) -> list[socket.socket]:
        """For clients, and for a successor, until ``places`` are closed. Raises IserblkError,
        OSError."""
        sockets, _ = places.enter_context(listen_unix(str(self._home.socket)))
        self.successors = places.enter_context(listening_for_successors(self._home.successors))
        return sockets

    def close(self) -> None:
        self._giver.close()
        for each in self.taken:  # unless they were served, they are open still
            each.sock.close()
        if self._taker is not None and (lost := self._taker.close()):
            self._owed.write(LossCount(lost, 0))


def _serve(home: Home, how: str, report: Report, words: Sequence[str]) -> None:
    urls, options = from_words(words)

    def ready() -> None:
        release_streams()
        report.say(READY)
        if not succession.inherits:
            report.close()

    def resized(_name: str, size: int) -> None:
        try:
            client.resize(home, size)
        except IserblkError as error:
            log.warning("%s", error)

    home.wish.begin()  # of a server before this one

    def wished() -> bool:
        mounts = map(mount_unit, home.device.mounts())
        return home.wish.made or is_stopping({own_unit(), *mounts})

    with contextlib.ExitStack() as stack:
        succession = DeviceSuccession(home, how, report)
        stack.callback(succession.close)  # last: a successor then takes over the places
        sockets = [] if succession.inherits else succession.listen(stack)
        recorded = stack.enter_context(Recorded("attach", str(home.device.path)))
        shared = is_shared(urls, options)
        try:
            terms = Terms(
                until_unused=True,
                resized=resized,
                succession=succession,
                patient=False,
                wished=wished,
                forced=lambda: home.wish.by_force,
                opened=partial(note_use, recorded, shared=shared),
            )
            serve(urls, options, sockets, ready, lambda: None, terms)
        except IserblkError as error:
            if succession.taken:
                raise NoHandOver(str(error)) from None
            raise


def main(arguments: Sequence[str]) -> int:
    """The body of the process; returns its exit status."""
    path, descriptor, how, *words = arguments
    report = Report(int(descriptor))
    run = Path(path).parent
    home = Home(Device(run.name, Directories(run=run.parent)))
    log_to_syslog(f"iserblk-{run.name}")
    no_hand_over = False
    try:
        with limited_lines():
            _serve(home, how, report, words)
    except IserblkError as error:
        said, status = str(error), error.exit_status
        if isinstance(error, NotFlushed):
            home.wish.leave(error.unflushed)
        no_hand_over = isinstance(error, NoHandOver)
    except OSError as error:
        said, status = error.strerror or str(error), IserblkError.exit_status
    except Exception:
        log.exception("internal error")
        said, status = "the server: internal error; syslog has more", IserblkError.exit_status
    else:
        return 0
    if not report.say(refusal(said, status, no_hand_over=no_hand_over)):
        log.error("%s", said)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
