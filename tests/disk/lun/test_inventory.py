"""A target's list of LUNs: read whole, and again when it has changed."""

from __future__ import annotations

import logging

import pytest

from iserblk.commands.command import PlainCommand
from iserblk.disk.lun.inventory import FIRST_ALLOCATION, TOLD, Inventory, report_luns
from iserblk.scsi import luns
from iserblk.scsi.sense import (
    ILLEGAL_REQUEST,
    encode_fixed,
)
from tests.disk.fake_lun import FakeLun, FakeLuns, finish
from tests.disk.odd_luns import CHANGED, found, numbers


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
    """The log names LUNs that came and went; the disks stay as they were."""
    caplog.set_level(logging.WARNING)
    session = FakeLuns()
    session.luns |= {1: FakeLun(), 2: FakeLun()}
    cores = await found(session)
    session.asked.clear()
    session.luns[3] = session.luns.pop(1)
    slot = PlainCommand(0)
    slot.sense = CHANGED
    slot.lun = luns.encode(2)
    session.listeners.hear(slot)
    buffer = memoryview(bytearray(512))
    core = cores[0]
    with pytest.raises(AssertionError):  # the fake LUN does not read and write
        finish(core.read(buffer, 0) if way == "read" else core.write(buffer, 0))
    assert session.asked.pop(0) == (0, "REPORT LUNS")
    assert set(session.asked) >= {(0, "VPD 83"), (0, "READ CAPACITY(16)")}  # is it the same LUN?
    assert {number for number, _ in session.asked} == {0}
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


def test_a_few_of_many_luns_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A target may have thousands, and others each time that it is asked."""
    session = FakeLuns()
    session.luns = dict.fromkeys(range(2000), FakeLun())
    inventory = Inventory()
    finish(inventory.look_again(session, 0.0))  # type: ignore[arg-type]
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == TOLD + 1
    assert "LUN 0 is new at the target: open the URL again" in texts[0]
    assert f"each of {2000 - TOLD} more LUNs is new" in texts[-1]
