"""What owns and drives a connection of the target in a test."""

from __future__ import annotations

from collections.abc import Callable

from iserblk.target.iscsi.tasks.slot import TargetTask


def _nothing() -> None:
    pass


def _unexpected(_slot: TargetTask) -> None:
    raise AssertionError("nothing is to run in a thread here")


class Owner:
    """Implements ConnectionOwner, ConnectionDriver and SessionOwner: it refuses nothing, and waits
    for nothing. Each attribute is one of their methods; a test sets those that it is about."""

    def __init__(self, offload: Callable[[TargetTask], None] = _unexpected) -> None:
        self.offload = offload
        self.login_begun: Callable[[], None] = _nothing
        self.take_place: Callable[[], None] = _nothing
        self.hold_attempt: Callable[[str, Callable[[], None]], bool] = lambda _user, _resume: False
        self.attempt_ended: Callable[[str, bool], None] = lambda _user, _right: None
        self.logged_in: Callable[[], None] = _nothing
        self.end_other_sessions: Callable[[], None] = _nothing
        self.recovery_begins: Callable[[], None] = _nothing
        self.released: Callable[[], None] = _nothing
        self.output_waits: Callable[[], None] = _nothing
        self.unfinished: Callable[[], None] = _nothing
        self.ended: Callable[[], None] = _nothing
        self.session_over: Callable[[], None] = _nothing
