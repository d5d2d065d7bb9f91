"""Detach a device: flush if possible, disconnect, end the server, and remove all state."""

from __future__ import annotations

import logging
import os
import threading
from typing import NamedTuple

from iserblk.disk.ending import LONGEST_S
from iserblk.errors import BadArgument, Busy, IserblkError
from iserblk.loop.blocking import sleep
from iserblk.loop.clock import monotonic
from iserblk.nbd.kernel import client
from iserblk.nbd.kernel.device import SECTOR, Device
from iserblk.nbd.kernel.server import Server
from iserblk.nbd.kernel.state import Home, State, locked

log = logging.getLogger(__name__)

# Added to io-timeout (LONGEST_S where that is longer), for two steps of task management and a slow
# machine.
PATIENCE_S = 20.0
_FORCED_S = 10.0  # for a server that waits for nothing
_FREE_S = 15.0
_OPENERS_S = 3.0  # udev opens a device for a moment after each write to it
_POLL_S = 0.1


def detach(device: Device) -> None:
    """Flush, disconnect, and return when the device is free and the server has ended.

    If the target is away, this takes a minute at most, whatever io-timeout is: the server gives up
    the requests that wait for it (``iserblk.disk.ending``). Raises Busy while the device is in use
    (nothing has changed then; but if its server has died, all requests fail from then on);
    BadArgument when iserblk has attached nothing there; IserblkError when the flush failed: the
    device is free then, too, and data written since the flush before that may be lost.
    """
    with locked(device) as home:
        if not home.is_ours():
            _no_attachment(home)
            return
        state = home.state()
        dead = _fail_all_if_dead(home)
        try:
            claim = _claim(device)
        except Busy as error:
            if not dead:
                raise
            raise Busy(f"{error}; its server has died: all requests fail, until "
                       "`iserblk attach --replace` gives it another") from None  # fmt: skip
        home.wish.make()
        try:
            before = device.changed()
            failure, alive = _flush(home, claim, state)
            tried = (device.changed() - before) * SECTOR if failure else 0
            client.disconnect(device)
        except BaseException:
            home.wish.withdraw()  # the device stays attached
            raise
        finally:
            os.close(claim)
        ended = _release(home)
        failure = failure or ended.owed
        if failure:
            raise IserblkError(
                f"{device.path}: detached, but the last flush failed ({failure}): "
                f"{_amount(ended, tried, alive)} written to {state.url} since the flush before "
                "that may be lost"
            )


def force(device: Device) -> None:
    """Disconnect without a flush, also while the device is in use: all its requests fail at once.
    Return when the server has ended.

    Raises BadArgument as ``detach``; IserblkError where something was not flushed, and is perhaps
    lost; Busy where the device is still in use: it is free when that has ended.
    """
    with locked(device) as home:
        if not home.is_ours():
            _no_attachment(home)
            return
        url = home.state().url
        use = ""
        home.wish.make(by_force=True)
        client.disconnect(device)
        # (Before, opening it might wait for the kernel, which reads partitions.)
        try:
            os.close(device.claim())
        except Busy as error:
            use = str(error).removeprefix(f"{device.path}: ")
        with Server(home) as server:
            told = server.end(_FORCED_S)
        lost = ""
        if not told or home.wish.left is not None or home.owed.exists():
            amount = _amount(_Ended("", home.wish.left, True), 0, True)
            lost = f"{amount} written to {url} since the last flush may be lost"
        if not use and not _free(home, _FORCED_S):
            use = f"in use: {_names(device)} has it open: end that"
        if not use:
            _forget(home)
        if use:
            text = f"{device.path}: all its requests fail from now on, and it is still {use}"
            raise Busy(f"{text}; {lost}" if lost else text)
        if lost:
            raise IserblkError(f"{device.path}: detached by force, without a flush: {lost}")


def _amount(ended: _Ended, tried: int, alive: bool) -> str:
    """``tried``: bytes that the kernel had cached, and could not write. To these come those that
    the server had acknowledged: their number is not known where it could not say it. ``alive``: the
    server lived until it was told to end."""
    count = (ended.unflushed or 0) + tried
    known = alive and ended.in_order and ended.unflushed != 0
    return f"up to {count} bytes" if known and count else "data"


def _fail_all_if_dead(home: Home) -> bool:
    """If the server has died, let all requests fail: they might wait for a successor for ever, and
    nothing could be unmounted, nor opened while the kernel looks for partitions. Returns whether it
    has."""
    with Server(home) as server:
        if not server.ended():
            return False
    client.fail_all(home)
    return True


