"""Checks of a portal: its host name, TCP, MPA, rdma_cm, and a login; then SendTargets, REPORT LUNS
and INQUIRY, which change nothing. Each is timed. Runs in trio.

For Traditional iSCSI (an ``iscsi://`` URL) MPA and rdma_cm are not tried.

Every check has a time limit, and closes its connection and session.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import trio

from iserblk.commands.running import ask
from iserblk.doctor.finding import ERROR, OK, SKIPPED, WARNING, Finding
from iserblk.errors import (
    AuthenticationError,
    CommandTimeout,
    ConnectFailed,
    ConnectTimeout,
    HostNotFound,
    IserblkError,
    LoginError,
    NotSupported,
    OtherProtocol,
    TargetNotFound,
    TransportError,
)
from iserblk.initiator.connecting import sctp, speakers, verbs
from iserblk.initiator.connecting.iwarp import Address, connect_tcp, resolve, start_mpa
from iserblk.initiator.connecting.login import receives
from iserblk.initiator.connecting.protocols import ISCSI
from iserblk.initiator.connecting.reach import (
    READ_DEPTH,
    connect,
    connection_flags,
    mpa_private_data,
    name_portal,
)
from iserblk.initiator.connecting.send_targets import send_targets
from iserblk.initiator.connecting.styles import AUTO, STREAM
from iserblk.initiator.drivers.tasks import TrioDriver
from iserblk.loop.clock import monotonic
from iserblk.loop.tasks import sleep, task_time
from iserblk.names import initiator_name
from iserblk.options import Options
from iserblk.rcap.iwarp.mpa import MpaInitiator
from iserblk.scsi import cdb, inquiry, luns
from iserblk.url import Url, fitting

TCP = "tcp"  # as ``PortalReport.choice``: Traditional iSCSI
MAXIMUM_ADDRESSES = 8  # that are checked
_NOT_ISER = (
    "is this the port of an iSER target? Switch iSER on at the target (LIO: `enable_iser true` in"
    " targetcli), which needs an RDMA device there"
)
_USE_ISCSI = "write iscsi:// in place of iser://, or give fallback=iscsi; or switch iSER on there"
_ANSWERS = f": {ISCSI} answers there"
_NAMED = 8  # targets, portals or LUNs that a text names at most
_LUNS = 16384  # bytes of the answer to REPORT LUNS: 2,047 LUNs
_INQUIRY = 96  # bytes
_FAR_S = 3600.0  # the deadline of a command, which is given up long before


@dataclass(slots=True, frozen=True)
class Limits:
    """Time limits of the checks, in seconds."""

    resolve: float = 5.0
    tcp: float = 5.0
    mpa: float = 5.0
    route: float = 11.0
    verbs: float = 10.0
    login: float = 30.0  # in addition to the limits that connecting has itself
    ask: float = 4.0  # for one command; less than the first deadline and one step behind it
    logout: float = 5.0


@dataclass(slots=True)
class _Answer:
    """The result of one check. ``error``: why it failed; None: it did not."""

    name: str
    text: str = ""
    remedy: str = ""
    error: IserblkError | None = None
    skipped: bool = False
    seconds: float | None = None

    @contextmanager
    def timed(self) -> Iterator[None]:
        """The check is what is done inside the with block."""
        began = task_time()
        try:
            yield
        finally:
            self.seconds = task_time() - began

    def finding(self, failed: str) -> Finding:
        """The Finding of this check. ``failed``: its status if the check failed."""
        status = SKIPPED if self.skipped else OK if self.error is None else failed
        seconds = None if self.skipped else self.seconds
        return Finding(self.name, status, self.text, self.remedy, seconds)


@dataclass(slots=True)
class _Ways:
    """The ways that work to one address of the portal. ``answers``: of TCP, MPA, rdma_cm."""

    address: Address
    answers: list[_Answer] = field(default_factory=list)
    tcp: bool = False
    iwarp: bool = False
    sctp: bool = False
    verbs: bool = False
    device: str = ""


@dataclass(slots=True, frozen=True)
class PortalReport:
    """The result for a portal. ``choice``: the provider that other commands would use, "tcp" for
    Traditional iSCSI; None: no way works. ``error``: None if the login worked, else the reason.
    ``url``: without user info and options; without a target it ends with the portal."""

    portal: str
    url: str
    findings: list[Finding]
    choice: str | None
    error: IserblkError | None

    @property
    def is_traditional(self) -> bool:
        """Whether the verdict is about Traditional iSCSI."""
        return self.choice == TCP or self.url.startswith("iscsi:")


async def check_portal(url: Url, options: Options, limits: Limits) -> PortalReport:
    """Run all checks of the portal of ``url``. Without a target name in ``url``, the login is that
    of a discovery session."""
    portal = name_portal(url.host, url.port)
    shown = url.redacted().rstrip("/")
    found = _Answer("host name")
    with found.timed():
        addresses = await _resolve(url, limits, found)
    if found.error is not None:
        return PortalReport(portal, shown, [found.finding(ERROR)], None, found.error)
    ways = [_Ways(address) for address in addresses[:MAXIMUM_ADDRESSES]]
    async with trio.open_nursery() as nursery:
        for way in ways:
            nursery.start_soon(_ask_address, way, url, options, limits)
    choice = _choice(ways, url, options)
    login = _Answer("login")
    behind: list[_Answer] = []  # the login
    if _only_login_tells(ways, url, options):
        await _choose_by_login(url, options, limits, portal, choice, login, behind)
    elif choice.error is None:
        provider = await _log_in(url, options, limits, portal, login, behind)
        _settle(choice, provider, url, options)
    else:
        login.skipped = True
        what = "speaks iSER" if url.scheme == "iser" else "takes connections"
        login.text = f"not tried: no address of the portal {what}"
    error = choice.error or login.error
    failed = WARNING if error is None else ERROR
    answers = [answer for way in ways for answer in way.answers]
    findings = [answer.finding(failed) for answer in (found, *answers, choice, login)]
    findings += [answer.finding(WARNING) for answer in behind]
    chosen = None if choice.error is not None else choice.text.partition(":")[0]
    return PortalReport(portal, shown, findings, chosen, error)


async def _resolve(url: Url, limits: Limits, answer: _Answer) -> list[Address]:
    addresses: list[Address] = []
    try:
        with trio.fail_after(limits.resolve):
            addresses = await resolve(url.host, url.port)
    except HostNotFound as error:
        answer.error = error
        answer.text = str(error)
        answer.remedy = "correct the host name, or give the IP address"
    except trio.TooSlowError:
        answer.text = f"no answer about {url.host} within {limits.resolve:g} s"
        answer.remedy = "check the name servers of this machine, or give the IP address"
        answer.error = ConnectTimeout(answer.text)
    else:
        hosts = [str(address.sockaddr[0]) for address in addresses]
        answer.text = f"{url.host} is {', '.join(hosts)}"
        if len(hosts) > MAXIMUM_ADDRESSES:
            answer.text += f"; only the first {MAXIMUM_ADDRESSES} are looked at"
    return addresses


async def _ask_address(way: _Ways, url: Url, options: Options, limits: Limits) -> None:
    """Check one address: TCP, MPA, rdma_cm."""
    portal = name_portal(*way.address.sockaddr[:2])
    tcp, mpa, cm = (_Answer(f"{what} {portal}") for what in ("TCP", "MPA", "rdma_cm"))
    way.answers = [tcp, mpa, cm]
    if options.rcap == "iwarp-sctp":
        tcp.skipped = cm.skipped = True
        tcp.text = cm.text = "not looked at: rcap=iwarp-sctp"
        await _ask_sctp(way, limits, portal)
        return
    if url.scheme == "iscsi":
        mpa.skipped = cm.skipped = True
        mpa.text = cm.text = "not needed for Traditional iSCSI"
        sock = await _connect(way, limits, portal)
        if sock is not None:
            sock.close()
        return
    if options.rcap == "verbs":
        tcp.skipped = mpa.skipped = True
        tcp.text = mpa.text = "not looked at: rcap=verbs"
    else:
        await _ask_tcp(way, options, limits, portal)
    if options.rcap == "iwarp" or options.style == "stream":
        asked = "style=stream" if options.style == "stream" else "rcap=iwarp"
        cm.skipped, cm.text = True, f"not looked at: {asked}"
    else:
        await _ask_rdma_cm(way, options, limits, portal)


async def _ask_sctp(way: _Ways, limits: Limits, portal: str) -> None:
    """Check whether the portal begins a DDP session on SCTP, in place of MPA, and close it."""
    answer = way.answers[1] = _Answer(f"SCTP {portal}")
    try:
        sctp.check_available()
        with answer.timed():
            qp = await sctp.connect_sctp(
                [way.address],
                portal,
                limits.tcp,
                private_data=connection_flags(True),
                ird=READ_DEPTH,
            )
    except NotSupported as error:
        answer.error, answer.text = error, str(error)
        answer.remedy = "modprobe sctp (as root), or use rcap=iwarp"
        return
    except IserblkError as error:
        answer.error, answer.text = error, str(error)
        answer.remedy = "give the target's portal group transport=sctp; check firewalls for SCTP"
        return
    qp.close()
    way.sctp = True
    answer.text = "speaks iWARP over SCTP"


async def _connect(way: _Ways, limits: Limits, portal: str) -> trio.socket.SocketType | None:
    """Open a TCP connection, which the caller closes. None: it failed."""
    tcp = way.answers[0]
    try:
        with tcp.timed():
            sock = await connect_tcp([way.address], portal, limits.tcp)
    except IserblkError as error:
        tcp.error, tcp.text = error, str(error)
        tcp.remedy = "start the target, or correct the port; check the firewalls on both sides"
        return None
    tcp.text = "takes connections"
    way.tcp = True
    return sock


async def _ask_tcp(way: _Ways, options: Options, limits: Limits, portal: str) -> None:
    """Check TCP, then MPA start-up on that connection, and close it."""
    mpa = way.answers[1]
    sock = await _connect(way, limits, portal)
    if sock is None:
        mpa.skipped, mpa.text = True, "not tried: there is no TCP connection"
        return
    if options.style == "stream":
        sock.close()
        mpa.skipped, mpa.text = True, "not looked at: with style=stream it follows the login"
        return
    with sock:
        initiator = MpaInitiator(
            private_data=mpa_private_data(), crc=options.mpa_crc, ird=READ_DEPTH
        )
        try:
            with mpa.timed(), trio.fail_after(limits.mpa):
                reply = await start_mpa(sock, initiator, portal)
        except trio.TooSlowError:
            mpa.error = ConnectTimeout(f"no MPA Reply within {limits.mpa:g} s")
        except OSError as error:
            mpa.error = TransportError(f"the connection broke: {error.strerror}")
        except IserblkError as error:
            mpa.error = error
        else:
            way.iwarp = True
            setup = "enhanced" if reply.enhanced else "plain"
            crc = "with" if reply.crc else "without"
            mpa.text = f"speaks iWARP: MPA revision {reply.revision}, {setup}, {crc} CRC"
            return
    mpa.text, mpa.remedy = str(mpa.error), _NOT_ISER
    who = mpa.error.speaks if isinstance(mpa.error, OtherProtocol) else ""
    question = speakers.login_question(options)
    who = who or await speakers.ask([way.address], portal, question, limits.mpa)
    if who == ISCSI:
        mpa.text = f"{mpa.text.removesuffix(_ANSWERS)}; it speaks {ISCSI}"
        mpa.remedy = _USE_ISCSI
    elif who:
        mpa.remedy = f"correct the port: {who} answers there"


async def _ask_rdma_cm(way: _Ways, options: Options, limits: Limits, portal: str) -> None:
    """Check whether an RDMA device leads to the address, and the target accepts connections
    there."""
    _, _, cm = way.answers
    missing = verbs.provider.available()
    if missing is not None:
        cm.text = missing
        if options.rcap == "verbs":
            cm.error = NotSupported(missing)
        else:
            cm.skipped = True
        return
    try:
        with cm.timed():
            routed, words = await verbs.probe(way.address, limits.route)
            if not routed:
                raise ConnectFailed(words)
            way.device = words
            qp = await verbs.connect_verbs(
                [way.address],
                portal,
                limits.verbs,
                private_data=connection_flags,
                receives=receives(options),
                ird=READ_DEPTH,
            )
    except IserblkError as error:
        cm.error, cm.text = error, str(error)
        cm.remedy = "enable iSER on the target for this address; iserblk doctor shows the devices"
        return
    about = qp.describe()
    qp.close()
    way.verbs = True
    cm.text = (
        f"takes connections through {words} ({about.get('transport', 'RDMA')},"
        f" STags are memory {about.get('mode', 'region')}s)"
    )


def _choice(ways: list[_Ways], url: Url, options: Options) -> _Answer:
    """The provider that ``rcap`` selects; if none works, the error of the check that came closest
    to success (MPA, then rdma_cm, then TCP)."""
    answer = _Answer("choice")
    connects = any(way.tcp for way in ways)
    if url.scheme == "iscsi" and connects:
        answer.text = f"{TCP}: Traditional iSCSI, asked for by the URL's scheme"
        return answer
    if options.style == "stream" and connects:
        answer.text = "iwarp: style=stream, if the login agrees to iSER"
        return answer
    if any(way.sctp for way in ways):
        answer.text = "iwarp-sctp: asked for with rcap"
        return answer
    for way in ways:
        if way.verbs:
            answer.text = f"verbs: {way.device} leads there, and the target takes connections"
            return answer
    if any(way.iwarp for way in ways):
        reasons = [way.answers[2].text for way in ways if way.iwarp]
        answer.text = f"iwarp: {reasons[0]}"
        return answer
    if options.fallback == "iscsi" and connects:
        answer.text = f"{TCP}: Traditional iSCSI, by fallback=iscsi: the portal speaks no iSER"
        return answer
    errors = [
        each.error
        for at in (1, 2, 0)
        for way in ways
        if (each := way.answers[at]).error is not None
    ]
    errors = [error for error in errors if error is not None]
    answer.error = errors[0] if errors else ConnectFailed("no address to connect to")
    finder = f"rcap={options.rcap}" if url.scheme == "iser" else TCP
    answer.text = f"{finder} finds no way to the target"
    return answer


def _only_login_tells(ways: list[_Ways], url: Url, options: Options) -> bool:
    """Whether other commands would try style=stream next."""
    if url.scheme != "iser" or not url.iqn or options.style != AUTO or options.rcap == "verbs":
        return False
    return any(way.tcp for way in ways) and not any(way.verbs or way.iwarp for way in ways)


async def _choose_by_login(
    url: Url,
    options: Options,
    limits: Limits,
    portal: str,
    choice: _Answer,
    login: _Answer,
    behind: list[_Answer],
) -> None:
    """No iSER without a login before it: check the login, which may agree to iSER."""
    if options.fallback != "iscsi":
        options = replace(options, style=STREAM)
    provider = await _log_in(url, options, limits, portal, login, behind)
    if provider and provider != TCP:
        choice.error = None
        choice.text = f"{provider}: style=stream, and the login agreed to iSER"
    elif provider and choice.error is not None:
        login.text += ", because the target does not agree to iSER"
        choice.remedy = _USE_ISCSI
    elif isinstance(login.error, LoginError):
        choice.error, choice.text = None, "iwarp: style=stream, if the login agrees to iSER"


def _settle(choice: _Answer, provider: str, url: Url, options: Options) -> None:
    """The login has the last word: with style=stream and with fallback=iscsi it may have gone on
    without iSER. ``provider``: what ``_log_in`` has returned."""
    if provider == TCP and not choice.text.startswith(f"{TCP}:"):
        why = (
            "as the login does not agree to iSER"
            if url.iqn
            else "as only a login to a target can agree to iSER; give a URL with the target's name"
        )
        choice.text = f"{TCP}: Traditional iSCSI, {why}"
    elif provider and options.style == STREAM and provider != TCP:
        choice.text = f"{provider}: style=stream, and the login agreed to iSER"


async def _log_in(
    url: Url,
    options: Options,
    limits: Limits,
    portal: str,
    answer: _Answer,
    behind: list[_Answer],
) -> str:
    """Check the login as other commands do it, and what there is ``behind`` it; log out. Returns
    the provider; "": the login failed."""
    kind = f"to {url.iqn}" if url.iqn else "for discovery"
    who = initiator_name(options.initiator_name)
    try:
        with answer.timed(), trio.fail_after(limits.login):
            session = await connect(url, options)
    except trio.TooSlowError:
        answer.error = ConnectTimeout(f"{portal}: no login within {limits.login:g} s")
        answer.remedy = "look at the target's log; check whether it answers other initiators"
    except TargetNotFound as error:
        answer.error = error
        answer.remedy = f"correct the target's name; the target must also admit {who}"
    except AuthenticationError as error:
        answer.error = error
        answer.remedy = f"check USER@ and its secret against what the target has for {who}"
    except LoginError as error:
        answer.error = error
        answer.remedy = f"make the target admit {who}, or give another initiator-name"
    except IserblkError as error:
        answer.error = error
        answer.remedy = "look at the target's log"
    else:
        provider = str(session.describe()["provider"])
        answer.text = f"accepted {kind}, over {provider}, as {who}"
        agreed = session.parameters
        if agreed.max_connections < options.connections:
            answer.text += f"; the target takes {agreed.max_connections} connection(s) of a session"
        if agreed.error_recovery_level < options.error_recovery_level:
            answer.text += f"; it agrees to error recovery level {agreed.error_recovery_level}"
        driver = TrioDriver(session)
        async with trio.open_nursery() as nursery:
            await nursery.start(driver.run)
            if url.iqn:
                await _look_at_luns(driver, url, limits, behind)
            if session.error is None:
                with trio.move_on_after(limits.logout):
                    await driver.log_out()
            nursery.cancel_scope.cancel()
        behind.insert(0, await _discover(url, options, limits, provider))
        return provider
    answer.text = str(answer.error)
    return ""


async def _discover(url: Url, options: Options, limits: Limits, provider: str) -> _Answer:
    """Check SendTargets, in a discovery session of its own. ``provider``: of the login, which is
    not chosen anew."""
    answer = _Answer("discovery")
    if provider == TCP and url.scheme == "iser":
        url = replace(url, scheme="iscsi")
        options = fitting(url, options)
    try:
        with answer.timed(), trio.fail_after(limits.login):
            told = await send_targets(url, options)
    except trio.TooSlowError:
        answer.error = ConnectTimeout(f"no answer to SendTargets within {limits.login:g} s")
    except IserblkError as error:
        answer.error = error
    else:
        if not url.iqn:
            names = [target.name for target in told.targets]
            answer.text = f"the portal knows {_list('target', names)}"
            return answer
        ways = [
            name_portal(portal.host, portal.port)
            for target in told.targets
            for portal in target.portals
        ]
        answer.text = f"the target names {_list('portal', ways)}"
        return answer
    answer.text = str(answer.error)
    answer.remedy = (
        "give the URL of the target, with USER@ if it wants CHAP"
        if not url.iqn
        else "portals=discover needs it: have the target admit this initiator to discovery, or give"
        " the URLs of all portals"
    )
    return answer


async def _look_at_luns(
    driver: TrioDriver, url: Url, limits: Limits, behind: list[_Answer]
) -> None:
    """Check REPORT LUNS, and INQUIRY of the LUN of ``url``, or of the first. Both leave a unit
    attention pending, for the command of a user (SPC-4, 6.6 and 6.33)."""
    reported, asked = _Answer("REPORT LUNS"), _Answer("INQUIRY")
    behind += [reported, asked]
    found: list[int] = []
    remedy = "look at the target's log; `iserblk info` asks again, and for longer"
    answer = await _ask(driver, bytes(8), cdb.report_luns(_LUNS), _LUNS, limits, reported)
    if answer is not None:
        try:
            found = sorted(set(luns.decode_report_luns(answer)))
        except IserblkError as error:
            reported.error = error
        reported.text = f"the target has {_list('LUN', list(map(str, found)))} for this initiator"
        if not found:
            reported.error = TargetNotFound("there are no LUNs")
            reported.remedy = "have the target give this initiator LUNs (a mapping, an ACL)"
    if reported.error is not None and not reported.remedy:
        reported.text, reported.remedy = str(reported.error), remedy
    lun = url.lun if url.lun is not None else found[0] if found else None
    if lun is None or driver.session.error is not None:
        why = "no LUN is known" if lun is None else "the connection is lost"
        asked.skipped, asked.text = True, f"not tried: {why}"
        return
    command = cdb.inquiry(_INQUIRY)
    answer = await _ask(driver, luns.encode(lun), command, _INQUIRY, limits, asked)
    if answer is not None:
        try:
            _tell_of_lun(lun, inquiry.decode_standard(answer), asked)
        except IserblkError as error:
            asked.error = error
    if not asked.text:
        asked.text, asked.remedy = str(asked.error), remedy


def _tell_of_lun(lun: int, data: inquiry.Standard, answer: _Answer) -> None:
    if data.qualifier:
        answer.error = TargetNotFound("no device is connected")
        answer.text = f"the target has no LUN {lun} for this initiator"
        answer.remedy = (
            "correct the LUN's number: `iserblk info` with the URL without /LUN lists all LUNs"
        )
        return
    what = inquiry.device_type_words(data.device_type)
    product = f"{data.vendor} {data.product} {data.revision}".strip()
    answer.text = f"LUN {lun}: {what}, {product}"


async def _ask(
    driver: TrioDriver, lun: bytes, command: bytes, length: int, limits: Limits, answer: _Answer
) -> memoryview | None:
    """The answer to one command; None: ``answer`` has the error.

    Without an answer in time the connection is cut: the command must not come to its own deadline,
    because what follows there is a LOGICAL UNIT RESET in the end, which all hosts would feel.
    """
    session = driver.session

    async def limit() -> None:
        await sleep(limits.ask)
        session.fail(CommandTimeout(f"no answer within {limits.ask:g} s"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(limit)
        try:
            with answer.timed():
                return await driver.run_operation(
                    ask(session, lun, command, length, session.portal, monotonic() + _FAR_S)
                )
        except IserblkError as error:
            answer.error = error
        finally:
            nursery.cancel_scope.cancel()
    return None


def _list(what: str, names: Sequence[str]) -> str:
    """How many of them there are, and their names."""
    shown = [*names[:_NAMED], *(["…"] if len(names) > _NAMED else [])]
    count = f"{len(names)} {what}{'' if len(names) == 1 else 's'}"
    return f"{count}: {', '.join(shown)}" if names else f"no {what}s"
