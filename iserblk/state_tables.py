"""A step of a state table, as docs/states.md shows them: what a table does not have cannot happen.

Each step is logged at DEBUG, in one form for all tables, and before anything has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from iserblk.errors import LocalProtocolError

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)

log = logging.getLogger(__name__)


def step(table: Mapping[tuple[S, E], S], what: str, state: S, event: E) -> S:
    """The state to which ``event`` leads from ``state``. ``what`` is in it: a noun, with what tells
    it from others of its kind. Raises LocalProtocolError where the table has no such step."""
    after = table.get((state, event))
    if after is None:
        raise LocalProtocolError(f"{what} that is {state} cannot take: {event}")
    tell(what, state, event, after)
    return after


def tell(what: str, state: StrEnum, event: StrEnum, after: StrEnum) -> None:
    """Log a step."""
    log.debug("%s: %s; it was %s, and is %s", what, event, state, after)
