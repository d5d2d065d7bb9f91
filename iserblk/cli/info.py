"""``iserblk info``: shows what a LUN is, and how it is connected."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import click

from iserblk.cli.command import Command
from iserblk.cli.options import connection, connection_options, json_option
from iserblk.cli.output import print_json, print_table, size_words, yes_no
from iserblk.cli.running import run
from iserblk.disk.aio import open_disks
from iserblk.disk.seam import LunInfo
from iserblk.errors import IserblkError
from iserblk.named.resolving import urls_of

# What to show for the short names in a connection's description. Other names are shown as they are.
_WORDS = {
    "connections_wanted": "connections wanted",
    "error_recovery_level": "error recovery level",
    "provider": "provider",
    "mpa_crc": "MPA CRC",
    "mpa_revision": "MPA revision",
    "mpa_enhanced": "MPA enhanced setup",
    "mpa_markers_sent": "MPA markers sent",
    "mpa_rtr": "MPA ready-to-receive",
    "ird": "IRD",
    "ord": "ORD",
    "emss": "TCP segment (EMSS)",
    "mulpdu": "largest ULPDU",
    "header": "iSER header",
    "hello": "Hello exchanged",
    "mode": "STags are",
    "device": "RDMA device",
    "header_digest": "header digest",
    "data_digest": "data digest",
    "receive_size": "receive size",
    "receive_invalidate": "Send with Invalidate",
    "solicits": "Sends with solicited events",
}
# What is told of the login, beside what the connection is.
_OF_LOGIN = ("provider_reason", "chap", "chap_algorithm")


@click.command("info", cls=Command)
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@json_option
@connection_options
def command(urls: tuple[str, ...], as_json: bool, **options: str | None) -> None:
    """Log in to URL and show its LUN; without /LUN, every disk of the target.

    If several URLs name one LUN, also show its portals, and which of them is used. Without /LUN,
    a disk that cannot be used is named on stderr, and the exit status is 1.
    """
    given = connection(options)
    found = urls_of(urls, given)

    async def look() -> tuple[list[LunInfo], Sequence[str]]:
        async with open_disks(found, given) as disks:
            return [disk.info for disk in disks.disks.values()], disks.left_out

    infos, left_out = run(look)
    logins = [{name: info.connection.pop(name) for name in _OF_LOGIN} for info in infos]
    if as_json:
        pairs = zip(infos, logins, strict=True)
        print_json({"disks": [_fields(info, login) for info, login in pairs]})
    else:
        for info, login in zip(infos, logins, strict=True):
            _show(info, login)
    if left_out:  # which a line of the log has named
        sys.exit(IserblkError.exit_status)


def _fields(info: LunInfo, login: Mapping[str, object]) -> dict[str, object]:
    fields = asdict(info)
    del fields["designators"]  # bytes; ``identifiers`` has them as text
    return {**fields, **login}


def _show(info: LunInfo, login: Mapping[str, object]) -> None:
    print_table(
        f"{info.name}: {info.url}",
        [
            ("target", info.target),
            ("LUN", str(info.lun)),
            ("product", f"{info.vendor} {info.product} {info.revision}".strip()),
            ("serial number", info.serial or "none"),
            ("identifiers", ", ".join(info.identifiers) or "none"),
            ("size", f"{info.size} bytes ({size_words(info.size)})"),
            ("block size", f"{info.block_size}, physical {info.physical_block_size}"),
            ("read-only", yes_no(info.read_only)),
            ("rotational", yes_no(info.rotational)),
            ("write cache", yes_no(info.write_cache)),
            ("FUA", yes_no(info.fua)),
            ("trim (UNMAP)", yes_no(info.can_trim)),
            ("zero (WRITE SAME)", _zero(info)),
            ("extents (GET LBA STATUS)", yes_no(info.can_extents)),
            ("largest transfer", size_words(info.max_transfer)),
            (
                "best transfer",
                size_words(info.optimal_transfer) if info.optimal_transfer else "not told",
            ),
            *([("gateway to", " → ".join(info.gateway_to))] if info.gateway_to else []),
        ],
    )
    rows = [(_WORDS.get(name, name), _value(value)) for name, value in info.connection.items()]
    rows.append(("login", _login(login)))
    print_table("  connection", [(f"  {name}", value) for name, value in rows])
    click.echo(f"    provider chosen because: {login['provider_reason']}")
    if info.paths:
        print_table("  portals", [(f"  {path['portal']}", _path(path)) for path in info.paths])


def _login(login: Mapping[str, object]) -> str:
    if login["chap"] == "none":
        return "without CHAP"
    return f"CHAP, {login['chap']}, {str(login['chap_algorithm']).upper()}"


def _path(path: Mapping[str, object]) -> str:
    state = path["state"]
    words = ["in use" if path["in_use"] else "not in use"]
    if isinstance(state, str):
        words.append(state)
    if path["error"]:
        words.append(str(path["error"]))
    return ", ".join(words)


def _zero(info: LunInfo) -> str:
    if not info.can_zero:
        return "no, zeroes are written"
    return "yes, by deallocation" if info.zero_by_unmap else "yes"


def _value(value: object) -> str:
    if value in (None, "None"):  # of digests
        return "none"
    return yes_no(value) if isinstance(value, bool) else str(value)
