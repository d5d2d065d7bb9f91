"""Gateways: our target, whose LUN 0 is a LUN of another target. In this loop, or as a process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from iserblk.gateway.opening import open_gateways
from iserblk.gateway.store import DiskStore
from iserblk.target.scsi.device import LogicalUnit
from tests.cli.commands import Server
from tests.support.ports import free_port
from tests.support.target_here import serve

GATE = "iqn.2026-11.example:gate"


@asynccontextmanager
async def running_gateway(
    *urls: str, header: int = 28, read_only: bool = False, iqn: str = GATE
) -> AsyncIterator[tuple[str, LogicalUnit]]:
    """The URL of LUN 0 of a gateway to ``urls``, and its unit. ``header``: of the gateway's own
    initiators. ``iqn``: its name. At the end the remote LUN is flushed, if it answers."""
    send, receive = trio.open_memory_channel[str](1)
    async with open_gateways(iqn) as gateways:
        unit = await gateways.open(urls, read_only)
        try:
            async with trio.open_nursery() as nursery:
                target = partial(serve, header=header)
                nursery.start_soon(target, "127.0.0.1:0", iqn, {0: unit}, send.send_nowait)
                yield f"{await receive.receive()}/0", unit
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True), contextlib.suppress(OSError):
                await trio.to_thread.run_sync(unit.close)


def store_of(unit: LogicalUnit) -> DiskStore:
    assert isinstance(unit.store, DiskStore)
    return unit.store


class MortalGateway:
    """``iserblk target`` as a process that is killed, and started again on its address. ``behind``:
    a URL. ``listen``: HOST:PORT."""

    def __init__(
        self, behind: str, log: Path, *options: str, listen: str = "", iqn: str = GATE
    ) -> None:
        self._words = ("target", "--iqn", iqn, "--lun", behind, *options, "--listen")
        self._listen = listen or f"127.0.0.1:{free_port()}"
        self.log = log
        self.start()

    def start(self) -> None:
        self._server = Server((*self._words, self._listen), self.log, {})
        self._listen = self._server.url.removeprefix("iser://").partition("/")[0]

    @property
    def port(self) -> int:
        return int(self._listen.rpartition(":")[2])

    def kill(self) -> None:
        self._server.process.kill()
        self._server.process.communicate()
