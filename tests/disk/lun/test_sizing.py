"""The size of a LUN: when the disk asks for it, what the answer changes, and what is logged."""

from __future__ import annotations

import logging

import pytest

from iserblk.commands.command import Command, PlainCommand
from iserblk.disk.lun.sizing import Sizing
from iserblk.errors import ScsiError
from iserblk.scsi import luns
from iserblk.scsi.sense import ILLEGAL_REQUEST, UNIT_ATTENTION, encode_fixed
from tests.disk.fake_lun import FakeLun, FakeLuns, finish

CHANGED = encode_fixed(UNIT_ATTENTION, 0x2A, 0x09)
REFUSED = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
LUN = luns.encode(0)


def told(sense: bytes) -> Command:
    """A command that has ended with this sense data."""
    slot = PlainCommand(0)
    slot.sense = sense
    return slot


def ask(sizing: Sizing, session: FakeLuns, block: int = 512, long_cdbs: bool = True) -> int:
    operation = sizing.ask(session, LUN, block, long_cdbs, 0.0)  # type: ignore[arg-type]
    return finish(operation)[0]


@pytest.mark.parametrize(
    ("sense", "changed"),
    [
        (CHANGED, True),
        (encode_fixed(UNIT_ATTENTION, 0x2A, 0x01), False),  # mode parameters
        (encode_fixed(ILLEGAL_REQUEST, 0x2A, 0x09), False),  # no unit attention
        (b"", False),
    ],
)
def test_only_a_capacity_that_has_changed_is_heard(sense: bytes, changed: bool) -> None:
    sizing = Sizing("lun0", 1 << 20)
    sizing.hear(told(sense))
    assert sizing.changed is changed


def test_what_was_heard_stays_until_the_target_is_asked() -> None:
    sizing = Sizing("lun0", 1 << 20)
    sizing.hear(told(CHANGED))
    sizing.hear(told(encode_fixed(UNIT_ATTENTION, 0x29, 0x00)))
    assert sizing.changed
    assert ask(sizing, FakeLuns()) == 2048 * 512
    assert not sizing.changed


@pytest.mark.parametrize(
    ("long_cdbs", "command"), [(True, "READ CAPACITY(16)"), (False, "READ CAPACITY(10)")]
)
def test_the_command_fits_the_lun(long_cdbs: bool, command: str) -> None:
    session = FakeLuns(FakeLun(blocks=1000, block=4096))
    assert ask(Sizing("lun0", 0), session, 4096, long_cdbs) == 1000 * 4096
    assert session.asked == [(0, command)]
    assert session.busy == 0


@pytest.mark.parametrize("before", [True, False])
def test_an_error_leaves_things_as_they_were(before: bool) -> None:
    sizing = Sizing("lun0", 1 << 20)
    sizing.changed = before
    with pytest.raises(ScsiError):
        ask(sizing, FakeLuns(FakeLun(errors={"READ CAPACITY(16)": REFUSED})))
    assert sizing.changed is before


def test_another_change_while_the_target_is_asked_is_not_lost() -> None:
    """The answer may be older than the report, so the disk has to ask again."""
    sizing = Sizing("lun0", 1 << 20)
    session = FakeLuns()
    sizing.changed = True
    submit = session.submit

    def report_first(slot: Command) -> None:
        sizing.hear(told(CHANGED))
        submit(slot)

    session.submit = report_first  # type: ignore[method-assign]
    ask(sizing, session)
    assert sizing.changed


def test_growth_is_told_and_shrinking_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sizing = Sizing("lun0", 4096)
    sizing.take(4096)
    assert not caplog.records
    sizing.take(8192)
    sizing.take(2048)
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.ERROR]
    for record, sizes in zip(caplog.records, (("4096", "8192"), ("8192", "2048")), strict=True):
        assert all(word in record.getMessage() for word in ("lun0", *sizes))


def test_words_tell_the_largest_size_where_it_shrank(caplog: pytest.LogCaptureFixture) -> None:
    sizing = Sizing("lun0", 4096)
    assert sizing.words() == "4096 bytes"
    sizing.take(8192)
    assert sizing.words() == "8192 bytes"
    sizing.take(1024)
    sizing.take(2048)
    assert sizing.words().startswith("2048 bytes") and "8192" in sizing.words()
    sizing.take(8192)
    assert sizing.words() == "8192 bytes"
    assert "SHRUNK" in caplog.text


def test_a_lun_that_has_become_too_large_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    """READ CAPACITY(10) can tell less than 2^32 blocks. What was known goes on being used."""
    sizing = Sizing("lun0", 1 << 20)
    session = FakeLuns(FakeLun(blocks=1 << 33))
    for _ in range(3):
        sizing.hear(told(CHANGED))
        assert ask(sizing, session, long_cdbs=False) == 1 << 20
        assert not sizing.changed
    assert len(caplog.records) == 1 and "READ CAPACITY(16)" in caplog.text
