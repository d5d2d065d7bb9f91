"""Connects and logs in: from a URL to a Session in full feature phase. Runs in trio.

It decides which provider carries the connection. With ``rcap=auto`` that is an RDMA device, where
one leads to the portal and connects, else software iWARP. The choice and its reason are logged, and
kept in ``Session.provider_reason``. It also decides on the style of the connection (``styles``).
An ``iscsi://`` URL asks for Traditional iSCSI over TCP instead.

A portal that does not answer in the protocol of the URL is asked what it speaks (``speakers``), so
that the error can say which URL is right. That never changes how a connection is made.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import trio

from iserblk.credentials import find_credentials
from iserblk.datamover.iser import (
    BHS_LENGTH,
    HEADER_LENGTH,
    SEND_INVALIDATE_NOT_SUPPORTED,
    ZBVA_NOT_SUPPORTED,
    ConnectionFlags,
)
from iserblk.errors import (
    ConnectFailed,
    ConnectionLost,
    ConnectTimeout,
    HostNotFound,
    IserblkError,
    IserRefused,
    LoginError,
    NoMpaReply,
    NotSupported,
    OtherProtocol,
    RemoteProtocolError,
    TransportError,
)
from iserblk.initiator.connecting import sctp, speakers, verbs
from iserblk.initiator.connecting.further import Further
from iserblk.initiator.connecting.iwarp import (
    IS_IT_ISER,
    Address,
    connect_iwarp,
    connect_stream,
    doubting,
    resolve,
)
from iserblk.initiator.connecting.login import (
    RECEIVE_SIZE,
    Login,
    header_hint,
    over_rdma,
    over_stream,
    over_tcp,
    receives,
)
from iserblk.initiator.connecting.protocols import ISCSI, ISER, is_stranger
from iserblk.initiator.connecting.redirects import REDIRECTION, follow
from iserblk.initiator.connecting.styles import AUTO, CM, STREAM, STYLES
from iserblk.initiator.session.connection import Connection
from iserblk.initiator.session.session import Session
from iserblk.loop.clock import monotonic
from iserblk.loop.patience import fail_after
from iserblk.loop.tasks import sleep
from iserblk.options import NO_BYTE_STREAM, Options
from iserblk.rcap.iwarp.mpa import ENHANCED_SIZE, HEADER_SIZE
from iserblk.rcap.iwarp.streaming import StreamingQueuePair
from iserblk.rcap.seam import QueuePair
from iserblk.sockets.stream import SocketStream
from iserblk.url import DEFAULT_PORT, Url
from iserblk.url import name_portal as name_portal  # noqa: PLC0414

log = logging.getLogger(__name__)

T = TypeVar("T")
L = TypeVar("L", bound=Login)

CONNECT_TIMEOUT_S = 10.0
LOGIN_TIMEOUT_S = 20.0
READ_DEPTH = 64  # RDMA Reads that a target may have outstanding: IRD
# With rcap=auto: the times after which software iWARP is tried.
ROUTE_TIMEOUT_S = 11.0  # ARP may need seconds; longer than the provider's own limits
VERBS_TIMEOUT_S = 10.0  # the connection manager repeats a lost request only after 4 s
# With fallback=iscsi: how long an MPA Reply is waited for. Traditional iSCSI never answers.
MPA_TIMEOUT_S = 3.0
# How long a portal may be silent, to the question who it is, too, until the user is told.
SILENT_S = 2.3  # and DOUBT_S before: three seconds
# Bytes of private data of an MPA Request of ours: with them it has the 48 bytes of a BHS. So a
# portal of Traditional iSCSI has a PDU to refuse, and need not wait for the rest of one: LIO
# answers at once; until it has a BHS, it takes no other connection for 15 s.
PRIVATE_DATA = BHS_LENGTH - HEADER_SIZE - ENHANCED_SIZE


_SPEAKS = {
    ISCSI: "speaks Traditional iSCSI, and no iSER",
    ISER: "speaks iSER, and no Traditional iSCSI",
}
_PERHAPS = (
    "the portal speaks Traditional iSCSI, and perhaps no iSER: then write iscsi:// for iser://"
)
INITIATOR_ERROR = 0x0200  # the status of a login that the portal does not take in this mode
_PORT = f"correct the port (targets listen on {DEFAULT_PORT} mostly)"


class Choice(NamedTuple):
    """A connected queue pair; ``reason``: why this provider carries it."""

    qp: QueuePair
    reason: str


@dataclass(slots=True, frozen=True)
class Reached(Generic[T]):
    """Where a login succeeded. ``url``: with the final address and scheme. ``reason``: why this
    provider carries the connection. ``result``: of what was run there."""

    url: Url
    portal: str
    reason: str
    result: T


async def connect(url: Url, options: Options, isid: bytes = b"") -> Session:
    """A session with the target of ``url``. The caller starts its driver. ``isid``: of the session
    that it reinstates, if any.

    Raises TransportError, LoginError and related errors, BadArgument for credentials that cannot be
    used; then nothing is left open.
    """

    async def log_in(login: Login) -> Session:
        login.isid = isid
        return await login.run()

    # A session that is reinstated was right before.
    reached = await reach(url, options, Login, log_in, doubts=isid == options.isid)
    session = reached.result
    session.provider_reason = reached.reason
    if reached.url.scheme != url.scheme:
        options = fallback_options(options)
    # Further connections are of the same mode (RFC 7145 section 5.1).
    session.more = Further(reached.url, replace(options, fallback="none"), _join)
    return session


async def _join(url: Url, options: Options, session: Session) -> Connection:
    """Log in one more connection of ``session``. Errors as ``connect``; the session is not
    changed."""
    cid = session.free_cid()

    async def log_in(login: Login) -> Connection:
        return await login.join(session, cid)

    reached = await reach(url, options, Login, log_in, doubts=False)
    connection = reached.result
    connection.provider_reason = reached.reason
    return connection


async def complete(session: Session, options: Options) -> None:
    """Give a session that no driver runs yet the connections that it should have. Those that cannot
    be had now are left to the reconnector."""
    agreed = session.parameters
    if agreed.max_connections < options.connections:
        log.warning(
            "%s: the target takes %d connections of a session (MaxConnections), %d were asked for",
            session.portal,
            agreed.max_connections,
            options.connections,
        )
    if agreed.error_recovery_level < options.error_recovery_level:
        log.warning(
            "%s: the target agrees to error recovery level %d, %d was asked for",
            session.portal,
            agreed.error_recovery_level,
            options.error_recovery_level,
        )
    for _ in range(session.missing):  # each once: a target may drop them as soon as they are there
        if not session.missing or session.more is None:
            return
        try:
            session.offer_connection(await session.more(session))
        except (IserblkError, OSError) as error:
            log.warning("%s: %d connections so far: %s", session.portal, session.count, error)
            return
        session.progress(monotonic())


async def reach(
    url: Url,
    options: Options,
    kind: type[L],
    run: Callable[[L], Awaitable[T]],
    doubts: bool = True,
) -> Reached[T]:
    """``run`` a login of this ``kind`` where the target accepts us: redirects are followed, and
    ``fallback=iscsi`` is obeyed where iSER cannot be had. Errors as ``connect``; the connection is
    closed when ``run`` fails. ``doubts``: whether a portal that was never right before, and does
    not answer, is asked what it speaks."""

    async def attempt(at: Url) -> Reached[T]:
        known = STYLES.right(at.scheme, at.host, at.port)
        doubt = _Doubt(at, options, doubts and not known)
        if at.scheme == "iscsi":
            reason = "asked for by the URL's scheme, iscsi"
            reached = await _traditional(at, options, kind, run, reason, doubt)
        else:
            reached = await _iser(at, options, kind, run, doubt)
        STYLES.note_right(at.scheme, at.host, at.port)
        return reached

    return await follow(url, attempt)


class _Doubt:
    """Who answers at the portal of ``url``, as far as it is known: ``who``, of ``protocols``.
    ``allowed``: whether it may be asked; ``wanted``: and that is of use. ``iser``: it has shown
    that it takes iSER. ``silent``: it has not answered an MPA Request in its full time.
    ``warned``: the user has been told that it says nothing at all."""

    def __init__(self, url: Url, options: Options, allowed: bool) -> None:
        self.allowed = allowed
        # With a fallback, who speaks iSCSI is found by that.
        self.wanted = allowed and not (url.scheme == "iser" and options.fallback == "iscsi")
        self.iser = self.silent = self.warned = False
        self.who = ""
        self._asked = False
        self._url = url
        self._options = options
        self._portal = name_portal(url.host, url.port)

    async def ask(self, addresses: Sequence[Address], patience: float) -> str:
        """Ask with a Login Request, once. Returns ``who``."""
        if self.wanted and not self._asked and not self.who:
            self.who = await self._answer(addresses, patience)
        return self.who

    async def stranger(self, addresses: Sequence[Address]) -> str:
        """Who answers there and is no target, if anybody; for an attempt whose login gets no
        answer. A target may take its time, whatever it speaks; a stranger never becomes one."""
        if self.allowed and not self._asked and not self.who:
            self.who = await self._answer(addresses, LOGIN_TIMEOUT_S)
        return self.who if is_stranger(self.who) else ""

    async def _answer(self, addresses: Sequence[Address], patience: float) -> str:
        """Who answers a Login Request. A warning tells of a portal that says nothing."""
        self._asked = True
        question = speakers.login_question(self._options)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell)
            who = await speakers.ask(addresses, self._portal, question, patience)
            nursery.cancel_scope.cancel()
        return who

    async def _tell(self) -> None:
        if self.warned:
            return
        await sleep(SILENT_S)
        self.warned = True
        log.warning(
            "%s takes connections, and has answered nothing for three seconds: its answer is waited"
            " for, up to a minute; does it answer other initiators?",
            self._portal,
        )

    async def takes_mpa(self) -> bool:
        """Whether the portal answers an MPA Request. For one that has refused a login."""
        if not self.wanted:
            return False
        addresses = await resolve(self._url.host, self._url.port)
        question = speakers.mpa_question()
        who = await speakers.ask(addresses, self._portal, question, speakers.ANSWER_S)
        return who == ISER

    async def beside(self, address: Address) -> str:
        """``ask``, for as long as the attempt goes on beside which it is asked."""
        return await self.ask([address], LOGIN_TIMEOUT_S)

    async def ask_late(self, error: IserblkError) -> str:
        """``ask``, after the attempts have failed with ``error``."""
        if self.wanted and not self.who and not self.iser and isinstance(error, TransportError):
            with suppress(IserblkError):
                addresses = await resolve(self._url.host, self._url.port)
                await self.ask(addresses, speakers.ANSWER_S)
                if not self.who and self._url.scheme == "iscsi":
                    question = speakers.mpa_question()
                    self.who = await speakers.ask(
                        addresses, self._portal, question, speakers.ANSWER_S
                    )
        return self.who

    def told(self, error: IserblkError) -> IserblkError:
        """What to tell of ``error``, with which all attempts have ended."""
        url, who = self._url, self.who
        if self.iser:
            return error
        if is_stranger(who):
            return OtherProtocol(f"{self._portal}: {who} answers there, no target: {_PORT}", who)
        wanted, scheme = (ISER, "iscsi") if url.scheme == "iser" else (ISCSI, "iser")
        if who in ("", wanted):
            return error
        right = replace(url, scheme=scheme).redacted().rstrip("/")
        if isinstance(error, ConnectFailed | RemoteProtocolError):  # it has answered, somehow
            text = str(error).removesuffix(IS_IT_ISER)
            write = f"write {right} in place of {url.scheme}://"
            error.args = (f"{text}; the portal speaks {who}: {write}",)
            return error
        return OtherProtocol(
            f"{self._portal} {_SPEAKS[who]}: write {right} in place of {url.scheme}://, or switch"
            f" {wanted} on at the target",
            who,
        )


class _NotThisWay(Exception):
    """iSER cannot be had in this style. ``another``: but perhaps in another."""

    def __init__(self, error: IserblkError, another: bool) -> None:
        super().__init__(error)
        self.error = error
        self.another = another


async def _iser(
    url: Url,
    options: Options,
    kind: type[L],
    run: Callable[[L], Awaitable[T]],
    doubt: _Doubt,
) -> Reached[T]:
    """Log in by iSER, in the style that ``options`` ask for; with ``style=auto`` in the one that
    has worked there before, else in the other. With ``fallback=iscsi``, where iSER cannot be had:
    by Traditional iSCSI on a new connection."""
    portal = name_portal(url.host, url.port)
    no_iser: IserblkError | None = None
    for style in _styles(url, options):
        try:
            way = _by_stream if style == STREAM else _by_cm
            reached = await way(url, options, kind, run, doubt)
        except LoginError as error:
            if doubt.who == ISCSI and error.status >> 8 != REDIRECTION:
                error.args = (f"{error}; {_PERHAPS}",)
            raise
        except _NotThisWay as problem:
            if style == STREAM and isinstance(problem.error, IserRefused):
                doubt.who = ISCSI
            if no_iser is None:
                no_iser = problem.error
            else:  # one line is to tell of both
                words = str(problem.error).removeprefix(f"{portal}: ")
                no_iser.args = (f"{no_iser}; with style={style}: {words}",)
            # A portal that is known and silent now is in trouble: another style would wait in vain.
            silent = isinstance(problem.error, ConnectTimeout)
            if not problem.another or (silent and STYLES.knows(url.host, url.port)):
                break
            log.info("%s: style=%s: %s", portal, style, problem.error)
        else:
            if options.style == AUTO:
                STYLES.learn(url.host, url.port, style)
            return reached
    assert no_iser is not None
    if options.fallback != "iscsi" or is_stranger(doubt.who):
        if options.rcap == "verbs" or _has_connected(no_iser):
            await doubt.ask_late(no_iser)
        raise doubt.told(no_iser) from None
    reason = f"fallback=iscsi, and iSER cannot be had: {no_iser}"
    there = replace(url, scheme="iscsi")
    plain = fallback_options(options)
    try:
        plain_doubt = _Doubt(there, plain, doubt.allowed)
        plain_doubt.warned = doubt.warned
        reached = await _traditional(there, plain, kind, run, reason, plain_doubt)
    except (TransportError, NotSupported) as error:
        stranger = isinstance(error, OtherProtocol) and is_stranger(error.speaks)
        if not stranger and str(error) != str(no_iser):
            error.args = (f"{error}; before that, by iSER: {no_iser}",)
        raise
    log.warning("%s: Traditional iSCSI is used: %s", portal, reason)
    return reached


def _has_connected(error: IserblkError) -> bool:
    """Whether there was a connection by TCP, before this ``error`` came."""
    if isinstance(error, ConnectTimeout):
        return isinstance(error, NoMpaReply)
    return not isinstance(error, ConnectFailed)


def _styles(url: Url, options: Options) -> tuple[str, ...]:
    """The styles to try, in order."""
    if options.style != AUTO:
        return (options.style,)
    if options.rcap in NO_BYTE_STREAM:
        return (CM,)
    both = STYLES.order(url.host, url.port)
    # A discovery session on a byte stream succeeds at a portal without iSER, too.
    return both if url.iqn else both[:1]


async def _by_cm(
    url: Url,
    options: Options,
    kind: type[L],
    run: Callable[[L], Awaitable[T]],
    doubt: _Doubt,
) -> Reached[T]:
    """Log in over iSER that is there before the login, whose PDUs travel in messages; so such a
    connection cannot go on without iSER."""
    portal = name_portal(url.host, url.port)
    credentials = find_credentials(url, options)
    try:
        if options.rcap == "verbs":
            if options.header != HEADER_LENGTH:
                raise NotSupported(
                    "header=12: an RDMA device has no STags that are zero-based; say rcap=iwarp"
                )
            verbs.check_available()
        if options.rcap == "iwarp-sctp":
            sctp.check_available()
        ask = doubt.beside if doubt.wanted else None
        qp, reason = await choose(await resolve(url.host, url.port), options, portal, ask)
    except HostNotFound:
        raise
    except IserblkError as error:
        if isinstance(error, OtherProtocol):
            doubt.who = error.speaks
        # The portal takes connections, but does not answer in MPA.
        doubt.silent = isinstance(error, NoMpaReply)
        another = isinstance(error, NoMpaReply | ConnectionLost) or doubt.who == ISCSI
        raise _NotThisWay(error, another) from None
    log.info("%s: connected by %s: %s", portal, qp.provider, reason)
    doubt.iser = True
    login = kind(over_rdma(qp, options.header), url, options, portal)
    login.credentials = credentials
    try:
        return Reached(url, portal, reason, await _log_in(run(login), qp, portal))
    except IserRefused as error:
        raise _NotThisWay(error, False) from None
    except ConnectTimeout as error:
        if options.header != HEADER_LENGTH:
            error.args = (f"{error}{header_hint(options)}",)
        raise


async def _by_stream(
    url: Url,
    options: Options,
    kind: type[L],
    run: Callable[[L], Awaitable[T]],
    doubt: _Doubt,
) -> Reached[T]:
    """Log in on the byte stream of TCP, which then becomes iSER (RFC 7145 section 5.1). Where the
    target does not agree to that, the same connection goes on in Traditional iSCSI; not if the
    stream is only an attempt of ``style=auto``, and the user has not allowed it."""
    portal = name_portal(url.host, url.port)
    credentials = find_credentials(url, options)
    needs_rdma = options.style == AUTO and options.fallback != "iscsi"
    try:
        addresses = await resolve(url.host, url.port)
        stream = await connect_stream(addresses, portal, CONNECT_TIMEOUT_S)
    except HostNotFound:
        raise
    except IserblkError as error:
        raise _NotThisWay(error, False) from None
    qp = StreamingQueuePair(
        stream,
        initiator=True,
        crc=options.mpa_crc,
        receive_size=RECEIVE_SIZE,
        ird=READ_DEPTH,
        segments=options.mpa_frames,
    )
    doubted = doubt.silent or doubt.who == ISCSI
    connection = over_stream(stream, qp, needs_rdma, options.header, doubted)
    login = kind(connection, url, fallback_options(options), portal)
    login.credentials = credentials
    running = _log_in(run(login), qp, portal)
    try:
        result = (
            await doubting(running, lambda: doubt.stranger(addresses))
            if doubt.allowed
            else await running
        )
    except (TransportError, IserRefused) as error:
        if login.agreed and not doubted:
            doubt.iser = True
            if options.header != HEADER_LENGTH:
                error.args = (f"{error}{header_hint(options)}",)
        raise _NotThisWay(error, True) from None
    if isinstance(result, str):
        raise _NotThisWay(ConnectionLost(f"{portal}: no target"), False)
    reason = f"style={options.style}, and the login agreed to iSER on the byte stream"
    if login.traditional and url.iqn:
        url = replace(url, scheme="iscsi")
        asked = "style=stream" if options.style == STREAM else "fallback=iscsi"
        reason = f"{asked}, and the target does not agree to iSER (RDMAExtensions is not Yes)"
        log.warning("%s: Traditional iSCSI is used: %s", portal, reason)
    return Reached(url, portal, reason, result)


def fallback_options(options: Options) -> Options:
    """The options for a fallback. Digests, where the target has them, protect the data that iSER
    would have protected by the CRC of its frames."""
    if not options.mpa_crc:
        return options
    return replace(options, header_digest="CRC32C,None", data_digest="CRC32C,None")


async def _traditional(
    url: Url,
    options: Options,
    kind: type[L],
    run: Callable[[L], Awaitable[T]],
    reason: str,
    doubt: _Doubt,
) -> Reached[T]:
    """Log in by Traditional iSCSI."""
    portal = name_portal(url.host, url.port)
    credentials = find_credentials(url, options)
    addresses = await resolve(url.host, url.port)
    stream = await connect_stream(addresses, portal, CONNECT_TIMEOUT_S)
    login = kind(over_tcp(stream), url, options, portal)
    login.credentials = credentials
    running = _log_in(run(login), stream, portal)
    if not doubt.wanted:
        return Reached(url, portal, reason, await running)

    try:
        result = await doubting(running, lambda: doubt.stranger(addresses))
    except (ConnectionLost, ConnectTimeout, RemoteProtocolError) as error:
        await doubt.ask_late(error)
        raise doubt.told(error) from None
    except LoginError as error:
        if error.status == INITIATOR_ERROR and await doubt.takes_mpa():
            right = replace(url, scheme="iser").redacted().rstrip("/")
            hint = f"the portal speaks iSER, perhaps iSER alone: then write {right}"
            error.args = (f"{error}; {hint} in place of iscsi://",)
        raise
    if isinstance(result, str):
        raise doubt.told(ConnectionLost(f"{portal}: no target")) from None
    return Reached(url, portal, reason, result)


async def _log_in(running: Awaitable[T], connection: QueuePair | SocketStream, portal: str) -> T:
    """Await the login, for LOGIN_TIMEOUT_S at most. ``connection`` is closed when it fails."""
    try:
        with fail_after(LOGIN_TIMEOUT_S):
            return await running
    except trio.TooSlowError:
        connection.close()
        raise ConnectTimeout(
            f"{portal}: no login within {LOGIN_TIMEOUT_S:g} s; does it answer other initiators?"
        ) from None
    except BaseException:
        connection.close()
        raise


def connection_flags(windows: bool) -> bytes:
    """The private data of a connection. A target may name only memory windows in Send with
    Invalidate, no regions (and with software iWARP any STag, as all are alike)."""
    flags = ZBVA_NOT_SUPPORTED if windows else ZBVA_NOT_SUPPORTED | SEND_INVALIDATE_NOT_SUPPORTED
    return ConnectionFlags(flags).pack()


def mpa_private_data() -> bytes:
    """The private data of an MPA Request: the flags, and zeroes behind them, which peers ignore as
    they do those that InfiniBand's connection management adds."""
    return connection_flags(True).ljust(PRIVATE_DATA, b"\0")


