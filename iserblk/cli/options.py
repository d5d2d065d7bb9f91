"""Parameters that several commands take."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from iserblk.cli.command import Rare
from iserblk.errors import BadArgument
from iserblk.options import RCAPS, default_of, parse_size

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[int]  # type: ignore[type-arg, unused-ignore]
else:
    _ParamType = click.ParamType  # not generic in click 8.1

# Options of a connection: name, metavar, help. iserblk.options checks their values, and has the
# defaults, which stand in place of {}.
_CONNECTION = (
    (
        "rcap",
        "|".join(RCAPS),
        "RDMA provider: verbs (an RDMA device), iwarp (software iWARP) or iwarp-sctp (the same over"
        " SCTP). Default {}: verbs if a device leads to the portal, else iwarp.",
    ),
    (
        "style",
        "auto|cm|stream",
        "How a connection becomes iSER: cm (at once, as Linux does) or stream (behind a login on"
        " the byte stream of TCP). Default {}: cm, then stream.",
    ),
    (
        "mpa-crc",
        "yes|no",
        "CRC on every iWARP frame. With no, only TCP's checksum protects the data. Default {}.",
    ),
    (
        "mpa-frames",
        "auto|N",
        "How many TCP segments an iWARP frame with CRC may fill. Default {}: as many as the peer"
        " accepts, else one.",
    ),
    (
        "busy-poll",
        "US",
        "While answers come quickly, stay awake up to US microseconds for the next. Default {}.",
    ),
    ("immediate-data", "yes|no", "Send small writes with their command. Default {}."),
    (
        "hello",
        "yes|no",
        "yes: begin with a Hello, where the target agrees (iSERHelloRequired). Default {}.",
    ),
    (
        "header",
        "28|12",
        "Bytes of the iSER header: 28 (RFC 7145), or 12 for a target of RFC 5046. Default {}.",
    ),
    ("unsolicited-data", "auto|yes|no", "Send writes of up to 64 KiB unasked. Default {}."),
    ("initiator-name", "IQN", "Name of this initiator. Default: the machine's own name."),
    (
        "io-timeout",
        "SECONDS",
        "How long one request may take, reconnecting included; or forever. Default {}.",
    ),
    ("queue-depth", "N", "Commands in flight in one session. Default {}."),
    (
        "max-transfer",
        "SIZE",
        "Bytes that one command moves at most, up to 1M; for targets that refuse as much as they"
        " say. Default: what the LUN says.",
    ),
    ("connections", "N", "Connections of the session, 1 to 8. Default {}."),
    ("error-recovery-level", "0|1|2", "The highest level to agree to. Default {}."),
    (
        "journal",
        "SIZE|off",
        "Memory for writes that are not flushed yet; they are written again after each loss of the"
        " connection. Where another host may replace this one: reserve=exclusive, or shared=yes."
        " Default {}.",
    ),
    (
        "shared",
        "yes|no",
        "yes: other hosts write to the LUN, too; compare what may be lost, never write it again."
        " Default {}.",
    ),
    (
        "chap-secret-file",
        "FILE",
        "File with the CHAP secret of USER@ in the URL; for mutual CHAP a second line with the"
        " target's secret. Only its owner may have access (mode 0600).",
    ),
    ("chap-secret-fd", "FD", "The same, read from an open file descriptor."),
    ("chap-secret-credential", "NAME", "The same, read from a credential of systemd."),
    ("fallback", "none|iscsi", "iscsi: use Traditional iSCSI if iSER is not possible."),
    (
        "portals",
        "given|discover|URL",
        "discover: also use the target's other portals; isns:// or slp:// URL: those it tells of.",
    ),
    ("alua", "ask|follow", "ask: where no portal carries out commands, have one activated."),
    (
        "metrics",
        "PATH|HOST:PORT|off",
        "Serve metrics for Prometheus at a Unix socket, or at a port of the loopback interface.",
    ),
    ("reserve", "exclusive", "Keep other hosts off the LUN, by a persistent reservation."),
    ("reserve-key", "0xKEY", "The reservation's key. Default: this machine's own key."),
)


CONNECTION = tuple(
    (name, metavar, text.format(default_of(name))) for name, metavar, text in _CONNECTION
)
# Those of them that --help shows; --help-all shows the others, too.
USUAL = (*("io-timeout", "chap-secret-file", "initiator-name", "portals", "fallback", "reserve"),)


def connection_options_but(
    *others: str, defaults: Mapping[str, str] | None = None
) -> Callable[[F], F]:
    """Decorator that adds CONNECTION's options to a command; ``connection`` gathers their values
    from the command's keyword arguments. ``others``: names that the command has for something
    else. ``defaults``: those that are the command's own, for its help."""
    own = defaults or {}

    def add(function: F) -> F:
        for name, metavar, words in reversed(_CONNECTION):
            if name not in others:
                text = words.format(own.get(name) or default_of(name))
                cls = click.Option if name in USUAL else Rare
                function = click.option(f"--{name}", metavar=metavar, help=text, cls=cls)(function)
        return function

    return add


connection_options = connection_options_but()


def connection(given: dict[str, str | None]) -> dict[str, str]:
    """The options for ``open_disks``: those of a command's keyword arguments that were given."""
    names = [name for name, _, _ in CONNECTION]
    values = {name: given.get(name.replace("-", "_")) for name in names}
    found = {name: value for name, value in values.items() if value is not None}
    if found.get("chap-secret-file"):
        found["chap-secret-file"] = os.path.abspath(found["chap-secret-file"])
    return found


class Size(_ParamType):
    """A number of bytes, such as 4096, 64M or 1G."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_size(value, "size")
        except BadArgument as error:
            self.fail(str(error), param, ctx)


class Seconds(click.FloatRange):
    """A time in the range given. Refuses "nan", which every comparison lets through."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not in the range {self._describe_range()}.", param, ctx)
        return seconds


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/json.md).")
