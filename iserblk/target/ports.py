"""The target's ports: portal groups, each a SCSI target port with an asymmetric access state.

In iSCSI a portal group is a SCSI target port (RFC 7143 section 4.4.1). Here its tag is also the
number of its target port group (ALUA). Two sessions with the same name in two groups are two
sessions. States are for testing how initiators fail over: every LUN is behind every port, in
whatever state the port is. A file gives them, and SET TARGET PORT GROUPS may change those of groups
that the file says are settable.

A session may use every portal of its group, so all portals of a group take the same transports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from iserblk import files
from iserblk.errors import BadArgument
from iserblk.names import shown
from iserblk.scsi import alua

MAXIMUM_TAG = 65535

# What a portal takes.
IWARP = "iwarp"  # iSER over software iWARP, on TCP
TCP = "tcp"  # Traditional iSCSI
VERBS = "verbs"  # iSER over RDMA devices, by rdma_cm
SCTP = "sctp"  # iSER over software iWARP, on SCTP
TRANSPORTS = (IWARP, TCP, VERBS, SCTP)
ON_TCP = frozenset((IWARP, TCP))  # these share a TCP port
ISER = frozenset((IWARP, VERBS, SCTP))

STATES = {
    "optimized": alua.ACTIVE_OPTIMIZED,
    "non-optimized": alua.ACTIVE_NON_OPTIMIZED,
    "standby": alua.STANDBY,
    "unavailable": alua.UNAVAILABLE,
    "offline": alua.OFFLINE,
    "transitioning": alua.TRANSITIONING,
}
# Why a command is refused, in the states in which most commands are: ASC << 8 | ASCQ.
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
# STATUS CODE: what changed the state.
_CHANGED_BY_COMMAND = 1
_CHANGED_BY_ITSELF = 2  # implicit ALUA
SETTABLE = "settable"
EXPLICIT = "explicit"


class AccessStates(NamedTuple):
    """What a file says: ``states`` by the tag of the group; ``settable``: groups whose state
    initiators may set; ``explicit_only``: initiators are told that states change by their commands
    alone."""

    states: Mapping[int, int]
    settable: frozenset[int] = frozenset()
    explicit_only: bool = False


class TargetPort:
    """One portal group. ``addresses``: its portals (``host:port``), without those that listen on
    all addresses of the machine (0.0.0.0). ``transports``: what each of them takes. ``refusal``:
    ASC << 8 | ASCQ with which most commands end in the present state; 0: commands are carried
    out. ``settable``: initiators may set the state."""

    __slots__ = (
        "addresses",
        "ports",
        "refusal",
        "relative",
        "settable",
        "state",
        "status",
        "tag",
        "transports",
    )

    def __init__(
        self, ports: TargetPorts, tag: int, relative: int, transports: frozenset[str]
    ) -> None:
        self.ports = ports
        self.tag = tag
        self.relative = relative
        self.transports = transports
        self.addresses: list[str] = []
        self.state = alua.ACTIVE_OPTIMIZED
        self.status = 0
        self.refusal = 0
        self.settable = False

    def enter(self, state: int, status: int) -> bool:
        """Take a state. Returns whether it is another than before."""
        if self.state == state:
            return False
        self.state = state
        self.status = status
        self.refusal = REFUSALS.get(state, 0)
        return True


class TargetPorts:
    """All portal groups of the target, by tag, in the order given. ``several``: there are more
    than one, so the target tells initiators of ALUA."""

    def __init__(
        self, tags: Sequence[int] = (1,), transports: Mapping[int, frozenset[str]] | None = None
    ) -> None:
        """``transports``: of groups, by tag; a group that is missing there takes both that share a
        TCP port."""
        unique = list(dict.fromkeys(tags))
        given = transports or {}
        self.by_tag = {
            tag: TargetPort(self, tag, i + 1, given.get(tag, ON_TCP))
            for i, tag in enumerate(unique)
        }
        self.several = len(unique) > 1
        self.explicit_only = False
        self._given: dict[int, int] = {}  # the states that the file gave

    @property
    def tpgs(self) -> int:
        """What standard INQUIRY data says of ALUA (alua.TPGS_…)."""
        if any(port.settable for port in self.by_tag.values()):
            return alua.TPGS_EXPLICIT if self.explicit_only else alua.TPGS_BOTH
        return alua.TPGS_IMPLICIT if self.several else alua.TPGS_NONE

    def configure(self, given: AccessStates) -> bool:
        """Do what the file says. A state of a settable group that it gave before as well stays what
        initiators have made of it. Returns whether any state has changed. Raises BadArgument for a
        group that does not exist; nothing has changed then."""
        for tag in given.states:
            if tag not in self.by_tag:
                known = ", ".join(map(str, self.by_tag))
                raise BadArgument(f"there is no portal group {tag}; the groups are: {known}")
        for tag, port in self.by_tag.items():
            port.settable = tag in given.settable
        self.explicit_only = given.explicit_only
        changed = False
        for tag, state in given.states.items():
            if not self.by_tag[tag].settable or self._given.get(tag) != state:
                changed |= self.by_tag[tag].enter(state, _CHANGED_BY_ITSELF)
        self._given = dict(given.states)
        return changed

    def set_by_command(self, states: Mapping[int, int]) -> bool:
        """Set states that an initiator asks for, by the tags of settable groups. Returns whether
        any has changed."""
        changed = False
        for tag, state in states.items():
            changed |= self.by_tag[tag].enter(state, _CHANGED_BY_COMMAND)
        return changed

    def report(self) -> bytes:
        """The parameter data of REPORT TARGET PORT GROUPS."""
        return alua.encode_report(
            alua.PortGroup(port.tag, port.state, False, _SUPPORTED, port.status, (port.relative,))
            for port in self.by_tag.values()
        )

    def target_addresses(self, portal: str, here: TargetPort) -> list[str]:
        """Every portal, as values of TargetAddress. The first is ``portal``, to which the asking
        initiator connected: it may be missing in ``addresses`` (a listener on 0.0.0.0)."""
        found = [f"{portal},{here.tag}"]
        for port in self.by_tag.values():
            found += (f"{address},{port.tag}" for address in port.addresses)
        return list(dict.fromkeys(found))


ONLY_PORT = TargetPorts().by_tag[1]  # the default: a single portal group, with tag 1


@dataclass(slots=True, frozen=True)
class Listen:
    """One value of ``--listen``. ``place``: ``HOST:PORT``, not checked. ``transports`` empty: those
    of its group, or the default. ``or_another``: while the port is in use, any other of the host
    does."""

    place: str
    group: int = 1
    transports: frozenset[str] = frozenset()
    or_another: bool = False


def _said(text: str) -> str:
    return shown(text) if "@" in text else text


def parse_listen(text: str) -> Listen:
    """Parse ``HOST:PORT[,GROUP][,transport=NAME[+NAME…]]``; the group may also be written
    ``group=GROUP``. Raises BadArgument."""
    said = _said(text)
    place, *words = text.split(",")
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            name, value = "group", word
        if name not in ("group", "transport"):
            raise BadArgument(f"--listen {said}: {shown(name)} is neither group nor transport")
        if name in given:
            raise BadArgument(f"--listen {said}: {name} is given twice")
        given[name] = value
    tag = given.get("group", "1")
    if not (tag.isascii() and tag.isdigit() and int(tag[:6]) <= MAXIMUM_TAG):
        raise BadArgument(f"--listen {said}: a portal group is a number from 0 to {MAXIMUM_TAG}")
    transports = frozenset(given["transport"].split("+")) if "transport" in given else frozenset()
    if not transports <= frozenset(TRANSPORTS):
        raise BadArgument(
            f"--listen {said}: the transports are {', '.join(TRANSPORTS)}; several are joined by +"
        )
    return Listen(place, int(tag), transports)


def transports_of(listens: Sequence[Listen], default: frozenset[str]) -> dict[int, frozenset[str]]:
    """The transports of each group: those that its portals name, else ``default``. Raises
    BadArgument where two portals of a group name others."""
    found: dict[int, frozenset[str]] = {}
    for each in listens:
        known = found.setdefault(each.group, each.transports)
        if each.transports and known and known != each.transports:
            raise BadArgument(
                f"--listen {_said(each.place)}: group {each.group} has portals of other transports;"
                " all portals of a group take the same: give it another group"
            )
        found[each.group] = known or each.transports
    return {group: transports or default for group, transports in found.items()}


def read_states(path: Path) -> AccessStates:
    """Read a file and parse it with ``parse_states``. Raises BadArgument, also when the file cannot
    be read."""
    try:
        text = files.read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        words = getattr(error, "strerror", None) or "the file is not UTF-8 text"
        raise BadArgument(f"--access-states {path}: {words}") from None
    return parse_states(text)


def parse_states(text: str) -> AccessStates:
    """Parse lines of the forms ``GROUP STATE [settable]`` and ``explicit``. Empty lines, and lines
    that begin with #, are ignored. Raises BadArgument that names the line."""
    states: dict[int, int] = {}
    settable: set[int] = set()
    explicit_only = 0  # the line
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if words == [EXPLICIT]:
            explicit_only = number
            continue
        if len(words) not in (2, 3) or not (words[0].isascii() and words[0].isdigit()):
            raise BadArgument(f"access states, line {number}: write GROUP STATE, e.g. 2 standby")
        if words[2:] not in ([], [SETTABLE]):
            raise BadArgument(
                f"access states, line {number}: {words[2][:40]!r}: behind the state there may be "
                f"{SETTABLE}, and nothing else"
            )
        state = STATES.get(words[1])
        if state is None:
            raise BadArgument(
                f"access states, line {number}: {words[1][:40]!r} is no state; write one of: "
                f"{', '.join(STATES)}"
            )
        tag = int(words[0][:6])
        states[tag] = state
        settable.discard(tag)
        if words[2:]:
            settable.add(tag)
    if explicit_only and not settable:
        raise BadArgument(
            f"access states, line {explicit_only}: {EXPLICIT} needs a group that is {SETTABLE}, "
            f"e.g. 2 standby {SETTABLE}"
        )
    return AccessStates(states, frozenset(settable), bool(explicit_only))
