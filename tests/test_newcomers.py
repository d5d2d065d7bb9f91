"""Which connections are given up before their login."""

from __future__ import annotations

import pytest

from iserblk.newcomers import Newcomers, origin_of


class Given:
    """Newcomers that note who was given up."""

    def __init__(self, most: int) -> None:
        self.newcomers = Newcomers()
        self.most = most
        self.up: list[str] = []

    def add(self, who: str, origin: str, begins: bool = False) -> None:
        self.newcomers.add(who, origin, lambda: self.up.append(who), self.most)
        if begins:
            self.newcomers.begins(who)


def test_a_flood_gives_up_its_own() -> None:
    given = Given(4)
    given.add("honest", "b")
    for number in range(100):
        given.add(f"flood {number}", "a")
    assert given.up == [f"flood {number}" for number in range(97)]
    assert len(given.newcomers) == 4


def test_who_has_sent_a_login_request_stays_longer() -> None:
    """Also where all are of one origin."""
    given = Given(3)
    given.add("honest", "a", begins=True)
    for number in range(20):
        given.add(f"flood {number}", "a")
    assert given.up == [f"flood {number}" for number in range(18)]


def test_who_stops_in_the_middle_of_a_login_leaves_half_of_the_room() -> None:
    """To those of the same origin that have not begun theirs yet."""
    given = Given(4)
    for number in range(20):
        given.add(f"flood {number}", "a", begins=True)
    assert given.up == [f"flood {number}" for number in range(16)]
    given.up.clear()
    for number in range(2):
        given.add(f"honest {number}", "a")
    assert given.up == ["flood 16", "flood 17"]


def test_who_goes_on_talking_does_not_get_younger() -> None:
    given = Given(3)
    for number in range(3):
        given.add(f"flood {number}", "a", begins=True)
    given.newcomers.begins("flood 0")
    given.add("next", "a")
    assert given.up == ["flood 0"]


def test_who_has_ended_does_not_count() -> None:
    given = Given(2)
    given.add("1", "a")
    given.add("2", "a")
    given.newcomers.remove("1")
    given.newcomers.remove("1")
    given.newcomers.begins("1")
    given.add("3", "b")
    assert not given.up
    given.newcomers.give_up_all()
    assert given.up == ["2", "3"]
    assert not len(given.newcomers)


def test_less_room_gives_up_several() -> None:
    given = Given(3)
    for who, origin in (("1", "a"), ("2", "b"), ("3", "a")):
        given.add(who, origin)
    given.most = 1
    given.add("4", "b")
    assert given.up == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("peer", "origin"),
    [
        ("192.0.2.1:3260", "192.0.2.1"),
        ("[2001:db8:1:2:3::4]:5", "2001:db8:1:2::/64"),
        ("[2001:db8:1:2:ffff::1]:6", "2001:db8:1:2::/64"),
        ("[fe80::1%eth0]:7", "fe80::/64"),
        ("[::ffff:192.0.2.1]:8", "192.0.2.1"),
        ("an RDMA peer", "an RDMA peer"),
    ],
)
def test_what_counts_together(peer: str, origin: str) -> None:
    assert origin_of(peer) == origin
