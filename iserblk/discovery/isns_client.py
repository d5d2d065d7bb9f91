"""Asks an iSNS server for targets and their portals. Runs in trio."""

from __future__ import annotations

import contextlib
import logging

import trio

from iserblk.discovery import isns
from iserblk.discovery.isns_connection import IsnsConnection
from iserblk.errors import ConnectTimeout, IserblkError, RemoteProtocolError
from iserblk.initiator.connecting.iwarp import connect_tcp, resolve
from iserblk.iscsi.send_targets import MAXIMUM_RECORDS, LeftOut, TargetRecord, Told
from iserblk.loop.patience import fail_after
from iserblk.loop.tasks import task_time
from iserblk.names import initiator_name
from iserblk.options import Options
from iserblk.url import Url, name_portal

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0  # for all answers together
DEREGISTER_S = 2.0


async def ask_isns(url: Url, options: Options) -> Told:
    """The targets that the server of ``url`` knows, or only the target that ``url`` names. We
    register as an initiator while we ask, unless we are registered already. What cannot be read of
    the answers is left out, and so is a target of which the server does not tell. Raises
    TransportError and its subclasses, RemoteProtocolError, PermissionDenied when the server refuses
    to answer us, or another IserblkError."""
    name = name_portal(url.host, url.port)
    addresses = await resolve(url.host, url.port)
    hint = "is there an iSNS server?"
    sock = await connect_tcp(addresses, name, CONNECT_TIMEOUT_S, hint)
    with sock:
        server = IsnsConnection(trio.SocketStream(sock), name)
        try:
            with fail_after(ANSWER_TIMEOUT_S):
                return await _look(server, initiator_name(options.initiator_name), url.iqn)
        except trio.TooSlowError:
            raise ConnectTimeout(
                f"{name}: no answer within {ANSWER_TIMEOUT_S:g} s; is this an iSNS server?"
            ) from None
        except RemoteProtocolError as error:
            text = str(error).removeprefix(f"{error.layer}: ")
            raise RemoteProtocolError(error.layer, f"{name}: {text}") from None


async def _look(server: IsnsConnection, initiator: str, wanted: str) -> Told:
    left_out: list[str] = LeftOut()
    entity = await _register(server, initiator)
    try:
        names = [wanted] if wanted else await _targets(server, initiator, left_out)
        records = []
        count = 0
        for target in names:
            query = isns.portal_query(initiator, target)
            status, attributes = await server.ask(isns.DEV_ATTR_QRY, query)
            if status not in (0, isns.NO_SUCH_ENTRY):
                if wanted:
                    raise server.refused(status)
                left_out.append(f"{target}: {server.refused(status)}")
                continue
            portals = isns.portals_untrusted(attributes, target, left_out)
            count += len(portals)
            if count > MAXIMUM_RECORDS:
                raise RemoteProtocolError("iSNS", f"more than {MAXIMUM_RECORDS} portals")
            if portals or not wanted:
                records.append(TargetRecord(target, tuple(portals)))
        return Told(records, left_out)
    finally:
        if entity:
            with (
                trio.CancelScope(deadline=task_time() + DEREGISTER_S, shield=True),
                contextlib.suppress(IserblkError),
            ):
                await server.ask(isns.DEV_DEREG, isns.deregistration(initiator, entity))


async def _register(server: IsnsConnection, initiator: str) -> str:
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


async def _targets(server: IsnsConnection, initiator: str, left_out: list[str]) -> list[str]:
    status, attributes = await server.ask(isns.DEV_ATTR_QRY, isns.target_query(initiator))
    if status == isns.NO_SUCH_ENTRY:
        return []
    if status:
        raise server.refused(status)
    return isns.targets_untrusted(attributes, left_out)
