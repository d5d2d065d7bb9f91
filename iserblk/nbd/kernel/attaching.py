"""Attach a LUN as /dev/nbdX; if a step fails, undo the steps before it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from iserblk.errors import BadArgument, Busy, IserblkError
from iserblk.names import random_isid
from iserblk.nbd.kernel import client, device, server
from iserblk.nbd.kernel.detaching import PATIENCE_S, clear, longest_request
from iserblk.nbd.kernel.device import Device, Directories
from iserblk.nbd.kernel.links import flush
from iserblk.nbd.kernel.orders import NoHandOver
from iserblk.nbd.kernel.owed import Owed
from iserblk.nbd.kernel.programs import nbdkit_program, signals_held
from iserblk.nbd.kernel.state import Home, State, locked

log = logging.getLogger(__name__)

_KILLED = "%s: its server did not end in time, and was killed"
OPENED_S = 3.0  # in which a device is opened, unless it waits for a server that has died
_GONE_S = 2.0  # in which a server has ended that has handed over its connections


@dataclass(slots=True, frozen=True)
class Lun:
    """The LUN to attach. ``urls``: its paths; ``url``: for messages, without user info and options;
    ``options``: for all of ``urls``; ``io_timeout``: seconds, see ``client.kernel_seconds``;
    ``size``, ``block_size``, ``max_transfer``: bytes; ``name``: the same for all paths to the LUN,
    and for no other; ``by_nbdkit``: which server serves it; ``reserved``: the server is to reserve
    the LUN; ``udev``: properties that udev is to have of the device."""

    urls: Sequence[str]
    url: str
    options: Mapping[str, str]
    io_timeout: float
    size: int
    block_size: int
    max_transfer: int
    name: str
    by_nbdkit: bool = False
    reserved: bool = False
    udev: Mapping[str, str] = dataclasses.field(default_factory=dict)


def check_system(directories: Directories, *, by_nbdkit: bool = False) -> None:
    """Check what an attach needs on this machine, and load the nbd module if necessary. Raises
    PermissionDenied, NotSupported or another IserblkError."""
    device.need_root()
    if by_nbdkit:
        nbdkit_program()
    device.need_module(directories)


def warn_of_panic(io_timeout: float, directories: Directories) -> None:
    """While the target is away, tasks wait in the kernel for ``io_timeout`` seconds, and a machine
    may be set to panic then."""
    limit = device.panics_after(directories)
    if io_timeout >= limit:
        log.warning(
            "this machine panics when a task waits for %g s (kernel.hung_task_panic is set), and a"
            " request may wait for %g s: give less as io-timeout, or raise"
            " kernel.hung_task_timeout_secs",
            limit,
            io_timeout,
        )


def attach(lun: Lun, wanted: Device | None, connections: int, directories: Directories) -> Device:
    """Attach ``lun`` to the device ``wanted``, or to the first free device. Returns the device when
    it is usable.

    ``wanted`` may be a device whose server has died, if no process uses it any more.

    Raises Busy when ``wanted``, or every device, is in use; else IserblkError. After any exception,
    also that of a signal, nothing is left of the attempt.
    """
    if wanted is not None:
        with locked(wanted) as home:
            _clear_dead(home)
            if wanted.client:
                raise Busy(_in_use(home))
            _connect(home, lun, connections)
        return wanted
    for candidate in device.every(directories):
        with contextlib.suppress(Busy), locked(candidate) as home:
            if candidate.client:  # also if its server has died: its user may still rely on it
                continue
            _clear_dead(home)
            if _try(home, lun, connections):
                return candidate
    count = len(device.every(directories))
    raise Busy(f"all {count} NBD devices are in use: detach one; or detach all, then run "
               f"`modprobe -r nbd; modprobe nbd nbds_max={count * 2}`")  # fmt: skip


def _try(home: Home, lun: Lun, connections: int) -> bool:
    """Connect the device. False: another program has taken it meanwhile."""
    try:
        _connect(home, lun, connections)
    except Exception:
        if home.device.client:
            return False
        raise
    return True


def _connect(home: Home, lun: Lun, connections: int) -> None:
    with _or_nothing(home):
        changed = home.device.changed()
        state = State(
            lun.url,
            lun.io_timeout,
            changed,
            lun.name,
            connections,
            random_isid().hex(),
            by_nbdkit=lun.by_nbdkit,
            reserved=lun.reserved,
            queue=home.device.queue(),
        )
        home.make(state)
        home.tell_udev(lun.udev)
        _start(home, lun, state)
        client.connect(home, lun.block_size, lun.max_transfer, state)
        client.wait_until_usable(home.device, lun.size)


def _start(home: Home, lun: Lun, state: State) -> None:
    """Start the server. Its session has the ISID of its predecessor's: so the target ends what that
    left there before the successor writes anything (RFC 7143 section 6.3.5)."""
    server.start(home, lun.urls, _options(lun, state), by_nbdkit=lun.by_nbdkit)


def _options(lun: Lun, state: State) -> dict[str, str]:
    isid = {"isid": state.isid} if state.isid else {}  # State of an older version has none
    return {**lun.options, **isid}


def replace(lun: Lun, wanted: Device) -> bool:
    """Give the device ``wanted`` a new server for ``lun``, the LUN that is attached there. Requests
    wait meanwhile. False: we have attached nothing there; nothing is changed.

    A server of ours that still runs hands its connections over when its successor is ready. If it
    does not, a warning is logged; then the old server, if it still runs, answers what it has
    received, flushes and ends (nbdkit is killed behind a flush), its successor starts, and the
    kernel is connected anew. Raises BadArgument when another LUN is attached there, or the LUN is
    smaller than the device; Busy when another attach or detach is under way; IserblkError when the
    successor cannot serve. If the old server has ended by then, requests wait for some time, then
    fail, until another replace succeeds.
    """
    with locked(wanted) as home:
        if not home.is_ours():
            return False
        state = home.state()
        if lun.name != state.backend:
            raise BadArgument(f"{wanted.path}: {state.url} is attached there, and {lun.url} is "
                              "another LUN")  # fmt: skip
        if lun.size < wanted.size:
            raise BadArgument(f"{wanted.path}: {lun.url} has shrunk to {lun.size} bytes from "
                              f"{wanted.size}: detach it, and attach it anew")  # fmt: skip
        fresh = dataclasses.replace(
            state,
            url=lun.url,
            io_timeout=lun.io_timeout,
            by_nbdkit=lun.by_nbdkit,
            reserved=lun.reserved,
        )
        with server.Server(home) as old:
            # Beside the session of the old server, which goes on, another one is opened.
            beside = dataclasses.replace(fresh, isid=random_isid().hex())
            if _handed_over(home, lun, beside, state, old):
                home.change(beside)
                client.renew(home, beside, lun.size)
            else:
                _end(home, state, old)
                home.change(fresh)
                _start(home, lun, fresh)
                client.replace(home, fresh)
        client.wait_until_usable(wanted, lun.size)
    return True


def _handed_over(home: Home, lun: Lun, fresh: State, state: State, old: server.Server) -> bool:
    """Whether a successor has taken the kernel's connections over; the old server has ended then.
    Raises IserblkError when the successor cannot serve; the old server goes on then."""
    if state.by_nbdkit or lun.by_nbdkit or old.ended():
        return False
    first = state.reserved or lun.reserved
    try:
        with server.succeeded(home, lun.urls, _options(lun, fresh), take_first=first):
            if not old.ended(state.io_timeout + PATIENCE_S):
                old.kill()
                log.warning(_KILLED, home.device.path)
    except IserblkError as error:
        if not isinstance(error, NoHandOver) and not old.ended(_GONE_S):
            raise
        log.warning(
            "%s: its server has not handed over its connections (%s): requests that wait in them "
            "are late by up to %d s",
            home.device.path,
            error,
            client.lateness(state),
        )
        return False
    return True


def _end(home: Home, state: State, old: server.Server) -> None:
    """A loss of which the kernel has not heard, and a last flush that has failed, are left to the
    successor (``Owed``)."""
    if state.by_nbdkit:
        failure = "" if old.ended() else _not_flushed(home, state)
        with signals_held():  # between these two nobody would know of the loss
            old.kill()  # told to end, it would wait for the kernel to disconnect
            if failure:  # what it was to write again was in its memory, which has the last word
                Owed(home.owed).owe()
        if failure:
            log.warning("%s: nbdkit did not flush: %s", home.device.path, failure)
    elif not old.end(longest_request(state)):
        log.warning(_KILLED, home.device.path)
        Owed(home.owed).owe()  # what it has not flushed was in its memory
    if home.owed.exists():
        log.warning(
            "%s: writes were lost, or the last flush has failed; the next flush fails",
            home.device.path,
        )


def _not_flushed(home: Home, state: State) -> str:
    """Let nbdkit put all that the kernel has written on stable storage. Returns why it has not, or
    "". (The kernel's own flush of the device would wait for the successor, and take the report of
    the loss from whoever flushes next.)"""
    if home.device.unchanged_since(state.changed):
        return ""
    return flush(home.socket, longest_request(state))


@contextlib.contextmanager
def _or_nothing(home: Home) -> Iterator[None]:
    try:
        yield
    except BaseException:
        clear(home)
        raise


def _clear_dead(home: Home) -> None:
    """Clean up after an attach or detach that was killed; also after a server that was killed. Of
    a device that still has its server, nothing is changed. Raises Busy when a process still uses
    the device of a dead server."""
    if not home.exists():
        return
    with server.Server(home) as running:
        if not home.device.client:
            log.info("%s: cleaning up after an attach that was killed", home.device.path)
        elif not home.is_ours() or not running.ended():
            return
        else:
            _check_unused(home)
            log.warning("%s: its server has died; detaching it", home.device.path)
    clear(home)


def _check_unused(home: Home) -> None:
    """Raises Busy when a process uses the device, whose server has died."""
    problems: list[Exception] = []

    def claim() -> None:
        try:
            os.close(home.device.claim())
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=claim, name="claim", daemon=True)
    thread.start()
    thread.join(OPENED_S)
    if thread.is_alive():
        # The kernel still reads partitions for whoever has opened the device first: nobody uses it
        # yet, so its requests may fail. Else no open of it would ever end.
        client.fail_all(home)
        thread.join(OPENED_S)
    if thread.is_alive():
        raise Busy(f"{home.device.path}: its server has died, and it cannot be opened: "
                   f"`iserblk detach --force {home.device.path}`")  # fmt: skip
    if problems:
        raise problems[0]


def _in_use(home: Home) -> str:
    if home.is_ours():
        return (f"{home.device.path}: in use: {home.state().url} is attached there; name another "
                "device, or first detach this device with `iserblk detach`")  # fmt: skip
    return (f"{home.device.path}: in use by another program (process {home.device.client} "
            "connected it); name another device")  # fmt: skip
