"""``python -m tests.support.serve "LISTEN…" IQN SPEC…``: the real target, and what it holds.

LOGIN_TIMEOUT_S in the environment: how long a peer may take for its login; ISER_HEADER: bytes of
the iSER header; LOGOUT_S: how long initiators may take to log out, when SIGTERM has come; PROFILE:
the module of tests/support/profiles whose habits it has; SERIAL: what the serial numbers of its
LUNs begin with; RECORD: the journal of tests/crash/recording, in which the one LUN's store records
what is done to it, and a fault.

Prints ``ready URL``, and after each SIGUSR1 one line of JSON: descriptors, threads, and the live
objects that every connection has. SIGTERM ends it in order.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from importlib import import_module

import trio

from iserblk.target import attending, server
from iserblk.target.lunspec import LunSpec, open_lun, parse_lun_spec
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.store.lunfile import open_file
from tests.crash.recording import recorded
from tests.support.census import census
from tests.support.target_here import serve


async def _main(listen: str, iqn: str, specs: list[str]) -> None:
    serial = os.environ.get("SERIAL", "test")
    units = [_unit(parse_lun_spec(spec), f"{serial}-{i}") for i, spec in enumerate(specs)]
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(_watch, nursery.cancel_scope)
            header = int(os.environ.get("ISER_HEADER", "28"))
            luns = dict(enumerate(units))
            logout_s = int(os.environ.get("LOGOUT_S", "0"))
            await serve(
                listen.split(),
                iqn,
                luns,
                _ready,
                header=header,
                logout_s=logout_s,
                make_device=_device(os.environ.get("PROFILE")),
            )
    finally:
        for unit in units:
            unit.close()


def _unit(spec: LunSpec, serial: str) -> LogicalUnit:
    record = os.environ.get("RECORD")
    if record is None:
        return open_lun(spec, serial)
    store = recorded(open_file(spec.path, size=spec.size, block=spec.block), record)
    return LogicalUnit(store, serial=serial, block=spec.block, write_cache=True)


def _device(profile: str | None) -> server.MakeDevice:
    if profile is None:
        return DeviceServer
    device: type[DeviceServer] = import_module(f"tests.support.profiles.{profile}").Device
    return device


def _ready(url: str) -> None:
    print("ready", url, flush=True)


async def _watch(
    scope: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGUSR1) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGTERM:
                scope.cancel()
            else:
                print(json.dumps(census()), flush=True)


if __name__ == "__main__":
    attending.LOGIN_TIMEOUT_S = float(os.environ.get("LOGIN_TIMEOUT_S", attending.LOGIN_TIMEOUT_S))
    logging.basicConfig(level=logging.INFO, format="target: %(name)s: %(message)s")
    trio.run(_main, sys.argv[1], sys.argv[2], sys.argv[3:])
