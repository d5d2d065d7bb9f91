"""``iserblk doctor``: says what works here, what does not, and what to do about it; and makes the
report that a ticket needs."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from iserblk.cli.command import Command
from iserblk.cli.doctor_report import Surroundings, report_json
from iserblk.cli.options import connection, connection_options, json_option
from iserblk.cli.output import print_json
from iserblk.cli.running import run
from iserblk.credentials import find_credentials
from iserblk.doctor.finding import OK, Finding
from iserblk.doctor.hiding import Hider
from iserblk.doctor.machine import Machine
from iserblk.doctor.page import page
from iserblk.doctor.portal import Limits, PortalReport, check_portal
from iserblk.doctor.report import check_machine, what_works
from iserblk.errors import BadArgument, IserblkError, PermissionDenied
from iserblk.files import write_whole
from iserblk.named.resolving import names_lun, urls_of
from iserblk.options import Options
from iserblk.printable import printable
from iserblk.secret import Secret
from iserblk.url import Url, check_scheme, may_be_url, parse_place, parse_portal

_USES = {
    "iwarp": "iSER over software iWARP",
    "verbs": "iSER over RDMA devices (verbs)",
    "nbd": "LUNs over NBD (iserblk nbd)",
    "attach": "LUNs as /dev/nbdX (iserblk attach)",
    "mount": "LUNs as files (iserblk mount)",
}
_STDOUT = "-"


@click.command("doctor", cls=Command)
@click.argument("places", metavar="[PORTAL|URL]…", nargs=-1)
@click.option(
    "--html",
    "file",
    metavar="FILE",
    help="Write a report for a ticket, a page of HTML, to FILE (-: to standard output): the"
    " machine, versions, what runs here, portals with the time of each step, the last log lines."
    " Without secrets.",
)
@json_option
@connection_options
def command(
    places: tuple[str, ...], file: str | None, as_json: bool, **options: str | None
) -> None:
    """Check what works on this machine, and with a portal HOST[:PORT] or the target of a URL.

    Changes nothing, and needs no root. Without a portal the exit status is 0. With a portal or URL
    it is 0 if iSER works with it (Traditional iSCSI, if the URL is iscsi://), else the status
    with which other commands would end; with several, the first such status.

    --json prints the same report as --html writes. FILE gets mode 0600, and is written whole or
    not at all. What this user may not read is named in the report.
    """
    given = connection(options)
    if file is not None:
        check_file(file)
        if file == _STDOUT and as_json:
            raise BadArgument("--html - and --json: both would print; give --html a FILE")
    tried = [_settled(text, given) for place in places for text in _urls(place, given)]
    secrets = [secret for url, settled in tried for secret in _secrets(url, settled)]
    machine = Machine()
    findings = check_machine(machine)
    portals = run(lambda: _check(tried)) if tried else []
    works = what_works(findings)
    status = next((each.error.exit_status for each in portals if each.error is not None), 0)
    around = Surroundings(machine, secrets)
    report = None
    if as_json or file is not None:
        report = report_json(findings, works, portals, status, around)
    if report is not None and file is not None:
        text = page(report, _USES)
        if file == _STDOUT:
            click.echo(text, nl=False)
        else:
            write_report(file, text)
    if as_json:
        print_json(report)
    elif file != _STDOUT:
        show(findings, works, portals, around.hider)
        if file is not None:
            click.echo(f"the report is in {printable(file)}: read it before you give it away")
    if status:
        sys.exit(status)


def _urls(place: str, given: dict[str, str]) -> list[str]:
    """A named LUN's URLs, or what was given."""
    return urls_of([place], given) if names_lun(place) else [place]


def _settled(text: str, given: dict[str, str]) -> tuple[Url, Options]:
    """The portal to try, and its options. Raises if they are wrong, before a portal is asked."""
    url = _url(text)
    settled = Options.from_pairs({**given, **url.options}.items())
    check_scheme(url, settled)
    return url, settled


def _secrets(url: Url, options: Options) -> list[Secret]:
    """Those to log in with. Raises BadArgument if they are wrong."""
    credentials = find_credentials(url, options)
    return [] if credentials is None else [credentials.secret, credentials.target_secret]


def _url(text: str) -> Url:
    """The URL ``text``, or a URL without a target for the portal ``text``."""
    if "://" in text:
        url = parse_place(text)
        if url.scheme not in ("iser", "iscsi"):
            raise BadArgument("doctor looks at portals; iserblk discover asks servers and agents")
        return url
    host, port = parse_portal(text)
    return Url("iser", host, port, iqn="", lun=None)


async def _check(tried: Sequence[tuple[Url, Options]]) -> list[PortalReport]:
    """One portal after the other: so none of them changes what another takes."""
    return [await check_portal(url, options, Limits()) for url, options in tried]


# --- the file ------------------------------------------------------------------------------------


def check_file(file: str) -> None:
    """Raises BadArgument, PermissionDenied if a report cannot be written to ``file``: so that is
    known before any portal is asked."""
    if file == _STDOUT:
        return
    if may_be_url(file):
        raise BadArgument(
            "--html needs a FILE in front of the URL: `iserblk doctor --html FILE URL`"
        )
    if not file or "\0" in file:
        raise BadArgument("--html needs the name of a FILE, or - for standard output")
    path = Path(file)
    try:
        kind = os.lstat(path).st_mode
    except FileNotFoundError:
        pass
    except OSError as error:
        raise BadArgument(f"--html {file}: {error.strerror}; name another file") from None
    else:
        if not stat.S_ISREG(kind):
            raise BadArgument(
                f"--html {file}: not a regular file; name another file, or - for standard output"
            )
    if not path.parent.is_dir():
        raise BadArgument(f"--html {file}: there is no directory {path.parent}; make it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionDenied(
            f"--html {file}: you may not write into {path.parent}; name a file elsewhere"
        )


def write_report(file: str, text: str) -> None:
    """Write all of ``text``, or nothing. Raises as ``check_file``, and IserblkError; then what was
    there is as it was."""
    check_file(file)  # what is there may have changed
    try:
        write_whole(Path(file), text.encode(errors="replace"), replace=True)
    except OSError as error:
        raise IserblkError(f"--html {file}: not written: {error.strerror}") from None


# --- for people ----------------------------------------------------------------------------------


def show(
    findings: Sequence[Finding],
    works: Mapping[str, bool],
    portals: Sequence[PortalReport],
    hider: Hider,
) -> None:
    """Print all of it, without secrets."""
    _show_findings("This machine", findings, hider)
    click.echo("What works here")
    for use, words in _USES.items():
        click.echo(f"  {'yes' if works[use] else 'no ':<9}{words}")
    for report in portals:
        _show_findings(f"Portal {report.portal}", report.findings, hider)
    for report in portals:
        what = "Traditional iSCSI" if report.is_traditional else "iSER"
        works_there = "works" if report.error is None else "does not work"
        click.echo(f"{what} {works_there} towards {printable(report.portal)}")


def _show_findings(title: str, findings: Sequence[Finding], hider: Hider) -> None:
    click.echo(printable(title))
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        text = printable(hider.text(finding.text))
        took = "" if finding.seconds is None else f" ({finding.seconds * 1000:.1f} ms)"
        click.echo(f"  {finding.status:<9}{finding.name:<{width}}  {text}{took}")
        if finding.remedy and finding.status != OK:
            click.echo(f"  {'':<9}{'':<{width}}  → {printable(hider.text(finding.remedy))}")
