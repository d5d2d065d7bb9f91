"""``iserblk target``: serves files, and LUNs of other targets, as LUNs."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
import trio
from click.core import ParameterSource

from iserblk.cli.background import Ground, background_options
from iserblk.cli.command import Command, Rare
from iserblk.cli.notify import ready as say_ready
from iserblk.cli.notify import tell_systemd
from iserblk.cli.running import run
from iserblk.credentials import read_accounts
from iserblk.errors import BadArgument, IserblkError
from iserblk.gateway.opening import open_gateways
from iserblk.metrics.address import default_option, parse_address
from iserblk.metrics.process import read_process
from iserblk.metrics.reading import ProcessReading
from iserblk.metrics.records import Recorded
from iserblk.metrics.serving import Listener
from iserblk.metrics.serving import serve as serve_metrics
from iserblk.metrics.target_reading import TargetReading
from iserblk.named.resolving import names_lun_not_file, resolve
from iserblk.names import check_name, shown
from iserblk.options import BUSY_POLL_US, parse_metrics
from iserblk.target.access import read_access
from iserblk.target.announcing.isns import Registration
from iserblk.target.announcing.slp import SlpAnnouncer
from iserblk.target.config import (
    BUSY_POLL,
    CONNECTIONS,
    DEFAULT_PORTAL,
    HEADERS,
    LEVELS,
    PORTS,
    PROVIDERS,
    SESSION_CONNECTIONS,
    Slp,
    TargetConfig,
)
from iserblk.target.config_file import read_config
from iserblk.target.lunlist import LunList, read_lun_list
from iserblk.target.lunspec import LunSpec, OpenRemote, parse_lun_spec
from iserblk.target.ports import AccessStates, parse_listen, read_states
from iserblk.target.server import Announce, serve
from iserblk.url import ISNS_PORT, SLP_PORT, parse_portal

log = logging.getLogger(__name__)

NAME = "iserblk-target"  # in syslog
LOGOUT_S = 3  # time for initiators to log out when the target ends
_LUN_HELP = """\
A file or block device as LUN 0; repeat it for LUN 1, 2 and so on.
FILE[:ro][:block=4096][:size=1G][:serial=S][:wce=0|1][:volatile-cache=64M]
[:soft-threshold=800M][:tas=0|1]. Or the URL of a LUN of another target: URL[:ro]."""


def _with_urls(spec: str) -> str:
    """A value of --lun, with URLs in place of the name of a LUN. Raises BadArgument."""
    name, _, rest = spec.partition(":")
    if rest not in ("", "ro") or not names_lun_not_file(name):
        return spec
    resolved = resolve([name], {})
    read_only = ":ro" if rest or resolved.read_only else ""
    return f"{' '.join(resolved.urls)}{read_only}"


@click.command("target", cls=Command)
@click.option(
    "--config",
    metavar="FILE",
    help="A TOML file with all that other options say: portals, LUNs, accounts, access. Read again"
    " after SIGHUP.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT[,GROUP][,transport=NAME+NAME]",
    multiple=True,
    default=(DEFAULT_PORTAL,),
    show_default=True,
    help="Address to listen on; port 0: any free port. May be repeated, for portals in several"
    " target portal groups. transport: what the portals of the group take: iwarp, tcp, verbs,"
    " sctp.",
)
@click.option(
    "--access-states",
    metavar="FILE",
    help="File with lines `GROUP STATE [settable]`: ALUA states of portal groups, to try out"
    " failover. Read again after SIGHUP.",
    cls=Rare,
)
@click.option(
    "--access",
    metavar="FILE",
    help="File with lines `INITIATOR LUNS [USER]`: which LUNs an initiator has access to, and the"
    " user of --chap-accounts as which it logs in. Read again after SIGHUP.",
)
@click.option("--iqn", metavar="IQN", help="The target's name.")
@click.option("--lun", "specs", metavar="FILE[:OPTION…]|URL", multiple=True, help=_LUN_HELP)
@click.option(
    "--luns",
    metavar="FILE",
    help="File with lines `NUMBER FILE[:OPTION…]`: more LUNs. Read again after SIGHUP: LUNs come"
    " and go while the target runs.",
)
@click.option(
    "--busy-poll",
    "busy_poll_us",
    metavar="US",
    type=click.IntRange(*BUSY_POLL),
    default=BUSY_POLL_US,
    show_default=True,
    help="While commands follow each other closely, stay awake for the next one up to this many"
    " microseconds; 0: never.",
    cls=Rare,
)
@click.option(
    "--rcap",
    metavar="iwarp|verbs",
    default=PROVIDERS[0],
    show_default=True,
    help="verbs: also accept connections of RDMA devices, on the same port.",
)
@click.option(
    "--header",
    type=click.Choice([str(each) for each in HEADERS]),
    default=str(HEADERS[0]),
    show_default=True,
    help="Bytes of the iSER header: 28 (RFC 7145), or 12 for initiators of RFC 5046, which begin"
    " with a Hello.",
    cls=Rare,
)
@click.option(
    "--max-connections",
    metavar="N",
    type=click.IntRange(*CONNECTIONS),
    default=SESSION_CONNECTIONS,
    show_default=True,
    help="Connections that one session may have.",
    cls=Rare,
)
@click.option(
    "--error-recovery-level",
    metavar="N",
    type=click.IntRange(*LEVELS),
    default=LEVELS[1],
    show_default=True,
    help="The highest ErrorRecoveryLevel to agree to.",
    cls=Rare,
)
@click.option(
    "--isns",
    metavar="HOST[:PORT]",
    help="Register the target and its portals with this iSNS server (port 3205).",
    cls=Rare,
)
@click.option(
    "--metrics",
    metavar="PATH|HOST:PORT|off",
    help="Serve metrics for Prometheus and `iserblk stats` at a Unix socket, or at a port of the"
    " loopback interface. Default: a socket named after the target.",
    cls=Rare,
)
@click.option("--slp", is_flag=True, help="Answer SLP requests about the target.", cls=Rare)
@click.option(
    "--slp-port",
    metavar="PORT",
    type=click.IntRange(*PORTS),
    default=SLP_PORT,
    show_default=True,
    help="UDP and TCP port of --slp; ports below 1024 are for root.",
    cls=Rare,
)
@click.option(
    "--slp-da",
    metavar="HOST[:PORT]",
    multiple=True,
    help="Register the target with this directory agent; may be repeated.",
    cls=Rare,
)
@click.option(
    "--slp-scopes",
    metavar="LIST",
    default="DEFAULT",
    show_default=True,
    help="Scopes in which SLP tells of the target, with commas between them.",
    cls=Rare,
)
@click.option(
    "--chap-accounts",
    metavar="FILE",
    help="Admit only initiators that know the secret of a user in FILE: lines user:secret, mode"
    " 0600. Read again after SIGHUP.",
)
@click.option(
    "--chap-user", metavar="USER", help="The target's own user name in mutual CHAP.", cls=Rare
)
@click.option(
    "--chap-secret-file",
    metavar="FILE",
    help="One line with the secret of --chap-user; mode 0600.",
    cls=Rare,
)
@background_options(NAME)
def command(config: str | None, background: bool, pidfile: str | None, **given: Any) -> None:
    """Serve files, and LUNs of other targets, as the LUNs of one target, over iSER and Traditional
    iSCSI. The command stays in the foreground, unless --background is given.

    Prints `ready iser://HOST:PORT/IQN` once clients can connect. SIGTERM and SIGINT end the target;
    it asks initiators to log out, for three seconds at most, and writes its caches to the files.
    Without --chap-accounts every client that reaches the port can read and write; by default that
    is this machine alone.
    """
    ground = Ground(NAME, background, pidfile, None)
    if config:
        _refuse_others()
        serve_config(partial(read_config, Path(config)), True, ground)
        return
    # Once: what an option is in it depends on the files that there are.
    given["specs"] = [parse_lun_spec(_with_urls(each)) for each in given["specs"]]
    rereads = any(given[name] for name in ("luns", "access", "access_states", "chap_accounts"))
    serve_config(partial(_of_options, **given), rereads, ground)


def _refuse_others() -> None:
    """Raises BadArgument for an option besides --config."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if (
            name not in ("config", "background", "pidfile")
            and source is ParameterSource.COMMANDLINE
        ):
            raise BadArgument(f"{parameter.opts[0]}: write it into the file of --config instead")


