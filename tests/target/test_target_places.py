"""Places of the target: one address leaves some to the others."""

from __future__ import annotations

import pytest

from iserblk.errors import Busy
from iserblk.target.places import SPARE, Places, room
from tests.target.iscsi.several import Host, TcpPeer


@pytest.fixture
def places() -> Places:
    made = Places()
    made.most = 8
    return made


def taken(places: Places, peer: str, count: int, reinstates: bool = False) -> list[TcpPeer]:
    host = Host()
    peers = [TcpPeer(host, cid) for cid in range(count)]
    for each in peers:
        places.take(each.connection, peer, reinstates)
    return peers


def test_one_address_leaves_places_to_the_others(places: Places) -> None:
    taken(places, "10.0.0.1:1", 7)
    with pytest.raises(Busy, match=r"there are 7 connections, 7 of 10\.0\.0\.1"):
        taken(places, "10.0.0.1:2", 1)
    taken(places, "10.0.0.2:1", 1)
    with pytest.raises(Busy, match=r"there are 8 connections, 0 of 10\.0\.0\.3"):
        taken(places, "10.0.0.3:1", 1)
    assert len(places) == 8


def test_a_place_that_is_left_is_free(places: Places) -> None:
    peers = taken(places, "10.0.0.1:1", 7)
    places.leave(peers[0].connection)
    places.leave(peers[0].connection)  # which has none any more
    assert len(places) == 6
    (again,) = taken(places, "10.0.0.1:2", 1)
    assert places.origin_of(again.connection) == "10.0.0.1"
    assert places.origin_of(peers[0].connection) == "an initiator that is gone"


def test_what_reinstates_a_session_makes_room_within_bounds(places: Places) -> None:
    taken(places, "10.0.0.1:1", 7)
    taken(places, "10.0.0.1:2", 1 + SPARE // 2, reinstates=True)
    with pytest.raises(Busy):
        taken(places, "10.0.0.1:3", 1, reinstates=True)


@pytest.mark.logs("room for 16 connections, not 1024: the limit of descriptors is 600")
def test_a_target_has_room_for_as_many_as_it_has_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks for what it needs. Else peers could take those that state files need."""
    limits = [1024, 1 << 20]
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr("resource.setrlimit", lambda _, both: asked.append(both))
    assert room() == (1024, 512)
    assert asked == [(2112, 1 << 20)]
    limits[:] = [600, 600]
    assert room() == (16, 8)
    limits[:] = [-1, -1]
    asked.clear()
    assert room() == (1024, 512) and not asked
