"""What a target tells of itself (``--metrics``, ``iserblk stats``).

All of it is kept anyway, and looked at when it is asked for: no command costs more for that. The
look takes time in proportion to the sessions, which are bounded, and not to the tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from iserblk.limited_log import lines_left_out
from iserblk.metrics.target_reading import (
    MOST_SESSIONS,
    SessionReading,
    TargetLunReading,
    TargetReading,
    largest_addresses,
)
from iserblk.newcomers import Newcomers
from iserblk.target.attempts import Attempts
from iserblk.target.iscsi.buffers import DataBudget
from iserblk.target.iscsi.session import DATA_BUDGET, TargetSession
from iserblk.target.keeping import KeptConnections


@dataclass(slots=True)
class Logins:
    """How logins have ended, and how many commands sessions had that have ended."""

    succeeded: int = 0
    refused: int = 0
    commands: int = 0


@dataclass(slots=True, frozen=True)
class Limits:
    """Of a target: how many connections, and how many before their login."""

    connections: int
    logins: int


@dataclass(slots=True, frozen=True)
class Parts:
    """Where a target counts."""

    budget: DataBudget
    newcomers: Newcomers
    attempts: Attempts
    kept: KeptConnections
    logins: Logins


def read_figures(
    target: str,
    url: str,
    parts: Parts,
    limits: Limits,
    sessions: Collection[TargetSession],
    connections: int,
    luns: Iterable[TargetLunReading],
) -> TargetReading:
    """``sessions``: all whose commands are not in ``parts.logins`` yet. To be called in the thread
    of the target."""
    budget = parts.budget
    held = budget.held_by_address()
    there = [each for each in sessions if not each.done]
    return TargetReading(
        target=target,
        url=url,
        memory=budget.used + budget.beside,
        memory_beside=budget.beside,
        memory_free=budget.free,
        memory_limit=budget.most,
        addresses=largest_addresses(held),
        address_count=len(held),
        address_limit=budget.share,
        largest_session=budget.largest(),
        session_limit=DATA_BUDGET,
        memory_waiting=len(budget.waiting),
        memory_refused=budget.refused,
        sessions=len(there),
        connections=connections,
        connection_limit=limits.connections,
        logins_unfinished=len(parts.newcomers),
        login_limit=limits.logins,
        logins_given_up=parts.newcomers.given_up,
        logins=parts.logins.succeeded,
        logins_refused=parts.logins.refused,
        attempts_failed=parts.attempts.failures,
        attempts_delayed=parts.attempts.delays,
        kept=len(parts.kept),
        kept_limit=parts.kept.most,
        kept_memory=parts.kept.data,
        kept_memory_limit=parts.kept.most_data,
        kept_given_up=parts.kept.given_up,
        commands=parts.logins.commands + sum(each.window.received for each in sessions),
        in_flight=sum(len(each.tasks) for each in sessions),
        lines_left_out=lines_left_out(),
        luns=tuple(luns),
        named_sessions=tuple(
            SessionReading(each.initiator_name, each.pool.address) for each in there[:MOST_SESSIONS]
        ),
    )