def _of_options(
    listen: tuple[str, ...],
    access_states: str | None,
    access: str | None,
    iqn: str | None,
    specs: Sequence[LunSpec],
    luns: str | None,
    busy_poll_us: int,
    rcap: str,
    header: str,
    max_connections: int,
    error_recovery_level: int,
    isns: str | None,
    metrics: str | None,
    slp: bool,
    slp_port: int,
    slp_da: tuple[str, ...],
    slp_scopes: str,
    chap_accounts: str | None,
    chap_user: str | None,
    chap_secret_file: str | None,
) -> TargetConfig:
    """The configuration that options give. Reads the files that they name. Raises BadArgument."""
    if iqn is None:
        raise BadArgument("a target needs --iqn IQN, or --config FILE")
    check_name(iqn, "--iqn")
    accounts = None
    if chap_accounts:
        accounts = read_accounts(chap_accounts, chap_user or "", chap_secret_file or "")
    elif chap_user or chap_secret_file:
        raise BadArgument("--chap-user and --chap-secret-file need --chap-accounts FILE")
    if rcap not in PROVIDERS:
        raise BadArgument(f"--rcap {shown(rcap)}: say iwarp or verbs")
    if not specs and not luns:
        raise BadArgument("a target needs --lun FILE, or --luns FILE")
    scopes = [each.strip() for each in slp_scopes.split(",") if each.strip()]
    if not scopes:
        raise BadArgument("--slp-scopes: name at least one scope, e.g. DEFAULT")
    found = dict(enumerate(specs))
    for lun, spec in (read_lun_list(Path(luns)) if luns else {}).items():
        if lun in found:
            raise BadArgument(f"luns: LUN {lun} is a --lun already")
        found[lun] = spec
    return TargetConfig(
        iqn=iqn,
        portals=[parse_listen(each) for each in listen],
        rdma=rcap == PROVIDERS[1],
        header=int(header),
        isns=_place("--isns", isns, ISNS_PORT) if isns else None,
        metrics=None if metrics is None else parse_metrics("--metrics", metrics),
        slp=Slp(slp, slp_port, [_place("--slp-da", each, SLP_PORT) for each in slp_da], scopes),
        busy_poll_us=busy_poll_us,
        max_connections=max_connections,
        error_recovery_level=error_recovery_level,
        luns=found,
        accounts=accounts,
        access=read_access(Path(access)) if access else None,
        states=read_states(Path(access_states)) if access_states else AccessStates({}),
    )


