"""Registers the target with an iSNS server, for as long as it runs (RFC 4171). Runs in trio.

The target is an entity of its own, named like the target. The first registration replaces what
there is under that name: a target that was killed, and comes back with other portals, leaves
nothing of the old ones. It is repeated well before its period ends, so a server that has forgotten
the target (it has lost its database, say) knows it again. Entity status inquiries are not asked
for.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import trio

from iserblk.discovery import isns
from iserblk.discovery.isns_connection import IsnsConnection
from iserblk.errors import ConnectFailed, ConnectTimeout, IserblkError
from iserblk.loop.tasks import sleep, task_time
from iserblk.target.announcing.announced import Announced

log = logging.getLogger(__name__)

PERIOD_S = 300
LEAST_PERIOD_S = 10  # whatever a server says
ANSWER_S = 20.0
DEREGISTER_S = 2.0
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 120.0


class Registration:
    """Of one target with one server."""

    def __init__(self, server: tuple[str, int], announced: Announced) -> None:
        self._server = server
        self._name = isns_name(*server)
        self._target = announced.target
        self._announced = announced

    async def run(self) -> None:
        """Register, and stay registered, until cancelled; then deregister. Errors are logged, and
        it is tried again."""
        pause = FIRST_RETRY_S
        registered = False  # as far as we know
        ever = False
        told = ""
        try:
            while True:
                try:
                    period = await self._register(isns.REPLACE if not registered else 0)
                except trio.Cancelled:
                    ever = True  # perhaps it was carried out
                    raise
                except IserblkError as error:
                    if registered:  # perhaps it has forgotten us
                        registered = False
                        continue
                    if str(error) != told:
                        log.warning("not registered with iSNS: %s", error)
                    told = str(error)
                    await sleep(pause)
                    pause = min(2 * pause, LAST_RETRY_S)
                    continue
                if not registered:
                    log.info("%s: registered as an iSNS entity", self._name)
                registered = ever = True
                pause, told = FIRST_RETRY_S, ""
                await sleep(period / 3)
        finally:
            if ever:
                with (
                    trio.CancelScope(deadline=task_time() + DEREGISTER_S, shield=True),
                    suppress(IserblkError),
                ):
                    await self._say(isns.DEV_DEREG)

    async def _register(self, flags: int) -> float:
        """Register. Returns the time, in seconds, before whose end to do so again. Raises
        IserblkError."""
        found = await self._say(isns.DEV_ATTR_REG, flags)
        period = isns.period_untrusted(found, PERIOD_S) or PERIOD_S
        return min(PERIOD_S, max(LEAST_PERIOD_S, period))

    async def _say(self, function: int, flags: int = 0) -> list[isns.Attribute]:
        try:
            with trio.fail_after(ANSWER_S):
                stream = await connect(*self._server)
                async with stream:
                    attributes = isns.deregistration(self._target, self._target)
                    if function == isns.DEV_ATTR_REG:
                        here = str(stream.socket.getsockname()[0])
                        attributes = isns.target_registration(
                            self._target, self._target, self._announced.portals_at(here), PERIOD_S
                        )
                    connection = IsnsConnection(stream, self._name)
                    status, answer = await connection.ask(function, attributes, flags)
        except trio.TooSlowError:
            raise ConnectTimeout(f"{self._name}: no answer within {ANSWER_S:g} s") from None
        except OSError as error:
            words = error.strerror or str(error)
            raise ConnectFailed(f"{self._name}: cannot connect: {words}") from None
        if status:
            raise connection.refused(status)
        return answer


async def _connect(host: str, port: int) -> trio.SocketStream:
    return await trio.open_tcp_stream(host, port)


connect = _connect


def isns_name(host: str, port: int) -> str:
    return f"isns://[{host}]:{port}" if ":" in host else f"isns://{host}:{port}"
