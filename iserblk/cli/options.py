"""Parameters that several commands take."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from iserblk.errors import BadArgument
from iserblk.options import parse_size

F = TypeVar("F", bound=Callable[..., Any])

# Options of a connection (their values are checked by iserblk.options): name, metavar, help. Those
# without help have one possible value so far; they are accepted, and refused in words.
CONNECTION = (
    ("rcap", "auto|verbs|iwarp", "RDMA provider; auto: verbs where a device can, else iwarp."),
    (
        "mpa-crc",
        "yes|no",
        "CRC on every iWARP frame; the only protection of the data. Default yes.",
    ),
    (
        "mpa-frames",
        "auto|N",
        "How many TCP segments an iWARP frame with CRC may fill. Default auto: as many as the peer"
        " says that it takes, else one.",
    ),
    ("busy-poll", "US", "Stay awake so long for an answer while they come quickly. Default 300."),
    ("immediate-data", "yes|no", "Send small writes with their command. Default yes."),
    ("initiator-name", "IQN", "Who we are; default: the machine's own name."),
    (
        "io-timeout",
        "SECONDS",
        "How long one request may take, reconnecting included. Default 30.",
    ),
    ("queue-depth", "N", "Commands in flight on one connection. Default 128."),
    ("journal", "SIZE|off", "Keep so much of what is not flushed yet. Default 64M."),
    ("shared", "yes|no", "Other hosts write to the LUN, too: never send again. Default no."),
    (
        "chap-secret-file",
        "FILE",
        "A line with the CHAP secret of the URL's user@; for mutual CHAP a second one with the"
        " target's. Nobody else may read it.",
    ),
    ("chap-secret-fd", "FD", "The same from an open file descriptor."),
    ("chap-secret-credential", "NAME", "The same from a credential of systemd."),
    ("fallback", "none|iscsi", "iscsi: use Traditional iSCSI where iSER cannot be had."),
    ("portals", "given|discover", "discover: use the target's other portals, too."),
    (
        "metrics",
        "PATH|HOST:PORT|off",
        "Serve metrics for Prometheus at a Unix socket, or at a port of the loopback interface.",
    ),
    ("style", "cm|stream", ""),
    ("header", "28|12", ""),
    ("reserve", "exclusive", "Keep other hosts off the LUN, by a persistent reservation."),
    ("reserve-key", "0xKEY", "The reservation's key; default: one of this machine's own."),
)


def connection_options(function: F) -> F:
    """Adds the options; ``connection`` gathers them from the command's keyword arguments."""
    for name, metavar, text in reversed(CONNECTION):
        function = click.option(f"--{name}", metavar=metavar, help=text, hidden=not text)(function)
    return function


def connection(given: dict[str, str | None]) -> dict[str, str]:
    """What ``open_disks`` takes, from a command's keyword arguments: those that were given."""
    names = [name for name, _, _ in CONNECTION]
    values = {name: given[name.replace("-", "_")] for name in names}
    found = {name: value for name, value in values.items() if value is not None}
    if found.get("chap-secret-file"):
        found["chap-secret-file"] = os.path.abspath(found["chap-secret-file"])
    return found


class Size(click.ParamType[int]):
    """Bytes, as 4096, 64M or 1G."""

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
    """A time in the range given; "nan" is in none, though it compares with nothing."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if math.isnan(seconds):
            self.fail(f"{value!r} is not in the range {self._describe_range()}.", param, ctx)
        return seconds


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/json.md).")