def _place(option: str, text: str, default: int) -> tuple[str, int]:
    try:
        return parse_portal(text, default)
    except BadArgument:
        raise BadArgument(f"{option} {shown(text)}: give HOST[:PORT]") from None


def serve_config(
    read: Callable[[], TargetConfig],
    rereads: bool,
    ground: Ground,
    announce: Callable[[str], None] = say_ready,
) -> None:
    """Serve a configuration until a signal. ``rereads``: SIGHUP has it read again. Whenever that
    comes, before the target is ready or while it ends, it does no harm. ``announce``: prints the
    URL, without a LUN, once clients can connect."""
    with ground.serving(announce) as ready:
        hangups: list[int] = []
        if rereads:
            signal.signal(signal.SIGHUP, lambda number, _frame: hangups.append(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # see ``cli.__main__``
        try:
            _serve(read, rereads, hangups, ready)
        finally:
            if rereads:  # what Python sets back at its end is no handler that is ignored
                signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _serve(
    read: Callable[[], TargetConfig],
    rereads: bool,
    early: list[int],
    ready: Callable[[str], None],
) -> None:
    """``early``: SIGHUPs that have come already."""
    config = read()
    announce: list[Announce] = []
    isns = config.isns
    if isns is not None:
        server = isns
        announce.append(lambda announced: Registration(server, announced).run())
    slp = config.slp
    slp_announcer = SlpAnnouncer(slp.scopes, slp.directories, slp.answer, slp.port)
    if slp.answer or slp.directories:
        announce.append(slp_announcer.run)
    luns = LunList(config.iqn)

    def open_all(open_remote: OpenRemote) -> None:
        luns.open_remote = open_remote
        for lun, spec in config.luns.items():
            luns.open(lun, spec)

    async def serving() -> None:
        async with AsyncExitStack() as stack:
            remote = any(spec.urls for spec in config.luns.values())
            stack.enter_context(Recorded("gateway" if remote else "target", config.iqn))
            listener = _listen_for_metrics(config)
            if listener is not None:
                stack.callback(listener.close)
            hangups = None
            if rereads:
                hangups = stack.enter_context(trio.open_signal_receiver(signal.SIGHUP))
                if early:  # the files may have changed since they were read
                    signal.raise_signal(signal.SIGHUP)
            gateways = await stack.enter_async_context(open_gateways(config.iqn))
            try:
                slp_announcer.open()
                # In a thread, as that may wait for the loop, where other targets are logged in to.
                await trio.to_thread.run_sync(open_all, gateways.open_from_thread)
                await serve(
                    config,
                    luns.units,
                    ready,
                    logout_s=LOGOUT_S,
                    announce=announce,
                    read=read if rereads else None,
                    lun_list=luns,
                    hangups=hangups,
                    watch=partial(_serve_metrics, listener) if listener is not None else None,
                )
            finally:
                # Further signals have no effect here; after trio.run they would interrupt the
                # flush.
                slp_announcer.close()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(_close, luns)

    run(serving, hangup=not rereads, host=True)


def _listen_for_metrics(config: TargetConfig) -> Listener | None:
    """Raises as Listener, for a place that was named; the target does without any other."""
    if config.metrics is not None:
        return Listener(parse_address(config.metrics, "metrics")) if config.metrics else None
    place = default_option(config.iqn).get("metrics")
    try:
        return Listener(parse_address(place, "metrics")) if place else None
    except IserblkError as error:  # another target of that name has just taken it
        log.info("no metrics are served: %s", error)
        return None


async def _serve_metrics(listener: Listener, figures: Callable[[], TargetReading]) -> None:
    """Body of a task."""

    def look() -> ProcessReading:
        # The loop has what the target counts, and this is a thread.
        return read_process(targets=[trio.from_thread.run_sync(figures)])

    await serve_metrics(listener, look)


def _close(luns: LunList) -> None:
    """Flush and close all units. Raises IserblkError for the first that failed."""
    if luns.units or luns.leaving:
        tell_systemd("STOPPING=1")
    for words in luns.close_all():
        raise IserblkError(words)
