"""Connect and log in: from a URL to a Session in full feature phase. Runs in trio.

Which provider carries it is decided here: with ``rcap=auto`` an RDMA device where one leads to the
portal and gets through, else software iWARP. What was chosen, and why, is said in the log and kept
in ``Session.provider_reason``. An ``iscsi://`` URL asks for Traditional iSCSI over TCP instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import trio

from iserblk.credentials import find_credentials
from iserblk.datamover.iser import (
    SEND_INVALIDATE_NOT_SUPPORTED,
    ZBVA_NOT_SUPPORTED,
    ConnectionFlags,
)
from iserblk.errors import ConnectTimeout, IserblkError
from iserblk.initiator import connect_verbs
from iserblk.initiator.connect_iwarp import Address, connect_iwarp, connect_stream, resolve
from iserblk.initiator.login import Login, receives
from iserblk.initiator.session import Session
from iserblk.rcap.seam import QueuePair
from iserblk.rcap.stream import SocketStream
from iserblk.url import Options, Url

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
LOGIN_TIMEOUT_S = 20.0
READ_DEPTH = 64  # RDMA Reads that a target may have outstanding: IRD
# With rcap=auto, after which software iWARP is tried.
ROUTE_TIMEOUT_S = 11.0  # ARP may need seconds; beyond the limits that the provider has itself
VERBS_TIMEOUT_S = 10.0  # the connection manager repeats a lost request only after 4 s


class Choice(NamedTuple):
    """A connected queue pair; ``reason``: why it is of this provider."""

    qp: QueuePair
    reason: str


async def connect(url: Url, options: Options, isid: bytes = b"") -> Session:
    """A session with the target of ``url``. Its driver is the caller's to start. ``isid``: of the
    session that it reinstates, if any.

    Raises TransportError, LoginError and their kin, BadArgument for credentials that cannot be
    used; then nothing is left open.
    """
    credentials = find_credentials(url, options)
    portal = name_portal(url.host, url.port)
    if url.scheme == "iscsi":
        stream = await connect_stream(await resolve(url.host, url.port), portal, CONNECT_TIMEOUT_S)
        reason = "asked for by the URL's scheme, iscsi"
        login = Login.traditional(stream, url, options, portal)
        login.credentials = credentials
        login.isid = isid
        return await _log_in(login, stream, portal, reason)
    if options.rcap == "verbs":
        connect_verbs.check_available()
    qp, reason = await choose(await resolve(url.host, url.port), options, portal)
    log.info("%s: connected by %s: %s", portal, qp.provider, reason)
    login = Login(qp, url, options, portal)
    login.credentials = credentials
    login.isid = isid
    return await _log_in(login, qp, portal, reason)


async def _log_in(
    login: Login, connection: QueuePair | SocketStream, portal: str, reason: str
) -> Session:
    """``connection`` is closed when it fails."""
    try:
        with trio.fail_after(LOGIN_TIMEOUT_S):
            session = await login.run()
    except trio.TooSlowError:
        connection.close()
        raise ConnectTimeout(
            f"{portal}: no login within {LOGIN_TIMEOUT_S:g} s; does the target answer others?"
        ) from None
    except BaseException:
        connection.close()
        raise
    session.provider_reason = reason
    return session


def name_portal(host: str, port: int) -> str:
    """As people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def connection_flags(windows: bool) -> bytes:
    """The private data of a connection. A region may not be named by Send with Invalidate: that
    is for memory windows (and for software iWARP, whose STags are all alike)."""
    flags = ZBVA_NOT_SUPPORTED if windows else ZBVA_NOT_SUPPORTED | SEND_INVALIDATE_NOT_SUPPORTED
    return ConnectionFlags(flags).pack()


async def choose(addresses: Sequence[Address], options: Options, portal: str) -> Choice:
    """Connect by the provider that ``options.rcap`` asks for, or by the one that is best."""
    if options.rcap == "verbs":
        qp = await _by_verbs(addresses, options, portal, CONNECT_TIMEOUT_S)
        return Choice(qp, "asked for with rcap")
    if options.rcap == "iwarp":
        return Choice(await _by_iwarp(addresses, options, portal), "asked for with rcap")
    reason = connect_verbs.provider.available()
    if reason is not None:
        return Choice(await _by_iwarp(addresses, options, portal), f"rcap=auto, and {reason}")
    failure = ""
    for address in addresses:
        routed, words = await connect_verbs.probe(address, ROUTE_TIMEOUT_S)
        if not routed:
            reason = words.partition(";")[0]  # what it says to do is for rcap=verbs
            continue
        try:
            qp = await _by_verbs([address], options, portal, VERBS_TIMEOUT_S)
            return Choice(qp, f"rcap=auto, and RDMA device {words} leads there")
        except IserblkError as error:
            reason = failure = f"RDMA device {words} leads there, but: {error}"
            log.info("%s: %s; software iWARP is tried", portal, failure)
    try:
        return Choice(await _by_iwarp(addresses, options, portal), f"rcap=auto, and {reason}")
    except IserblkError as error:
        if failure:  # one line is to tell of both
            error.args = (f"{error}; {failure}",)
        raise


async def _by_verbs(
    addresses: Sequence[Address], options: Options, portal: str, patience: float
) -> QueuePair:
    return await connect_verbs.connect_verbs(
        addresses,
        portal,
        patience,
        private_data=connection_flags,
        receives=receives(options),
        ird=READ_DEPTH,
    )


async def _by_iwarp(addresses: Sequence[Address], options: Options, portal: str) -> QueuePair:
    return await connect_iwarp(
        addresses,
        portal,
        CONNECT_TIMEOUT_S,
        private_data=connection_flags(True),
        crc=options.mpa_crc,
        ird=READ_DEPTH,
    )