async def choose(
    addresses: Sequence[Address],
    options: Options,
    portal: str,
    doubt: Callable[[Address], Awaitable[str]] | None = None,
) -> Choice:
    """Connect by the provider that ``options.rcap`` asks for, or by the best one. ``doubt``: see
    connect_iwarp."""
    if options.rcap == "iwarp-sctp":
        return Choice(await _by_sctp(addresses, portal), "asked for with rcap")
    if options.header != HEADER_LENGTH:
        qp = await _by_iwarp(addresses, options, portal, doubt)
        return Choice(qp, f"header={options.header} needs STags that are zero-based")
    if options.rcap == "verbs":
        qp = await _by_verbs(addresses, options, portal, CONNECT_TIMEOUT_S)
        return Choice(qp, "asked for with rcap")
    if options.rcap == "iwarp":
        return Choice(await _by_iwarp(addresses, options, portal, doubt), "asked for with rcap")
    reason = verbs.provider.available()
    if reason is not None:
        return Choice(
            await _by_iwarp(addresses, options, portal, doubt), f"rcap=auto, and {reason}"
        )
    failure = ""
    for address in addresses:
        routed, words = await verbs.probe(address, ROUTE_TIMEOUT_S)
        if not routed:
            reason = words.partition(";")[0]  # the advice behind it is for rcap=verbs
            continue
        try:
            qp = await _by_verbs([address], options, portal, VERBS_TIMEOUT_S)
            return Choice(qp, f"rcap=auto, and RDMA device {words} leads there")
        except IserblkError as error:
            reason = failure = f"RDMA device {words} leads there, but: {error}"
            log.info("%s: %s; software iWARP is tried", portal, failure)
    try:
        return Choice(
            await _by_iwarp(addresses, options, portal, doubt), f"rcap=auto, and {reason}"
        )
    except IserblkError as error:
        if failure:  # one line is to tell of both
            error.args = (f"{error}; {failure}",)
        raise


async def _by_verbs(
    addresses: Sequence[Address], options: Options, portal: str, patience: float
) -> QueuePair:
    return await verbs.connect_verbs(
        addresses,
        portal,
        patience,
        private_data=connection_flags,
        receives=receives(options),
        ird=READ_DEPTH,
    )


async def _by_sctp(addresses: Sequence[Address], portal: str) -> QueuePair:
    return await sctp.connect_sctp(
        addresses,
        portal,
        CONNECT_TIMEOUT_S,
        private_data=connection_flags(True),
        ird=READ_DEPTH,
    )


async def _by_iwarp(
    addresses: Sequence[Address],
    options: Options,
    portal: str,
    doubt: Callable[[Address], Awaitable[str]] | None,
) -> QueuePair:
    return await connect_iwarp(
        addresses,
        portal,
        CONNECT_TIMEOUT_S,
        MPA_TIMEOUT_S if options.fallback == "iscsi" else CONNECT_TIMEOUT_S,
        private_data=mpa_private_data(),
        crc=options.mpa_crc,
        segments=options.mpa_frames,
        ird=READ_DEPTH,
        doubt=doubt,
    )