def clear(home: Home) -> None:
    """Disconnect the device if we connected it, end the server, and remove the directory, whatever
    the state is. Does not flush. Raises Busy when a process keeps the device open; the server has
    ended then."""
    if home.is_ours():
        client.disconnect(home.device)
    _release(home)


class _Ended(NamedTuple):
    """What a server has left. ``owed``: "", or that there was a loss of which the kernel has not
    heard. ``unflushed``: see Wish. ``in_order``: it was not killed."""

    owed: str
    unflushed: int | None
    in_order: bool


def _release(home: Home) -> _Ended:
    """Wait until the kernel has disconnected, then end the server, and remove the directory. Raises
    Busy as ``clear``."""
    device = home.device
    in_order = True
    with Server(home) as server:
        if not _free(home, _FREE_S):
            server.kill()
            in_order = False
            if not _free(home, _FREE_S):
                raise Busy(f"{device.path}: disconnected, but {_names(device)} still has it open; "
                           f"end that, then `iserblk detach {device.path}`")  # fmt: skip
        if not server.end(longest_request(home.state())):
            log.warning("%s: its server did not end in time, and was killed", device.path)
            in_order = False
    owed = "the target has lost writes" if home.owed.exists() else ""
    ended = _Ended(owed, home.wish.left, in_order)
    _forget(home)
    return ended


def _forget(home: Home) -> None:
    home.device.set_queue(home.state().queue)  # for the next program that connects it
    home.remove()
    home.device.announce()  # so that udev removes its links


def _free(home: Home, within_s: float) -> bool:
    """Wait until the device is no longer connected. False: not in time, as it stays connected while
    a process has it open."""
    deadline = monotonic() + within_s
    while home.is_ours():
        if monotonic() > deadline:
            return False
        sleep(_POLL_S / 4)
    return True


def _no_attachment(home: Home) -> None:
    """Clean up after an attach or detach that was killed. Raises BadArgument when there is nothing
    to clean up, or another program has connected the device."""
    if home.device.client:
        raise BadArgument(f"{home.device.path}: not attached by iserblk (process "
                          f"{home.device.client} connected it); "
                          f"`nbd-client -d {home.device.path}` disconnects it")  # fmt: skip
    if not home.exists():
        raise BadArgument(f"{home.device.path}: nothing is attached to this device")
    log.warning("%s: cleaning up after an attach or detach that was killed", home.device.path)
    clear(home)


def _claim(device: Device) -> int:
    """As ``Device.claim``, and no other process has the device open."""
    claim = device.claim()
    try:
        _wait_for_openers(device)
    except BaseException:
        os.close(claim)
        raise
    return claim


def _wait_for_openers(device: Device) -> None:
    deadline = monotonic() + _OPENERS_S
    while device.openers():
        if monotonic() > deadline:
            raise Busy(f"{device.path}: in use: {_names(device)} has it open; end that first")
        sleep(_POLL_S)


def _names(device: Device) -> str:
    return ", ".join(device.openers()) or "a process that cannot be seen from here"


def _flush(home: Home, claim: int, state: State) -> tuple[str, bool]:
    """Write what the kernel has cached, and let the target flush. Returns why that failed, or "";
    and whether the server lives.

    Waits while requests go on ending, well or with errors. If none ends for longer than a request
    may take, the server is killed, and the kernel then fails the rest.
    """
    device = home.device
    failures: list[str] = []
    with Server(home) as server:
        alive = not server.ended()
        if not alive:
            client.wait_no_more(home)

    def fsync() -> None:
        try:
            os.fsync(claim)
        except OSError as error:
            failures.append(error.strerror or str(error))

    thread = threading.Thread(target=fsync, name="fsync", daemon=True)
    thread.start()
    patience = longest_request(state)
    progress, deadline = device.completed(), monotonic() + patience
    while thread.is_alive():
        thread.join(_POLL_S)
        if device.completed() != progress:
            progress, deadline = device.completed(), monotonic() + patience
        elif monotonic() > deadline:
            log.warning("%s: no request ended for %g s; killing the server", device.path, patience)
            client.wait_no_more(home)
            with Server(home) as server:
                server.kill()
            alive = False
            deadline = monotonic() + patience
    if failures and device.unchanged_since(state.changed):
        log.info("%s: the flush failed (%s), but nothing was written", device.path, failures[0])
        return "", alive
    if failures:
        with Server(home) as server:
            alive = alive and not server.ended()
        return failures[0], alive
    return "", alive


def longest_request(state: State) -> float:
    """Seconds after which a request has ended, or its server hangs."""
    return min(state.io_timeout, LONGEST_S) + PATIENCE_S
