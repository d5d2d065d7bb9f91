"""Readings of a target: what its peers make it hold and do, at one moment."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MOST_ADDRESSES: Final = 16  # that are named; peers choose how many there are
MOST_SESSIONS: Final = 64  # the same of these
OTHER: Final = "other"  # stands for the addresses that are not named


@dataclass(slots=True, frozen=True)
class AddressReading:
    """``address``: of initiators; of IPv6 a network of 64 bits; or OTHER. ``memory``: bytes that
    their sessions hold, free buffers left out."""

    address: str
    memory: int


@dataclass(slots=True, frozen=True)
class SessionReading:
    """``initiator``: its name. ``address``: of the peer of its leading connection, of IPv6 a
    network of 64 bits; "" where that is not known."""

    initiator: str
    address: str


@dataclass(slots=True, frozen=True)
class TargetLunReading:
    """``threads``: that carry out commands of the LUN, and may wait for its disk.
    ``waiting``: commands that wait for such a thread."""

    lun: int
    threads: int
    waiting: int


@dataclass(slots=True, frozen=True)
class TargetReading:
    """The numbers of one target. Memory is in bytes. Numbers that have ``total`` in their
    description count from the start of the target; the others are those of the moment.

    ``target``: its name. ``url``: with its first address.

    ``memory``: what peers make it hold: data buffers in use, and ``memory_beside``: answers that
    are kept, PDUs that came before their turn. ``memory_free``: buffers to be used again, which
    give way. ``memory_limit``: of these three. ``addresses``: who holds most of ``memory``, the
    largest first, then OTHER; at most MOST_ADDRESSES and one. ``address_count``: how many hold any.
    ``address_limit``: of each. ``largest_session``: what the session holds that holds
    most. ``session_limit``: data buffers of each. ``memory_waiting``: sessions whose commands wait
    for memory. ``memory_refused``: commands that ended for want of memory, total.

    ``connections``: those that have logged in, and the lost ones that are kept, of
    ``connection_limit`` at most. ``logins_unfinished``: connections before the end of their
    login, of ``login_limit`` at most; ``logins_given_up``: total of those that were ended since
    there were too many. ``logins``, ``logins_refused``: totals. ``attempts_failed``,
    ``attempts_delayed``: of CHAP, totals.

    ``kept``: lost connections that are kept for their tasks, of ``kept_limit``, and
    ``kept_memory``: the data of these tasks, of ``kept_memory_limit``. ``kept_given_up``: total of
    those that were given up since there were too many.

    ``commands``: PDUs with a CmdSN of their own, total: for the most part SCSI commands.
    ``in_flight``: tasks of all sessions. ``lines_left_out``: of the log, total.

    ``named_sessions``: the first MOST_SESSIONS of ``sessions``; told where a client asks for them.
    """

    target: str
    url: str
    memory: int = 0
    memory_beside: int = 0
    memory_free: int = 0
    memory_limit: int = 0
    addresses: tuple[AddressReading, ...] = ()
    address_count: int = 0
    address_limit: int = 0
    largest_session: int = 0
    session_limit: int = 0
    memory_waiting: int = 0
    memory_refused: int = 0
    sessions: int = 0
    connections: int = 0
    connection_limit: int = 0
    logins_unfinished: int = 0
    login_limit: int = 0
    logins_given_up: int = 0
    logins: int = 0
    logins_refused: int = 0
    attempts_failed: int = 0
    attempts_delayed: int = 0
    kept: int = 0
    kept_limit: int = 0
    kept_memory: int = 0
    kept_memory_limit: int = 0
    kept_given_up: int = 0
    commands: int = 0
    in_flight: int = 0
    lines_left_out: int = 0
    luns: tuple[TargetLunReading, ...] = ()
    named_sessions: tuple[SessionReading, ...] = ()


def largest_addresses(held: Mapping[str, int]) -> tuple[AddressReading, ...]:
    """Those of ``held`` (bytes by address) that hold most, and the sum of the others as OTHER."""
    largest = heapq.nlargest(MOST_ADDRESSES, held.items(), key=lambda each: each[1])
    found = [AddressReading(address, memory) for address, memory in largest]
    if len(held) > len(found):
        rest = sum(held.values()) - sum(each.memory for each in found)
        found.append(AddressReading(OTHER, rest))
    return tuple(found)
