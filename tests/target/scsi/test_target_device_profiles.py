"""What a new nexus hears first, where the device server has the habits of another target."""

from __future__ import annotations

import pytest

from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from tests.support.profiles import istgt, lio, tgtd
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import GOOD, IQN, LUN_RESET, POWER_ON, Client

TEST_UNIT_READY = bytes(6)


def unit(lun: int) -> LogicalUnit:
    return LogicalUnit(FakeStore(1 << 20), serial=f"S{lun}")


@pytest.mark.parametrize(
    ("device", "first", "later"),
    [
        (DeviceServer, POWER_ON, POWER_ON),
        (lio.Device, GOOD, GOOD),
        (istgt.Device, POWER_ON, GOOD),
        (tgtd.Device, POWER_ON, POWER_ON),
    ],
)
def test_what_a_new_nexus_hears_first(
    device: type[DeviceServer], first: tuple[int, int], later: tuple[int, int]
) -> None:
    server = device({0: unit(0)}, IQN)
    for expected in (first, later, later):
        client = Client(server, ready=False)
        assert client.code(TEST_UNIT_READY) == expected
        assert client.code(TEST_UNIT_READY) == GOOD
    # A reset on the living session is told by all.
    assert server.reset_lun(0)
    assert client.code(TEST_UNIT_READY) == LUN_RESET


@pytest.mark.parametrize(
    ("device", "told"), [(lio.Device, (0, 0)), (istgt.Device, (1, 0)), (tgtd.Device, (1, 1))]
)
def test_a_lun_that_comes_later(device: type[DeviceServer], told: tuple[int, int]) -> None:
    server = device({0: unit(0)}, IQN)
    clients = [Client(server, lun=1, ready=False, name=f"iqn.2026-11.example:{n}") for n in "ab"]
    server.add_luns({1: unit(1)})
    heard = [[client.code(TEST_UNIT_READY) for _ in range(3)] for client in clients]
    assert sorted((each.count(POWER_ON) for each in heard), reverse=True) == [*told]
    assert [each[-1] for each in heard] == [GOOD, GOOD]


def test_istgt_tells_the_first_that_asks() -> None:
    """Not the first that logs in."""
    server = istgt.Device({0: unit(0)}, IQN)
    one, two = (Client(server, ready=False, name=f"iqn.2026-11.example:{n}") for n in "ab")
    heard = [each.code(TEST_UNIT_READY) for each in (two, one, two)]
    assert heard == [POWER_ON, GOOD, GOOD]
