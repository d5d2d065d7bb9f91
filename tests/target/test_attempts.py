"""How long an attempt to log in waits behind failed ones."""

from __future__ import annotations

from iserblk.target.attempts import FORGET_S, FREE, HORIZON_S, LONGEST_S, Attempts


def failing(attempts: Attempts, times: int, origin: str = "a", user: str = "alice") -> None:
    for _ in range(times):
        attempts.failed(origin, user, 100.0)


def test_some_mistakes_cost_no_time() -> None:
    attempts = Attempts()
    failing(attempts, FREE - 1)
    assert attempts.wait("a", "alice", 100.0) == 0


def test_only_that_origin_and_user_waits() -> None:
    attempts = Attempts()
    failing(attempts, FREE)
    assert attempts.wait("a", "alice", 100.0) == 1
    assert attempts.wait("a", "bob", 100.0) == 0
    assert attempts.wait("b", "alice", 100.0) == 0


def test_attempts_side_by_side_wait_for_each_other() -> None:
    """But none so long that the next one never has its turn."""
    attempts = Attempts()
    failing(attempts, FREE + 1)
    assert [attempts.wait("a", "alice", 100.0) for _ in range(4)] == [2, 4, 6, 8]
    for _ in range(100):
        assert attempts.wait("a", "alice", 100.0) <= HORIZON_S + LONGEST_S
    assert attempts.wait("a", "alice", 100.0 + HORIZON_S + LONGEST_S) == 0


def test_the_wait_has_an_end() -> None:
    attempts = Attempts()
    failing(attempts, 10_000)
    assert attempts.wait("a", "alice", 100.0) == LONGEST_S
    assert attempts.wait("a", "alice", 101.0 + FORGET_S) == 0
    assert not len(attempts)


def test_the_right_secret_ends_it() -> None:
    attempts = Attempts()
    failing(attempts, FREE)
    attempts.succeeded("a", "alice")
    attempts.succeeded("a", "nobody")
    assert attempts.wait("a", "alice", 100.0) == 0
    assert not len(attempts)


def test_what_is_remembered_is_bounded() -> None:
    """Of the origin that has most the oldest is forgotten, and nothing of another one."""
    attempts = Attempts(most=10)
    failing(attempts, FREE, "b", "bob")
    for number in range(1000):
        failing(attempts, FREE, "a", f"user {number}")
    assert len(attempts) == 10
    assert attempts.wait("b", "bob", 100.0) == 1
    assert attempts.wait("a", "user 999", 100.0) == 1
    assert attempts.wait("a", "user 0", 100.0) == 0
