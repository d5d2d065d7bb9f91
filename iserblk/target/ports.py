"""The target's ports: portal groups, each a SCSI target port with an asymmetric access state.

A portal group is what iSCSI makes a SCSI target port of (RFC 7143 section 4.4.1): its tag is the
target port group of ALUA here, too, and a session with the same name in another group is another
session. States are for trying out how initiators fail over: every LUN can be reached through every
port all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from iserblk.errors import BadArgument
from iserblk.scsi import alua

MAXIMUM_TAG = 65535
STATES = {
    "optimized": alua.ACTIVE_OPTIMIZED,
    "non-optimized": alua.ACTIVE_NON_OPTIMIZED,
    "standby": alua.STANDBY,
    "unavailable": alua.UNAVAILABLE,
    "offline": alua.OFFLINE,
    "transitioning": alua.TRANSITIONING,
}
# What a command meets in the states in which most are refused: ASC << 8 | ASCQ.
REFUSALS = {
    alua.STANDBY: alua.IN_STANDBY,
    alua.UNAVAILABLE: alua.IS_UNAVAILABLE,
    alua.OFFLINE: alua.IS_OFFLINE,
    alua.TRANSITIONING: alua.IN_TRANSITION,
}
_SUPPORTED = (
    alua.SUPPORTS_TRANSITIONING
    | alua.SUPPORTS_OFFLINE
    | alua.SUPPORTS_UNAVAILABLE
    | alua.SUPPORTS_STANDBY
    | alua.SUPPORTS_NON_OPTIMIZED
    | alua.SUPPORTS_OPTIMIZED
)
_CHANGED_BY_ITSELF = 2  # the STATUS CODE of a group whose state was changed


class TargetPort:
    """One portal group. ``addresses``: its portals (``host:port``) that have an address of their
    own. ``refusal``: what most commands end with, 0 where they are carried out."""

    __slots__ = ("addresses", "ports", "refusal", "relative", "state", "status", "tag")

    def __init__(self, ports: TargetPorts, tag: int, relative: int) -> None:
        self.ports = ports
        self.tag = tag
        self.relative = relative
        self.addresses: list[str] = []
        self.state = alua.ACTIVE_OPTIMIZED
        self.status = 0
        self.refusal = 0


class TargetPorts:
    """All of them, by tag; in the order given. ``several``: there is something to choose from, so
    that initiators are told of ALUA."""

    def __init__(self, tags: Sequence[int] = (1,)) -> None:
        unique = list(dict.fromkeys(tags))
        self.by_tag = {tag: TargetPort(self, tag, i + 1) for i, tag in enumerate(unique)}
        self.several = len(unique) > 1

    def set_states(self, states: Mapping[int, int]) -> bool:
        """States by tag; whether any has changed. Raises BadArgument for a group that there is not;
        nothing has changed then."""
        for tag in states:
            if tag not in self.by_tag:
                known = ", ".join(map(str, self.by_tag))
                raise BadArgument(f"there is no portal group {tag}; there are: {known}")
        changed = False
        for tag, state in states.items():
            port = self.by_tag[tag]
            if port.state != state:
                changed = True
                port.state = state
                port.status = _CHANGED_BY_ITSELF
                port.refusal = REFUSALS.get(state, 0)
        return changed

    def report(self) -> bytes:
        """The answer to REPORT TARGET PORT GROUPS."""
        return alua.encode_report(
            alua.PortGroup(port.tag, port.state, False, _SUPPORTED, port.status, (port.relative,))
            for port in self.by_tag.values()
        )

    def target_addresses(self, portal: str, here: TargetPort) -> list[str]:
        """Every portal as TargetAddress has it; first that of the connection that asks, which may
        have come to one without an address of its own (0.0.0.0)."""
        found = [f"{portal},{here.tag}"]
        for port in self.by_tag.values():
            found += (f"{address},{port.tag}" for address in port.addresses)
        return list(dict.fromkeys(found))


ONLY_PORT = TargetPorts().by_tag[1]  # where nothing is said of ports


def parse_listen(text: str) -> tuple[str, int]:
    """``HOST:PORT[,GROUP]``, as TargetAddress has it. Raises BadArgument."""
    place, comma, tag = text.partition(",")
    if not comma:
        return place, 1
    if not (tag.isascii() and tag.isdigit() and int(tag[:6]) <= MAXIMUM_TAG):
        raise BadArgument(f"--listen {text}: a portal group is a number from 0 to {MAXIMUM_TAG}")
    return place, int(tag)


def read_states(path: Path) -> dict[int, int]:
    """``parse_states`` of a file. Raises BadArgument, also when it cannot be read."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "it is no text"
        raise BadArgument(f"--access-states {path}: {words}") from None
    return parse_states(text)


def parse_states(text: str) -> dict[int, int]:
    """Lines ``GROUP STATE``; empty ones and those that begin with # are left out. Raises
    BadArgument."""
    states: dict[int, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not (words[0].isascii() and words[0].isdigit()):
            raise BadArgument(f"access states, line {number}: write GROUP STATE, e.g. 2 standby")
        state = STATES.get(words[1])
        if state is None:
            raise BadArgument(
                f"access states, line {number}: {words[1][:40]!r} is no state; say one of: "
                f"{', '.join(STATES)}"
            )
        states[int(words[0][:6])] = state
    return states
