"""``iserblk doctor``: says what works here, what does not, and what to do about it."""

from __future__ import annotations

import sys
from dataclasses import asdict

import click

from iserblk.cli.command import Command
from iserblk.cli.options import connection, connection_options, json_option
from iserblk.cli.output import print_json
from iserblk.cli.running import run
from iserblk.credentials import find_credentials
from iserblk.doctor.finding import OK, Finding
from iserblk.doctor.machine import Machine
from iserblk.doctor.portal import TCP, Limits, PortalReport, check_portal
from iserblk.doctor.report import check_machine, what_works
from iserblk.errors import BadArgument
from iserblk.named.resolving import names_lun, urls_of
from iserblk.options import Options
from iserblk.printable import printable
from iserblk.url import Url, check_scheme, parse_place, parse_portal

_USES = {
    "iwarp": "iSER over software iWARP",
    "verbs": "iSER over RDMA devices (verbs)",
    "nbd": "LUNs over NBD (iserblk nbd)",
    "attach": "LUNs as /dev/nbdX (iserblk attach)",
    "mount": "LUNs as files (iserblk mount)",
}


@click.command("doctor", cls=Command)
@click.argument("where", metavar="[PORTAL|URL]", required=False)
@json_option
@connection_options
def command(where: str | None, as_json: bool, **options: str | None) -> None:
    """Check what works on this machine, and with a portal HOST[:PORT] or the target of a URL.

    Changes nothing, and needs no root. Without a portal the exit status is 0. With a portal or URL
    it is 0 if iSER works with it (Traditional iSCSI, if the URL is iscsi://), else the status
    with which other commands would end.
    """
    given = connection(options)
    if where is not None and names_lun(where):
        where = urls_of([where], given)[0]
    url = _url(where) if where is not None else None
    settled = Options.from_pairs({**given, **(url.options if url else {})}.items())
    if url is not None:
        check_scheme(url, settled)
        find_credentials(url, settled)  # raises if they are wrong, before the portal is asked
    findings = check_machine(Machine())
    report: PortalReport | None = None
    if url is not None:
        target = url
        report = run(lambda: check_portal(target, settled, Limits()))
    works = what_works(findings)
    status = report.error.exit_status if report is not None and report.error is not None else 0
    if as_json:
        print_json(_as_json(findings, works, report, status))
    else:
        _show("This machine", findings)
        click.echo("What works here")
        for use, words in _USES.items():
            click.echo(f"  {'yes' if works[use] else 'no ':<9}{words}")
        if report is not None:
            _show(f"Portal {report.portal}", report.findings)
            what = "Traditional iSCSI" if _is_traditional(url, report) else "iSER"
            works_there = "works" if report.error is None else "does not work"
            click.echo(f"{what} {works_there} towards {report.portal}")
    if status:
        sys.exit(status)


def _url(text: str) -> Url:
    """The URL ``text``, or a URL without a target for the portal ``text``."""
    if "://" in text:
        url = parse_place(text)
        if url.scheme not in ("iser", "iscsi"):
            raise BadArgument("doctor looks at portals; iserblk discover asks servers and agents")
        return url
    host, port = parse_portal(text)
    return Url("iser", host, port, iqn="", lun=None)


def _is_traditional(url: Url | None, report: PortalReport) -> bool:
    return report.choice == TCP or (url is not None and url.scheme == "iscsi")


def _as_json(
    findings: list[Finding], works: dict[str, bool], report: PortalReport | None, status: int
) -> dict[str, object]:
    return {
        "findings": [asdict(finding) for finding in findings],
        "works": works,
        "portal": None
        if report is None
        else {
            "address": report.portal,
            "findings": [asdict(finding) for finding in report.findings],
            "provider": report.choice,
            "works": report.error is None,
        },
        "exit_status": status,
    }


def _show(title: str, findings: list[Finding]) -> None:
    click.echo(title)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        click.echo(f"  {finding.status:<9}{finding.name:<{width}}  {printable(finding.text)}")
        if finding.remedy and finding.status != OK:
            click.echo(f"  {'':<9}{'':<{width}}  → {printable(finding.remedy)}")
