"""From a LUN to a device, and back out of everything when that fails."""

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
    """What is to become a device. ``urls``: its paths; ``url``: for people, without user info and
    options; ``options`` hold for all of its URLs; ``size`` and ``block_size`` in bytes."""

    urls: Sequence[str]
    url: str
    options: Mapping[str, str]
    io_timeout: float
    size: int
    block_size: int


def check_system(places: Places) -> None:
    """Everything that can be known before a target is asked. Raises IserblkErrors."""
    device.need_root()
    nbdkit_program()
    client.nbd_client()
    device.need_module(places)


def attach(lun: Lun, wanted: Device | None, connections: int, places: Places) -> Device:
    """Make ``lun`` a device: ``wanted``, or the first one that is free. Returns when it is usable.

    ``wanted`` may be one whose nbdkit has died, if nobody uses it any more.

    Whatever exception comes out, a signal's included, nothing is left of the attempt. Raises Busy
    when the device, or every one, is in use.
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
            if candidate.client:  # also when its nbdkit has died: a user knows it by its name
                continue
            _clear_dead(home)
            if _try(home, lun, connections):
                return candidate
    count = len(device.every(places))
    raise Busy(f"all {count} NBD devices are in use: detach one, or `modprobe -r nbd; modprobe nbd "
               f"nbds_max={count * 2}` once none is")  # fmt: skip


def _try(home: Home, lun: Lun, connections: int) -> bool:
    """False when another program has taken the device meanwhile."""
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
        server.start(home, lun.urls, lun.options)
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
    """Finish what a killed attach or detach left; and what a killed nbdkit left, unless
    that device is in use still."""
    if not home.exists():
        return
    server.let_clients_finish(home, _CLIENT_S)
    with server.Server(home) as nbdkit:
        if not home.device.client:
            log.info("%s: cleaning up after an attach that was killed", home.device.path)
        elif not home.is_ours() or not nbdkit.ended():
            return
        else:
            os.close(home.device.claim())
            log.warning("%s: its nbdkit has died; detaching it", home.device.path)
    clear(home)


def _in_use(home: Home) -> str:
    if home.is_ours():
        return (f"{home.device.path}: in use: {home.state().url} is attached there; take another "
                "device, or `iserblk detach` it first")  # fmt: skip
    return (f"{home.device.path}: in use by another program (process {home.device.client} "
            "connected it); take another device")  # fmt: skip
