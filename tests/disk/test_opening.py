"""A URL without a LUN: which disks it stands for."""

from __future__ import annotations

import logging

import pytest

from iserblk.disk import opening
from iserblk.disk.lun.inventory import FIRST_ALLOCATION, Inventory, report_luns
from iserblk.disk.lun.operations import DiskCore
from iserblk.disk.multipath.addresses import settle
from iserblk.disk.opening import find_disks
from iserblk.errors import ConnectionLost, RemoteProtocolError, ScsiError
from iserblk.initiator.session.listeners import LunListener
from iserblk.initiator.session.slots import Operation, TaskSlot
from iserblk.scsi import luns
from iserblk.scsi.sense import (
    HARDWARE_ERROR,
    ILLEGAL_REQUEST,
    MEDIUM_ERROR,
    NOT_READY,
    UNIT_ATTENTION,
    encode_fixed,
)
from tests.disk.fake_lun import FakeLun, FakeLuns, T, finish
from tests.support import logs

pytestmark = pytest.mark.logs(logs.LEFT_OUT)

URL = "iser://portal/iqn.2026-11.example:disk"
CHANGED = encode_fixed(UNIT_ATTENTION, 0x3F, 0x0E)
NO_MEDIUM = encode_fixed(NOT_READY, 0x3A, 0x00)


class Driver:
    """Runs operations as a TrioDriver does, on a session that answers at once."""

    def __init__(self, session: FakeLuns) -> None:
        self.session = session

    async def run_operation(self, operation: Operation[T]) -> T:
        return finish(operation)[0]


async def found(session: FakeLuns, **options: str) -> list[DiskCore]:
    (address,) = settle([URL], options)
    return await find_disks(Driver(session), address)  # type: ignore[arg-type]


def numbers(cores: list[DiskCore]) -> list[int]:
    return [core.info.lun for core in cores]


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
    with pytest.raises(RemoteProtocolError, match="520"):
        await found(FakeLuns(FakeLun(block=520)))
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

        def farewell(self) -> Operation[None]:
            yield from self.release(None, self.lun)

    monkeypatch.setattr(opening, "Reservation", Reservation)
    session = FakeLuns()
    session.luns[1] = FakeLun(errors={"READ CAPACITY(16)": encode_fixed(MEDIUM_ERROR, 0x11, 0)})
    assert numbers(await found(session, reserve="exclusive")) == [0]
    zero, one = luns.encode(0), luns.encode(1)
    assert done == [("acquire", zero), ("acquire", one), ("release", one)]
    finish(session.listeners.farewell())
    assert done[3:] == [("release", zero)]


# -- the list ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2046, 2047, 2048, 16384])
def test_the_list_is_read_whole(count: int) -> None:
    session = FakeLuns()
    session.luns = dict.fromkeys(range(count), FakeLun())
    assert finish(report_luns(session))[0] == list(range(count))  # type: ignore[arg-type]
    assert len(session.asked) == (1 if 8 + 8 * count <= FIRST_ALLOCATION else 2)


async def test_a_list_that_changes_while_luns_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = FakeLuns()
    session.luns[1] = FakeLun(errors={"INQUIRY": [CHANGED]})
    whole = dict(session.luns)
    answer = FakeLuns.answer_luns
    asked = []

    def report(self: FakeLuns) -> bytes:
        asked.append(1)
        if len(asked) == 2:
            self.luns = {0: whole[0], 2: FakeLun(serial="S3")}  # 1 has gone, 2 has come
        return answer(self)

    monkeypatch.setattr(FakeLuns, "answer_luns", report)
    assert numbers(await found(session)) == [0, 2]
    assert len(asked) == 2


@pytest.mark.parametrize("way", ["read", "write"])
async def test_a_list_that_changes_later_is_read_again(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What has come and gone is in the log; the disks stay."""
    caplog.set_level(logging.WARNING)
    session = FakeLuns()
    session.luns |= {1: FakeLun(), 2: FakeLun()}
    cores = await found(session)
    session.asked.clear()
    session.luns[3] = session.luns.pop(1)
    slot = TaskSlot(0)
    slot.sense = CHANGED
    slot.lun = luns.encode(2)
    session.listeners.hear(slot)
    buffer = memoryview(bytearray(512))
    core = cores[0]
    with pytest.raises(AssertionError):  # the fake LUN does not read and write
        finish(core.read(buffer, 0) if way == "read" else core.write(buffer, 0))
    assert [what for _, what in session.asked] == ["REPORT LUNS"]
    words = caplog.text
    assert "LUN 3 is new" in words and "LUN 1 is gone" in words
    assert core.inventory is not None and not core.inventory.changed


@pytest.mark.parametrize("words", ["5/20/00", "answered with 3 bytes"])
def test_a_list_that_cannot_be_read_again_fails_no_request(
    words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = FakeLuns()
    if words == "5/20/00":
        session.luns[0].errors["REPORT LUNS"] = encode_fixed(ILLEGAL_REQUEST, 0x20, 0)
    else:
        monkeypatch.setattr(session, "answer_luns", lambda: bytes(3))
    inventory = Inventory()
    finish(inventory.look_again(session, 0.0))  # type: ignore[arg-type]
    assert words in caplog.text and session.asked == [(0, "REPORT LUNS")]
    assert session.queue.busy == 0
