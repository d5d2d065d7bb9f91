"""``iserblk discover``: shows the targets that portals, servers or agents tell of."""

from __future__ import annotations

from dataclasses import replace

import click

from iserblk.cli.command import Command
from iserblk.cli.options import connection, connection_options, json_option
from iserblk.cli.output import end_partly, print_json
from iserblk.cli.running import run
from iserblk.credentials import find_credentials
from iserblk.discovery.ranking import Candidate
from iserblk.discovery.targets import Found, FoundTarget, find_targets, shortened
from iserblk.errors import TargetNotFound
from iserblk.iscsi.send_targets import TYPE_WORDS
from iserblk.named.resolving import names_lun, urls_of
from iserblk.options import Options
from iserblk.url import Url, check_scheme, parse_place, parse_portal


@click.command("discover", cls=Command)
@click.argument("where", metavar="PORTAL|URL")
@click.option("--probe", is_flag=True, help="Connect to each found portal to see if it takes iSER.")
@json_option
@connection_options
def command(where: str, probe: bool, as_json: bool, **options: str | None) -> None:
    """Show the targets that a portal knows, and their portals, the best portal first.

    PORTAL is HOST[:PORT]. It is asked over iSER, or over TCP if it does not take iSER. URL is
    iser://HOST[:PORT] or iscsi://HOST[:PORT], with USER@ and options as usual, isns://HOST[:PORT]
    for an iSNS server, or slp://[HOST[:PORT]][?scope=LIST] for an SLP agent (without HOST: for all
    in the network). A URL that names a target, or a LUN of it, asks for that target only.

    What of an answer cannot be read is named on stderr, and left out; the exit status is 1 then.
    """
    url, settled = _place(where, connection(options))
    found = run(lambda: find_targets(url, settled, probe))
    if url.iqn and not found.targets:
        raise TargetNotFound(f"{found.source} does not know {url.iqn}, or does not admit us to it")
    if as_json:
        print_json(_as_json(found))
    else:
        _show(found)
    end_partly(shortened(found.left_out))


def _place(where: str, given: dict[str, str]) -> tuple[Url, Options]:
    named = names_lun(where)
    if named:
        where = urls_of([where], given)[0]
    if "://" not in where:
        host, port = parse_portal(where)
        return Url("iser", host, port, iqn="", lun=None), Options.from_pairs(
            {"fallback": "iscsi", **given}.items()
        )
    url = replace(parse_place(where), lun=None)
    own = {key: url.options[key] for key in url.options if (url.scheme, key) != ("slp", "scope")}
    settled = Options.from_pairs({**given, **own}.items())
    check_scheme(url, settled)
    find_credentials(url, settled)  # raises now if they are wrong
    return url, settled


def _show(found: Found) -> None:
    if not found.targets:
        click.echo(f"{found.source} knows no targets for this initiator")
    for target in found.targets:
        click.echo(target.name)
        width = max((len(found.url(target, way)) for way in target.ways), default=0)
        for way in target.ways:
            click.echo(f"  {found.url(target, way):<{width}}  {_about(way)}".rstrip())
        if not target.ways:
            click.echo("  it has no portals")


def _about(way: Candidate) -> str:
    words = []
    if way.portal.tag is not None:
        words.append(f"group {way.portal.tag}")
    if way.portal.kind is not None:
        words.append(TYPE_WORDS[way.portal.kind])
    if way.iser is not None:
        words.append("takes iSER" if way.iser else "no iSER")
    if way.near:
        words.append("own subnet")
    if way.unusable:
        words.append("link-local, unusable without %INTERFACE")
    return ", ".join(words)


def _as_json(found: Found) -> dict[str, object]:
    def portal(target: FoundTarget, way: Candidate) -> dict[str, object]:
        return {
            "url": found.url(target, way),
            "host": way.portal.host,
            "port": way.portal.port,
            "group": way.portal.tag,
            "group_type": None if way.portal.kind is None else TYPE_WORDS[way.portal.kind],
            "iser": way.iser,
            "own_subnet": way.near,
            "needs_interface": way.unusable,
        }

    return {
        "source": found.source,
        "targets": [
            {"name": target.name, "portals": [portal(target, way) for way in target.ways]}
            for target in found.targets
        ],
        "left_out": found.left_out,
    }
