"""A URL without a LUN: which disks it stands for."""

from __future__ import annotations

import logging

import pytest
import trio
from trio.testing import MockClock

from iserblk.commands.command import Operation
from iserblk.commands.listeners import LunListener
from iserblk.disk import opening
from iserblk.disk.multipath import paths
from iserblk.disk.multipath.addresses import settle
from iserblk.errors import ConnectionLost, LunChanged, ScsiError, UnusableLun
from iserblk.initiator.session.session import Session
from iserblk.options import Options
from iserblk.scsi import luns
from iserblk.scsi.sense import (
    HARDWARE_ERROR,
    MEDIUM_ERROR,
    encode_fixed,
)
from iserblk.url import Url
from tests.disk.fake_lun import FakeLun, FakeLuns, finish
from tests.disk.odd_luns import NO_MEDIUM, found, numbers
from tests.initiator import fake
from tests.initiator.test_reconnecting import Driver
from tests.support import clocks, logs

pytestmark = pytest.mark.logs(logs.LEFT_OUT)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (FakeLun(block=520), "520"),
        (FakeLun(errors={"TEST UNIT READY": NO_MEDIUM}), "2/3a/00"),
        (FakeLun(errors={"READ CAPACITY(16)": encode_fixed(HARDWARE_ERROR, 0x44, 0)}), "4/44/00"),
        (FakeLun(errors={"READ CAPACITY(16)": 0x18}), "RESERVATION CONFLICT"),
    ],
    ids=["520", "no medium", "broken", "reserved"],
)
async def test_one_odd_lun_is_left_out(
    odd: FakeLun, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    session = FakeLuns()
    session.luns |= {3: odd, 7: FakeLun()}
    assert numbers(await found(session)) == [0, 7]
    (record,) = caplog.records
    assert "LUN 3" in record.message and words in record.message


async def test_where_all_are_odd_the_error_says_why() -> None:
    with pytest.raises(UnusableLun, match="lun0 has a block length of 520 bytes") as raised:
        await found(FakeLuns(FakeLun(block=520)))
    assert raised.value.exit_status == 27
    with pytest.raises(ScsiError, match="2/3a/00"):
        await found(FakeLuns(FakeLun(errors={"TEST UNIT READY": NO_MEDIUM})))


async def test_a_session_that_is_lost_on_the_way_is_not_an_odd_lun() -> None:
    session = FakeLuns()
    session.luns[1] = FakeLun(errors={"INQUIRY": NO_MEDIUM})
    session.error = ConnectionLost("gone")  # type: ignore[assignment]
    with pytest.raises(ScsiError):
        await found(session)


async def test_an_odd_lun_that_was_reserved_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[tuple[str, bytes]] = []

    class Reservation(LunListener):
        def __init__(self, *_: object) -> None: ...

        def acquire(self, _session: object, lun: bytes) -> Operation[None]:
            self.lun = lun
            done.append(("acquire", lun))
            yield from ()

        def release(self, _session: object, lun: bytes) -> Operation[None]:
            done.append(("release", lun))
            yield from ()

        def watch(self, *_: object) -> None: ...

        def before_logout(self) -> Operation[None]:
            yield from self.release(None, self.lun)

    monkeypatch.setattr(opening, "Reservation", Reservation)
    session = FakeLuns()
    session.luns[1] = FakeLun(errors={"READ CAPACITY(16)": encode_fixed(MEDIUM_ERROR, 0x11, 0)})
    assert numbers(await found(session, reserve="exclusive")) == [0]
    zero, one = luns.encode(0), luns.encode(1)
    assert done == [("acquire", zero), ("acquire", one), ("release", one)]
    finish(session.listeners.before_logout())
    assert done[3:] == [("release", zero)]


# -- the list ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [1, 2])
async def test_the_first_session_has_the_isid_of_the_options(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where there are several portals."""
    seen: list[bytes] = []

    async def connect(url: Url, options: Options, isid: bytes = b"") -> Session:
        await trio.lowlevel.checkpoint()
        seen.append(isid)
        raise ConnectionLost("enough")

    for module in (opening, paths):
        monkeypatch.setattr(module, "connect", connect)
    urls = [f"iser://192.0.2.{host}/iqn.2026-11.example:disk/0" for host in range(hosts)]
    (address,) = settle(urls, {"isid": "80a1b2c3d4e5"})
    with pytest.raises(ConnectionLost):
        await opening.open_session(address)
    assert set(seen) == {bytes.fromhex("80a1b2c3d4e5")}


@pytest.mark.logs(logs.RECONNECTED)
async def test_a_session_is_reinstated_after_time2wait(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its ISID. The target wants that time for what the lost connection has left there."""
    lost, dm = fake.session()
    lost.isid = b"\x80abcde"
    logins: list[tuple[float, bytes]] = []

    async def connect(url: Url, options: Options, isid: bytes) -> Session:
        logins.append((trio.current_time(), isid))
        raise LunChanged("this is enough")

    monkeypatch.setattr(opening, "connect", connect)
    clocks.give(monkeypatch, autojump_clock.current_time)
    driver = Driver(lost)
    (address,) = settle(["iscsi://host/iqn.2026-11.example:disk/0"], {})
    reconnector = opening.reconnector(driver, address, [])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reconnector.run)
        dm.inbox.append(ConnectionLost("cut"))
        lost.progress(trio.current_time())
        assert lost.respite.reinstate_at > 0
        lost.respite.reinstate_at = trio.current_time() + 2.0  # on trio's clock
        at = lost.respite.reinstate_at
        driver.regained = trio.Event()
        await driver.regained.wait()  # it has ended
        reconnector.stop()
    assert logins == [(at, lost.isid)]
