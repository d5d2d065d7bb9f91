"""What is told of disks where their metrics are served."""

from __future__ import annotations

import time
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from iserblk.disk import metrics_ports
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.metered import count
from iserblk.disk.metrics_ports import Measured, look
from iserblk.disk.multipath.addresses import settle
from iserblk.errors import ConnectionLost
from iserblk.initiator.session.session import Session
from iserblk.metrics.counting import READ
from iserblk.metrics.reading import LunReading, PathReading
from iserblk.scsi import alua
from iserblk.scsi.tasks import NO_DATA
from tests.disk import fake_target
from tests.initiator import fake
from tests.support import logs


def core_of_a_session() -> tuple[DiskCore, Session]:
    session, _ = fake.session()
    template = fake_target.disk(fake_target.FakeSession(), 2048)
    return DiskCore(session, template.lun, template.info, template.geometry), session


def ladder_of(session: Session) -> Any:
    return SimpleNamespace(session=session, aborted=3, resets=1)


def test_a_reading_tells_of_the_lun_and_its_session() -> None:
    core, session = core_of_a_session()
    count(core.metrics, READ, 0, 4096, False)
    core.metrics.retried()
    session.counts.reconnects, session.counts.replayed = 2, 7
    session.counts.recovered, session.counts.reassigned = 3, 9
    session.counts.losses.damaged, session.counts.losses.snacks = 4, 5
    (lun,) = look([Measured(core, ladder_of(session))]).luns
    assert (lun.target, lun.lun, lun.name, lun.url) == ("iqn", 0, "lun0", core.info.url)
    assert (lun.size, lun.portal, lun.connected) == (2048 * 512, "portal:3260", True)
    assert (lun.retries, lun.reconnects, lun.replayed) == (1, 2, 7)
    assert (lun.aborted, lun.resets, lun.unflushed) == (3, 1, 0)
    assert (lun.recovered, lun.reassigned, lun.damaged, lun.snacks) == (3, 9, 4, 5)
    assert (lun.connections, lun.wanted, lun.per_connection) == (1, 1, ())
    assert {name: each.requests for name, each in lun.operations.items() if each.requests} == {
        "read": 1
    }
    assert lun.operations["read"].bytes == 4096


def test_every_field_of_a_reading_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field has a default, for those that read: one without a value here would always be 0."""
    given: set[str] = set()

    def reading(**values: Any) -> LunReading:
        given.update(values)
        return LunReading(**values)

    monkeypatch.setattr(metrics_ports, "LunReading", reading)
    core, session = core_of_a_session()
    look([Measured(core, ladder_of(session))])
    missing = {field.name for field in fields(LunReading)} - given
    assert not missing, f"iserblk/disk/metrics_ports.py gives no value of {missing}"


def test_commands_in_flight_are_those_of_the_lun() -> None:
    core, session = core_of_a_session()
    assert isinstance(core.lun, bytes)
    for lun in (core.lun, core.lun, b"\0\5" + bytes(6)):
        slot = session.queue.take_now()
        assert slot is not None
        slot.lun, slot.waiter = lun, fake.CountingWaiter()
        slot.cdb[:] = bytes(16)
        slot.direction = NO_DATA
        slot.waiter.pending += 1
        session.queue.submit(slot)
    assert look([Measured(core, ladder_of(session))]).luns[0].in_flight == 2


def test_the_journal_and_the_lost_connection_are_told() -> None:
    core, session = core_of_a_session()
    core.keep_journal(1 << 20)
    slot = core.begin_write(memoryview(bytes(1024)), 0, fake.CountingWaiter())
    assert slot is not None
    session.fail(ConnectionLost("gone"))
    (lun,) = look([Measured(core, ladder_of(session))]).luns
    assert not lun.connected and not lun.connections
    assert lun.unflushed == core.durability.journal.size  # type: ignore[union-attr]


def test_the_ways_of_a_session_are_told() -> None:
    """Also a way that was found later, and a port of which no state is known."""
    core, session = core_of_a_session()
    addresses = settle([f"iser://{host}/iqn.2026-11.x:t/0" for host in ("a", "b")], {})
    paths = addresses[0].paths
    assert paths is not None
    measured = Measured(core, ladder_of(session), paths)
    first, second = paths.ways.all
    paths.ways.failed(first, "no answer", 1.0)
    paths.ways.connected(second, 2.0, alua.ACTIVE_NON_OPTIMIZED)
    (lun,) = look([measured]).luns
    assert lun.paths == (
        PathReading(0, "iser://a:3260", False, 1, None),
        PathReading(1, "iser://b:3260", True, 0, 1),
    )
    paths.ways.add([(first.address, "iser://c:3260")])
    assert [each.portal for each in look([measured]).luns[0].paths][2:] == ["iser://c:3260"]
    assert look([Measured(core, ladder_of(session))]).luns[0].paths == ()


@pytest.mark.logs(logs.RECONNECTED)
def test_since_when_the_target_is_away() -> None:
    core, session = core_of_a_session()
    fake.driver_of(session).reconnect = lambda: None
    assert look([Measured(core, ladder_of(session))]).luns[0].away_since == 0
    before = int(time.time())
    session.queue.connection.datamover.inbox.append(ConnectionLost("gone"))  # type: ignore[attr-defined]
    session.progress(time.monotonic())
    (lun,) = look([Measured(core, ladder_of(session))]).luns
    assert not lun.connected and before - 1 <= lun.away_since <= time.time()
