"""``iserblk target``: serves files, and LUNs of other targets, as LUNs, in the foreground."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import trio

from iserblk.cli.notify import ready, tell_systemd
from iserblk.cli.running import run
from iserblk.credentials import read_accounts
from iserblk.errors import BadArgument, IserblkError
from iserblk.gateway.opening import open_gateways
from iserblk.names import check_name
from iserblk.options import BUSY_POLL_US
from iserblk.target.announcing.isns import Registration
from iserblk.target.announcing.slp import SlpAnnouncer
from iserblk.target.lunlist import LunList
from iserblk.target.lunspec import OpenRemote, default_serial, open_lun, parse_lun_spec
from iserblk.target.scsi.unit import LogicalUnit
from iserblk.target.server import SESSION_CONNECTIONS, Announce, serve
from iserblk.url import ISNS_PORT, SLP_PORT, parse_portal

LOGOUT_S = 3  # time for initiators to log out when the target ends
_LUN_HELP = """\
A file or block device as LUN 0; repeat it for LUN 1, 2 and so on.
FILE[:ro][:block=4096][:size=1G][:serial=S][:wce=0|1][:volatile-cache=64M]
[:soft-threshold=800M]. Or the URL of a LUN of another target: URL[:ro]."""


@click.command("target")
@click.option(
    "--listen",
    metavar="HOST:PORT[,GROUP][,transport=NAME+NAME]",
    multiple=True,
    default=("127.0.0.1:3260",),
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
)
@click.option(
    "--access",
    metavar="FILE",
    help="File with lines `INITIATOR LUNS [USER]`: which LUNs an initiator has access to, and the"
    " user of --chap-accounts as which it logs in. Read again after SIGHUP.",
)
@click.option("--iqn", metavar="IQN", required=True, help="The target's name.")
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
    type=click.IntRange(0, 10_000),
    default=BUSY_POLL_US,
    show_default=True,
    help="While commands follow each other closely, stay awake for the next one up to this many"
    " microseconds; 0: never.",
)
@click.option(
    "--rcap",
    metavar="iwarp|verbs",
    default="iwarp",
    show_default=True,
    help="verbs: also accept connections of RDMA devices, on the same port.",
)
@click.option(
    "--header",
    type=click.Choice(["28", "12"]),
    default="28",
    show_default=True,
    help="Bytes of the iSER header: 28 (RFC 7145), or 12 for initiators of RFC 5046, which begin"
    " with a Hello.",
)
@click.option(
    "--max-connections",
    metavar="N",
    type=click.IntRange(1, 64),
    default=SESSION_CONNECTIONS,
    show_default=True,
    help="Connections that one session may have.",
)
@click.option(
    "--error-recovery-level",
    metavar="N",
    type=click.IntRange(0, 2),
    default=2,
    show_default=True,
    help="The highest ErrorRecoveryLevel to agree to.",
)
@click.option(
    "--isns",
    metavar="HOST[:PORT]",
    help="Register the target and its portals with this iSNS server (port 3205).",
)
@click.option("--slp", is_flag=True, help="Answer SLP requests about the target.")
@click.option(
    "--slp-port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=SLP_PORT,
    show_default=True,
    help="UDP and TCP port of --slp; ports below 1024 are for root.",
)
@click.option(
    "--slp-da",
    metavar="HOST[:PORT]",
    multiple=True,
    help="Register the target with this directory agent; may be repeated.",
)
@click.option(
    "--slp-scopes",
    metavar="LIST",
    default="DEFAULT",
    show_default=True,
    help="Scopes in which SLP tells of the target, with commas between them.",
)
@click.option(
    "--chap-accounts",
    metavar="FILE",
    help="Admit only initiators that know the secret of a user in FILE: lines user:secret, mode"
    " 0600.",
)
@click.option("--chap-user", metavar="USER", help="The target's own user name in mutual CHAP.")
@click.option(
    "--chap-secret-file", metavar="FILE", help="One line with the secret of --chap-user; mode 0600."
)
def command(
    listen: tuple[str, ...],
    access_states: str | None,
    access: str | None,
    iqn: str,
    specs: tuple[str, ...],
    luns: str | None,
    busy_poll_us: int,
    rcap: str,
    header: str,
    max_connections: int,
    error_recovery_level: int,
    isns: str | None,
    slp: bool,
    slp_port: int,
    slp_da: tuple[str, ...],
    slp_scopes: str,
    chap_accounts: str | None,
    chap_user: str | None,
    chap_secret_file: str | None,
) -> None:
    """Serve files, and LUNs of other targets, as the LUNs of one target, over iSER and Traditional
    iSCSI.

    Prints `ready iser://HOST:PORT/IQN` once clients can connect. SIGTERM and SIGINT end the target;
    it asks initiators to log out, for three seconds at most, and writes its caches to the files.
    Without --chap-accounts every client that reaches the port can read and write; by default that
    is this machine alone.
    """
    accounts = None
    if chap_accounts:
        accounts = read_accounts(chap_accounts, chap_user or "", chap_secret_file or "")
    elif chap_user or chap_secret_file:
        raise BadArgument("--chap-user and --chap-secret-file need --chap-accounts FILE")
    if rcap not in ("iwarp", "verbs"):
        raise BadArgument(f"--rcap {rcap[:60]!r}: say iwarp or verbs")
    check_name(iqn, "--iqn")
    rdma = rcap == "verbs"
    states = Path(access_states) if access_states else None
    access_path = Path(access) if access else None
    if not specs and not luns:
        raise BadArgument("a target needs --lun FILE, or --luns FILE")
    announce: list[Announce] = []
    if isns:
        server = _place("--isns", isns, ISNS_PORT)
        announce.append(lambda announced: Registration(server, announced).run())
    scopes = [each.strip() for each in slp_scopes.split(",") if each.strip()]
    if not scopes:
        raise BadArgument("--slp-scopes: name at least one scope, e.g. DEFAULT")
    directories = [_place("--slp-da", each, SLP_PORT) for each in slp_da]
    slp_announcer = SlpAnnouncer(scopes, directories, slp, slp_port)
    if slp or directories:
        announce.append(slp_announcer.run)
    units = _Units()
    lun_list = LunList(Path(luns), iqn, range(len(specs))) if luns else None

    def open_all(open_remote: OpenRemote) -> None:
        units.open(specs, iqn, open_remote)
        if lun_list is not None:
            lun_list.open_remote = open_remote
            for lun, spec in lun_list.read().items():
                lun_list.open(lun, spec)

    async def serving() -> None:
        async with open_gateways(iqn) as gateways:
            try:
                slp_announcer.open()
                # In a thread, as that may wait for the loop, where other targets are logged in to.
                await trio.to_thread.run_sync(open_all, gateways.open_from_thread)
                opened = dict(enumerate(units.opened)) | (lun_list.units if lun_list else {})
                await serve(
                    listen,
                    iqn,
                    opened,
                    ready,
                    busy_poll_us,
                    rdma,
                    accounts,
                    states,
                    int(header),
                    access_path,
                    LOGOUT_S,
                    lun_list,
                    announce,
                    max_connections,
                    error_recovery_level,
                )
            finally:
                # Further signals have no effect here; after trio.run they would interrupt the
                # flush.
                slp_announcer.close()
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(_close, units, lun_list)

    run(serving)


def _place(option: str, text: str, default: int) -> tuple[str, int]:
    try:
        return parse_portal(text, default)
    except BadArgument:
        raise BadArgument(f"{option} {text[:60]!r}: give HOST[:PORT]") from None


def _close(units: _Units, lun_list: LunList | None) -> None:
    """Close all units. A second call does nothing. Raises IserblkError for the first that
    failed."""
    failed = ""
    try:
        units.close()
    finally:
        if lun_list is not None:
            failed = lun_list.close(list(lun_list.units))
    if failed:
        raise IserblkError(failed)


class _Units:
    """The units of the LUNs, in order."""

    def __init__(self) -> None:
        self.opened: list[LogicalUnit] = []
        self._paths: list[str] = []

    def open(self, specs: Sequence[str], iqn: str, open_remote: OpenRemote) -> None:
        """Open the units. Raises IserblkError; the units before the failed one are open then."""
        for spec in [parse_lun_spec(text) for text in specs]:
            self.opened.append(open_lun(spec, default_serial(iqn, spec.path), open_remote))
            self._paths.append(spec.path)

    def close(self) -> None:
        """Flush and close each unit, even if another unit fails. A second call does nothing. Raises
        IserblkError for the first that failed."""
        if self.opened:
            tell_systemd("STOPPING=1")
        failed = ""
        while self.opened:
            path, unit = self._paths.pop(0), self.opened.pop(0)
            try:
                unit.close()
            except OSError as error:
                failed = failed or f"{path}: {error.strerror}: what its cache held is lost"
        if failed:
            raise IserblkError(failed)
