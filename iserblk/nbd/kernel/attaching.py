"""Attach a LUN as /dev/nbdX; if a step fails, undo the steps before it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from iserblk.errors import Busy
from iserblk.nbd.kernel import client, device, server
from iserblk.nbd.kernel.detaching import clear
from iserblk.nbd.kernel.device import Device, Places
from iserblk.nbd.kernel.programs import nbdkit_program
from iserblk.nbd.kernel.state import Home, State, locked

log = logging.getLogger(__name__)

_CLIENT_S = 15.0  # nbd-client takes milliseconds


@dataclass(slots=True, frozen=True)
class Lun:
    """The LUN to attach. ``urls``: its paths; ``url``: for messages, without user info and options;
    ``options``: for all of ``urls``; ``io_timeout``: seconds; ``size``, ``block_size``: bytes;
    ``by_nbdkit``: which server serves it."""

    urls: Sequence[str]
    url: str
    options: Mapping[str, str]
    io_timeout: float
    size: int
    block_size: int
    by_nbdkit: bool = False


def check_system(places: Places, *, by_nbdkit: bool = False) -> None:
    """Check what an attach needs on this machine, and load the nbd module if necessary. Raises
    PermissionDenied, NotSupported or another IserblkError."""
    device.need_root()
    if by_nbdkit:
        nbdkit_program()
    client.nbd_client()
    device.need_module(places)


def attach(lun: Lun, wanted: Device | None, connections: int, places: Places) -> Device:
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
    for candidate in device.every(places):
        with contextlib.suppress(Busy), locked(candidate) as home:
            if candidate.client:  # also if its server has died: its user may still rely on it
                continue
            _clear_dead(home)
            if _try(home, lun, connections):
                return candidate
    count = len(device.every(places))
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
        home.make(State(lun.url, lun.io_timeout, home.device.changed()))
        server.start(home, lun.urls, lun.options, by_nbdkit=lun.by_nbdkit)
        client.connect(home, lun.block_size, connections, lun.io_timeout)
        client.wait_until_usable(home.device, lun.size)


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
    server.let_clients_finish(home, _CLIENT_S)
    with server.Server(home) as running:
        if not home.device.client:
            log.info("%s: cleaning up after an attach that was killed", home.device.path)
        elif not home.is_ours() or not running.ended():
            return
        else:
            os.close(home.device.claim())
            log.warning("%s: its server has died; detaching it", home.device.path)
    clear(home)


def _in_use(home: Home) -> str:
    if home.is_ours():
        return (f"{home.device.path}: in use: {home.state().url} is attached there; name another "
                "device, or first detach this device with `iserblk detach`")  # fmt: skip
    return (f"{home.device.path}: in use by another program (process {home.device.client} "
            "connected it); name another device")  # fmt: skip
