"""What a target is told: by the options of ``iserblk target``, or by the file of ``--config``
(``config_file``). Both make a TargetConfig, and nothing else reaches the target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from iserblk.errors import BadArgument
from iserblk.iscsi.chap import Accounts
from iserblk.options import BUSY_POLL_US
from iserblk.target.access import Access
from iserblk.target.lunspec import LunSpec
from iserblk.target.ports import ON_TCP, VERBS, AccessStates, Listen, transports_of
from iserblk.url import SLP_PORT

# Least and greatest values.
BUSY_POLL: Final = (0, 10_000)  # microseconds
CONNECTIONS: Final = (1, 64)  # of a session
LEVELS: Final = (0, 2)  # ErrorRecoveryLevel
PORTS: Final = (0, 65535)
HEADERS: Final = (28, 12)  # bytes
PROVIDERS: Final = ("iwarp", "verbs")

SESSION_CONNECTIONS: Final = 8
DEFAULT_PORTAL: Final = "127.0.0.1:3260"


@dataclass(slots=True, frozen=True)
class Slp:
    """How SLP tells of the target. ``answer``: requests are answered, on ``port``."""

    answer: bool = False
    port: int = SLP_PORT
    directories: Sequence[tuple[str, int]] = ()
    scopes: Sequence[str] = ("DEFAULT",)


@dataclass(slots=True, frozen=True)
class TargetConfig:
    """One target. ``iqn``: its name, checked. ``rdma``: portals whose group names no transports
    take RDMA devices, too. ``header``: bytes of the iSER header, 28 or 12: all initiators use the
    same. ``busy_poll_us``: see Pace. ``max_connections``: of one session.
    ``error_recovery_level``: the highest to agree to. ``luns``: what each LUN is.
    ``metrics``: where they are served, as ``parse_metrics`` returns it; None: not said.
    ``accounts``: the users that may log in (CHAP); None: every initiator may. ``access``: which
    initiator has access to what; None: each to all. ``states``: ALUA states of portal groups.

    The first line of fields holds until the target ends; the others may change meanwhile. Raises
    BadArgument where values contradict each other."""

    iqn: str
    portals: Sequence[Listen] = (Listen(DEFAULT_PORTAL),)
    rdma: bool = False
    header: int = HEADERS[0]
    isns: tuple[str, int] | None = None
    slp: Slp = field(default_factory=Slp)
    metrics: str | None = None

    busy_poll_us: int = BUSY_POLL_US
    max_connections: int = SESSION_CONNECTIONS
    error_recovery_level: int = LEVELS[1]
    luns: Mapping[int, LunSpec] = field(default_factory=dict)
    accounts: Accounts | None = None
    access: Access | None = None
    states: AccessStates = field(default_factory=lambda: AccessStates({}))

    def __post_init__(self) -> None:
        groups = self.transports
        for tag in self.states.states:
            if tag not in groups:
                known = ", ".join(map(str, groups))
                raise BadArgument(f"there is no portal group {tag}; the groups are: {known}")
        known_users = self.accounts.secrets if self.accounts else {}
        for user in sorted(self.access.users if self.access else ()):
            if user not in known_users:
                raise BadArgument(
                    f"access: there is no account of the user {user[:60]!r}, as which an initiator"
                    " is to log in"
                )

    @property
    def transports(self) -> dict[int, frozenset[str]]:
        """What the portals of each group take, by tag. Raises BadArgument."""
        return transports_of(self.portals, ON_TCP | {VERBS} if self.rdma else ON_TCP)

    def check_successor(self, other: TargetConfig) -> None:
        """Raises BadArgument where ``other`` cannot take the place of this while the target
        runs."""
        changed = [
            words
            for words, one, another in (
                ("the target's name", self.iqn, other.iqn),
                ("its portals and their groups", [*self.portals], [*other.portals]),
                ("rcap", self.rdma, other.rdma),
                ("header", self.header, other.header),
                ("isns", self.isns, other.isns),
                ("slp", self.slp, other.slp),
                ("metrics", self.metrics, other.metrics),
            )
            if one != another
        ]
        if changed:
            raise BadArgument(f"restart the target to change {', '.join(changed)}")
