"""Discovery sessions: ask a portal with SendTargets for its targets. Runs in trio.

Over TCP as the standards want it (RFC 7145 section 5.1; with ``style=stream`` as well), and over
iSER as existing targets serve it: there the PDUs travel in Sends. Redirects are followed, and
``fallback=iscsi`` holds, as for any login.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import dataclass, field, replace

import trio

from iserblk.errors import ConnectTimeout, IserblkError, RemoteProtocolError
from iserblk.initiator.connecting.login import Login, at_portal
from iserblk.initiator.connecting.reach import reach
from iserblk.initiator.session.slots import TaskSlot
from iserblk.iscsi.send_targets import (
    DiscoveryInitiator,
    Portal,
    TargetRecord,
    records_untrusted,
)
from iserblk.loop.clock import monotonic
from iserblk.loop.patience import fail_after
from iserblk.loop.tasks import until_readable
from iserblk.options import Options
from iserblk.url import Url

ANSWER_TIMEOUT_S = 15.0  # with the login it must fit into the time for a login
GOODBYE_S = 1.0
_SLOTS = 4
ALL = "All"


@dataclass(slots=True, frozen=True)
class Answer:
    """The answer to SendTargets. ``portal``: the portal that has answered. ``scheme``: ``iser`` or
    ``iscsi``, how it was asked. ``reason``: as of ``Reached``. ``targets``: in the target's
    order. ``left_out``: what of the answer could not be read."""

    portal: Portal
    scheme: str
    reason: str
    targets: list[TargetRecord]
    left_out: list[str] = field(default_factory=list)


class Discovery(Login):
    """One discovery session, from its login to its logout."""

    async def ask(self, value: str) -> list[tuple[str, str]]:
        """Log in, send SendTargets=``value``, and log out; returns the pairs of the answer."""
        slots = [TaskSlot(index) for index in range(_SLOTS)]
        login = await self._negotiate(list(slots))
        self._dm.notice_key_values(login.parameters)
        self._dm = self._dm.enable_datamover()
        session = DiscoveryInitiator(login.cmd_sn, login.exp_stat_sn)
        try:
            with fail_after(ANSWER_TIMEOUT_S):
                await self._talk(session, slots[0], session.ask(value))
        except trio.TooSlowError:
            raise ConnectTimeout(
                f"{self._portal}: no answer to SendTargets within {ANSWER_TIMEOUT_S:g} s"
            ) from None
        except RemoteProtocolError as error:
            raise at_portal(self._portal, error) from None
        except IserblkError as error:
            raise type(error)(f"{self._portal}: during discovery: {error}") from None
        answer = session.answer
        assert answer is not None  # _talk has waited for it
        # The answer is here: how the session ends changes nothing about it.
        with trio.move_on_after(GOODBYE_S), contextlib.suppress(IserblkError):
            await self._talk(session, slots[0], session.log_out())
        self._dm.connection_terminate()
        return answer

    async def _talk(
        self, session: DiscoveryInitiator, slot: TaskSlot, request: tuple[bytes, bytes]
    ) -> None:
        """Send, and answer what comes, until the answer or the logout is complete."""
        await self._send(slot, *request)
        asked = session.answer
        while session.answer is asked and not session.logged_out:
            while not self._received:
                await until_readable(self._dm.fileno())
                self._dm.progress(monotonic())
            outgoing = deque(session.receive(*self._received.popleft()))
            while outgoing:
                await self._send(slot, *outgoing.popleft())


async def send_targets(url: Url, options: Options) -> Answer:
    """Ask the portal of ``url`` for all targets, or for the one target that ``url`` names.

    Raises TransportError, LoginError and related errors, as connecting does; nothing is left open.
    """
    value = url.iqn or ALL
    nameless = replace(url, iqn="", lun=None)
    reached = await reach(nameless, options, Discovery, lambda session: session.ask(value))
    here = Portal(reached.url.host, reached.url.port)
    try:
        told = records_untrusted(reached.result, here)
    except RemoteProtocolError as error:
        raise at_portal(reached.portal, error) from None
    return Answer(here, reached.url.scheme, reached.reason, *told)
