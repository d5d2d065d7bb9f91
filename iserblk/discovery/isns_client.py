"""Asks an iSNS server for targets and their portals. Runs in trio."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

import trio

from iserblk.discovery import isns
from iserblk.errors import (
    ConnectionLost,
    ConnectTimeout,
    IserblkError,
    PermissionDenied,
    RemoteProtocolError,
)
from iserblk.initiator.connecting.iwarp import connect_tcp, resolve
from iserblk.iscsi.send_targets import TargetRecord
from iserblk.names import initiator_name
from iserblk.options import Options
from iserblk.url import Url, name_portal

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0  # for all answers together
FAREWELL_S = 2.0
_REFUSALS = (6, 8)  # status: the source is unknown, or not authorized


async def ask_isns(url: Url, options: Options) -> list[TargetRecord]:
    """The targets that the server of ``url`` knows, or only the target that ``url`` names. We
    register as an initiator while we ask, unless we are registered already. Raises TransportError
    and its subclasses, RemoteProtocolError, PermissionDenied when the server refuses to answer us,
    or another IserblkError."""
    name = name_portal(url.host, url.port)
    sock = await connect_tcp(await resolve(url.host, url.port), name, CONNECT_TIMEOUT_S)
    with sock:
        server = _Server(sock, name)
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                return await _look(server, initiator_name(options.initiator_name), url.iqn)
        except trio.TooSlowError:
            raise ConnectTimeout(
                f"{name}: no answer within {ANSWER_TIMEOUT_S:g} s; is this an iSNS server?"
            ) from None
        except RemoteProtocolError as error:
            text = str(error).removeprefix(f"{error.layer}: ")
            raise RemoteProtocolError(error.layer, f"{name}: {text}") from None


async def _look(server: _Server, initiator: str, wanted: str) -> list[TargetRecord]:
    entity = await _register(server, initiator)
    try:
        names = [wanted] if wanted else await _targets(server, initiator)
        records = []
        for target in names:
            query = isns.portal_query(initiator, target)
            status, attributes = await server.ask(isns.DEV_ATTR_QRY, query)
            if status not in (0, isns.NO_SUCH_ENTRY):
                raise server.refused(status)
            portals = isns.portals_untrusted(attributes, target)
            if portals or not wanted:
                records.append(TargetRecord(target, tuple(portals)))
        return records
    finally:
        if entity:
            with (
                trio.CancelScope(deadline=trio.current_time() + FAREWELL_S, shield=True),
                contextlib.suppress(IserblkError),
            ):
                await server.ask(isns.DEV_DEREG, isns.deregistration(initiator, entity))


async def _register(server: _Server, initiator: str) -> str:
    """Register as an initiator. Returns the entity to deregister at the end; "": none. If another
    program of this machine has registered us before, that registration stays as it is."""
    status, attributes = await server.ask(isns.DEV_ATTR_QRY, isns.own_query(initiator))
    if not status and isns.names_untrusted(attributes):
        return ""
    status, attributes = await server.ask(isns.DEV_ATTR_REG, isns.registration(initiator))
    if status:
        # Queries may still work; if not, their error tells the reason better.
        log.info("%s: registration: %s", server.name, isns.status_words(status))
        return ""
    return isns.entity_untrusted(attributes)


async def _targets(server: _Server, initiator: str) -> list[str]:
    status, attributes = await server.ask(isns.DEV_ATTR_QRY, isns.target_query(initiator))
    if status == isns.NO_SUCH_ENTRY:
        return []
    if status:
        raise server.refused(status)
    return isns.targets_untrusted(attributes)


class _Server:
    """One connection to an iSNS server; one request at a time."""

    def __init__(self, sock: trio.socket.SocketType, name: str) -> None:
        self.name = name
        self._sock = sock
        self._reader = isns.MessageReader()
        self._transaction = 0

    def refused(self, status: int) -> IserblkError:
        words = f"{self.name}: the iSNS server refuses: {isns.status_words(status)}"
        if status in _REFUSALS:
            return PermissionDenied(f"{words}; admit this initiator's name on the server")
        return IserblkError(words)

    async def ask(
        self, function: int, attributes: Sequence[isns.Attribute]
    ) -> tuple[int, list[isns.Attribute]]:
        """Send a request, and wait for its response. Returns its status and attributes."""
        self._transaction += 1
        request = isns.encode_request(function, self._transaction, attributes)
        try:
            while request:
                request = request[await self._sock.send(request) :]
            while True:
                for message in self._reader.feed(await self._receive()):
                    if message.function == function | isns.RESPONSE and (
                        message.transaction == self._transaction
                    ):
                        return isns.response_untrusted(message)
                    # Any other message is unsolicited, and ignored.
        except OSError as error:
            raise ConnectionLost(
                f"{self.name}: connection lost ({error.strerror}); is this an iSNS server?"
            ) from None

    async def _receive(self) -> bytes:
        data = await self._sock.recv(65536)
        if not data:
            raise ConnectionLost(f"{self.name} closed the connection; is this an iSNS server?")
        return data
