"""What is checked and repaired on a fresh connection before a LUN is used through it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from iserblk.commands.command import Operation
from iserblk.disk import resume
from iserblk.disk.lun import refusals
from iserblk.disk.lun.operations import DiskCore
from iserblk.errors import (
    LunChanged,
    NoSuchLun,
    ReservationLost,
    TransportError,
    WriteProtected,
)
from iserblk.initiator.session.session import Session
from iserblk.scsi import inquiry, mode, opcodes
from iserblk.scsi.sense import ILLEGAL_REQUEST, UNIT_ATTENTION, Sense, encode_fixed
from tests.disk.fake_lun import FakeLun, FakeLuns, finish, known
from tests.disk.fake_target import DEFERRED
from tests.support import logs

PREEMPTED = 0x2A05  # additional sense code and qualifier
NAMES = {"INQUIRY", "TEST UNIT READY", "VPD 00", "VPD 80", "VPD 83"}


def session_of(fake: FakeLuns) -> Session:
    return fake  # type: ignore[return-value]


def check(core: DiskCore, fresh: FakeLuns) -> None:
    finish(resume.check_identity(core, session_of(fresh)))


class Reservation:
    """Stands in for the reservation of a disk. ``asked_before``: commands before its turn."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.asked_before: list[str] = []

    def is_doubted_by(self, sense: Sense) -> bool:
        return sense.code == PREEMPTED

    def resume(self, fresh: Session, lun: bytes) -> Operation[None]:
        assert isinstance(fresh, FakeLuns)
        self.asked_before = [what for _, what in fresh.asked]
        if self.error is not None:
            raise self.error
        yield 0.0


@pytest.fixture
def core() -> DiskCore:
    return known(FakeLuns())


def test_the_same_lun_may_have_another_size_and_other_limits(core: DiskCore) -> None:
    """What is the disk's own (its name, URL and paths) stays."""
    core.rename("backup")
    core.info = replace(core.info, paths=({"portal": "a"},))
    check(core, FakeLuns(FakeLun(blocks=4096)))
    assert core.size == core.info.size == 4096 * 512
    assert (core.info.name, core.info.url) == ("backup", "iser://portal/iqn/0")
    assert core.info.paths == ({"portal": "a"},)


@pytest.mark.logs("refused")
def test_a_lun_of_which_not_all_is_used_has_the_size_that_it_told(core: DiskCore) -> None:
    """Found through another portal, a LUN without a world-wide identifier must have that size."""
    core.refusals.lacks(refusals.LONG_TRANSFERS, "refused")
    large = FakeLun(blocks=(1 << 32) + 8)
    check(core, FakeLuns(large))
    core.elsewhere = True
    check(core, FakeLuns(large))
    assert core.size == (1 << 32) * 512
    with pytest.raises(LunChanged, match="perhaps another LUN"):
        check(core, FakeLuns(FakeLun(blocks=1 << 32)))


LARGE = inquiry.BlockLimits(
    max_transfer_length=2048,
    max_unmap_lba_count=8192,
    max_unmap_descriptor_count=1,
    max_write_same_length=4096,
)
SMALL = inquiry.BlockLimits(
    max_transfer_length=64,
    max_unmap_lba_count=128,
    max_unmap_descriptor_count=1,
    max_write_same_length=32,
)


@dataclass
class Limited(FakeLun):
    """A LUN that tells its limits and modes."""

    limits: inquiry.BlockLimits = LARGE
    read_only: bool = False
    wce: bool = False
    thin: bool = True

    def answer(self, cdb: bytearray) -> tuple[str, bytes]:
        if cdb[0] == opcodes.INQUIRY and cdb[1] & 1 and cdb[2] in (0, 0xB0, 0xB2):
            pages = {
                0: inquiry.encode_supported_pages([0, 0x80, 0x83, 0xB0, 0xB2]),
                0xB0: inquiry.encode_block_limits(self.limits),
                0xB2: inquiry.encode_provisioning(
                    inquiry.Provisioning(self.thin, self.thin, self.thin, self.thin), 0
                ),
            }
            return f"VPD {cdb[2]:02x}", pages[cdb[2]]
        if cdb[0] == opcodes.MODE_SENSE_6:
            specific = (mode.WP if self.read_only else 0) | mode.DPOFUA
            return "MODE SENSE", mode.encode_sense6(specific, b"", mode.caching_page(self.wce))
        return super().answer(cdb)


def test_all_that_the_lun_says_now_is_taken_over() -> None:
    """It may be another controller's answer, or the LUN was set up anew meanwhile."""
    core = known(FakeLuns(Limited()))
    assert core.info.can_trim and core.info.fua and not core.info.write_cache
    assert not core.durability.volatile
    check(core, FakeLuns(Limited(limits=SMALL, read_only=True, wce=True)))
    info, geometry = core.info, core.geometry
    assert core.max_transfer == info.max_transfer == 64 * 512
    assert (geometry.max_unmap_blocks, geometry.max_write_same_blocks) == (128, 32)
    assert info.read_only and info.write_cache and core.durability.volatile
    with pytest.raises(WriteProtected):
        core.check_write(0, 512)
    check(core, FakeLuns(Limited(thin=False)))
    assert core.geometry.max_unmap_blocks == 8192
    assert not core.info.read_only and not core.info.zero_by_unmap and not core.info.write_cache
    assert core.durability.volatile  # what was written in between may be in a cache


def test_a_lun_that_cannot_be_used_now_may_be_usable_later(core: DiskCore) -> None:
    """A target that has just started may tell a block length of 0."""
    with pytest.raises(TransportError, match="a block length of 520") as raised:
        check(core, FakeLuns(FakeLun(block=520)))
    assert not isinstance(raised.value, LunChanged)
    check(core, FakeLuns())


def test_another_lun_is_refused_by_its_serial_number(core: DiskCore) -> None:
    before = core.info
    with pytest.raises(LunChanged) as raised:
        check(core, FakeLuns(FakeLun(serial="S2", blocks=4096)))
    assert all(word in str(raised.value) for word in (core.info.url, "S1", "S2"))
    assert core.info is before and core.size == 2048 * 512


def test_blocks_of_another_size_are_another_lun(core: DiskCore) -> None:
    """All that the disk has cached and journalled is in blocks of the old size."""
    before = core.info
    with pytest.raises(LunChanged) as raised:
        check(core, FakeLuns(FakeLun(blocks=256, block=4096)))
    assert all(word in str(raised.value) for word in (core.info.url, "512", "4096"))
    assert core.info is before


class Tape(FakeLun):
    def answer(self, cdb: bytearray) -> tuple[str, bytes]:
        if cdb[0] == opcodes.INQUIRY and not cdb[1] & 1:
            return "INQUIRY", inquiry.encode_standard(1, "Vendor", "Product", "1")
        return super().answer(cdb)


def test_a_lun_that_is_no_disk_any_more(core: DiskCore) -> None:
    with pytest.raises(LunChanged) as raised:
        check(core, FakeLuns(Tape()))
    assert core.info.url in str(raised.value)


def test_a_lun_that_is_not_there_may_come_back(core: DiskCore) -> None:
    """The reconnector tries again, so this is not LunChanged."""
    fresh = FakeLuns()
    del fresh.luns[0]
    with pytest.raises(NoSuchLun) as raised:
        check(core, fresh)
    assert not isinstance(raised.value, LunChanged)


@pytest.mark.parametrize("serial", ["S1", "S2"])
def test_a_reserved_lun_is_asked_for_no_more_than_its_names(core: DiskCore, serial: str) -> None:
    """A nexus that is not registered gets RESERVATION CONFLICT for the rest."""
    core.reservation = Reservation()  # type: ignore[assignment]
    fresh = FakeLuns(FakeLun(serial=serial, blocks=4096))
    if serial == "S1":
        check(core, fresh)
    else:
        with pytest.raises(LunChanged):
            check(core, fresh)
    assert {what for _, what in fresh.asked} == NAMES
    assert core.size == 2048 * 512


def test_behind_its_reservation_the_whole_lun_is_looked_at(core: DiskCore) -> None:
    reservation = Reservation()
    core.reservation = reservation  # type: ignore[assignment]
    fresh = FakeLuns(FakeLun(blocks=4096))
    finish(resume.check_reservation(core, session_of(fresh)))
    assert not reservation.asked_before
    assert core.size == 4096 * 512


@pytest.mark.parametrize(
    ("command", "code", "cut"),
    [
        ("TEST UNIT READY", PREEMPTED, False),  # before its turn: it is looked at in any case
        ("READ CAPACITY(16)", PREEMPTED, True),
        ("READ CAPACITY(16)", 0x2A06, False),
    ],
)
def test_a_reservation_that_is_taken_behind_its_turn_ends_the_attempt(
    core: DiskCore, replays: list[list[str]], command: str, code: int, cut: bool
) -> None:
    """The journal must not go over what its new holder writes; and the next attempt finds out
    whether that host has let go of the LUN again."""
    report = encode_fixed(UNIT_ATTENTION, code >> 8, code & 0xFF)
    core.reservation = Reservation()  # type: ignore[assignment]
    fresh = FakeLuns(FakeLun(errors={command: [report]}))
    finish(resume.resume(core, session_of(fresh)))
    assert fresh.disconnected is cut
    # The next attempt begins anew.
    fresh = FakeLuns(FakeLun(errors={"TEST UNIT READY": [report]}))
    finish(resume.resume(core, session_of(fresh)))
    assert not fresh.disconnected


def test_a_lost_reservation_leaves_the_disk_as_it_was(core: DiskCore) -> None:
    core.reservation = Reservation(ReservationLost("lun0: it is another's"))  # type: ignore[assignment]
    fresh = FakeLuns(FakeLun(blocks=4096))
    with pytest.raises(ReservationLost):
        finish(resume.check_reservation(core, session_of(fresh)))
    assert core.size == 2048 * 512 and not fresh.asked


def test_without_a_reservation_that_step_asks_nothing(core: DiskCore) -> None:
    fresh = FakeLuns()
    finish(resume.check_reservation(core, session_of(fresh)))
    assert not fresh.asked


@pytest.fixture
def replays(core: DiskCore, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What was asked before each replay of the journal."""
    found: list[list[str]] = []

    def replay(self: DiskCore, fresh: Session) -> Iterator[float]:
        assert isinstance(fresh, FakeLuns)
        found.append([what for _, what in fresh.asked])
        yield 0.0

    monkeypatch.setattr(DiskCore, "replay", replay)
    return found


def test_the_journal_is_sent_behind_all_checks(core: DiskCore, replays: list[list[str]]) -> None:
    reservation = Reservation()
    core.reservation = reservation  # type: ignore[assignment]
    fresh = FakeLuns()
    finish(resume.resume(core, session_of(fresh)))
    assert set(reservation.asked_before) == NAMES
    assert replays == [[what for _, what in fresh.asked]]
    assert "READ CAPACITY(16)" in replays[0]


def test_nothing_is_sent_to_another_lun(core: DiskCore, replays: list[list[str]]) -> None:
    with pytest.raises(LunChanged):
        finish(resume.resume(core, session_of(FakeLuns(FakeLun(serial="S2")))))
    assert not replays


@pytest.mark.logs("another LUN is there now")
def test_a_lun_that_is_another_for_good_does_not_hold_up_the_others(
    replays: list[list[str]],
) -> None:
    """It is asked nothing any more, and the other LUNs of its session go on."""
    old, fresh = FakeLuns(), FakeLuns()
    for session in (old, fresh):
        session.luns[5] = FakeLun(serial="S5")
    cores = [known(old), known(old, 5)]
    for session in (old, fresh):
        session.luns[0] = FakeLun(serial="S2")
    cores[0].identity.suspect("it may be another")
    with pytest.raises(LunChanged):
        finish(cores[0].identity.reassure(cores[0].deadline()))
    finish(resume.resume_all(cores, session_of(fresh)))
    assert {number for number, _ in fresh.asked} == {5} and len(replays) == 1


@pytest.mark.logs(logs.LOST_WRITES)
def test_the_first_commands_may_tell_of_a_loss(replays: list[list[str]]) -> None:
    """A deferred error comes once on the fresh connection, so the disk must listen in time."""
    refused = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
    core = known(FakeLuns(FakeLun(errors={"MODE SENSE": refused})))
    core.keep_journal(4096)
    fresh = FakeLuns(FakeLun(errors={"TEST UNIT READY": [DEFERRED]}))
    finish(resume.resume(core, session_of(fresh)))
    assert core.durability.losses.count == 1 and len(replays) == 1


def test_all_luns_of_a_session_are_resumed_in_order(replays: list[list[str]]) -> None:
    old, fresh = FakeLuns(), FakeLuns()
    for session in (old, fresh):
        session.luns[5] = FakeLun(serial="S5")
    cores = [known(old), known(old, 5)]
    finish(resume.resume_all(cores, session_of(fresh)))
    numbers = [number for number, _ in fresh.asked]
    assert set(numbers) == {0, 5} and numbers == sorted(numbers)
    assert len(replays) == 2


@pytest.mark.logs(logs.LOST_WRITES)
@pytest.mark.parametrize("journal", [0, 4096])
def test_a_lun_that_was_gone_while_its_session_was_reinstated(journal: int) -> None:
    """The target may have lost its cache in that time. When the LUN is back, what was not flushed
    is sent again before anything else, or the loss is told."""
    refused = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
    session = FakeLuns(FakeLun(errors={"MODE SENSE": refused}))  # so it may have a cache
    core = known(session)
    if journal:
        core.keep_journal(journal)
    core.durability.wrote()
    there = session.luns.pop(0)
    core.identity.suspect("it may be gone")
    with pytest.raises(NoSuchLun):
        finish(core.identity.reassure(core.deadline()))
    session.suspended_at = 1.0
    fresh = FakeLuns()
    del fresh.luns[0]
    finish(resume.resume(core, session_of(fresh)))
    durability = core.durability
    assert (durability.replay_needed, durability.losses.count) == (bool(journal), int(not journal))
    session.luns[0] = there
    operation = core.identity.reassure(core.deadline())
    if journal:
        assert isinstance(next(operation), float)
        assert session.disconnected and core.identity.in_doubt
        finish(resume.resume(core, session_of(FakeLuns())))
    finish(operation)
    assert not core.identity.in_doubt and not durability.replay_needed
    assert durability.unflushed and session.disconnected is bool(journal)


def test_each_login_has_the_journal_sent_again() -> None:
    """The target may lose its cache between two logins, too, before the session uses the first."""
    refused = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
    core = known(FakeLuns(FakeLun(errors={"MODE SENSE": refused})))
    core.keep_journal(4096)
    durability = core.durability
    durability.wrote()
    for _ in range(2):
        durability.reinstated(1.0)
        assert durability.replay_needed
        durability.replayed(durability.begin_replay())
        assert not durability.replay_needed


@pytest.mark.logs(logs.LOST_WRITES, r"may have (failed a|lost what an earlier) flush")
def test_a_doubt_that_has_become_a_loss_is_one_no_more() -> None:
    """The journal has not everything any more: else each later flush would lose something."""
    refused = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
    core = known(FakeLuns(FakeLun(errors={"MODE SENSE": refused})))
    core.keep_journal(4096)
    durability = core.durability
    durability.wrote()
    token = durability.begin_flush()
    durability.doubt(None, "may have failed a flush", tell=True)
    durability.end_flush(token, False)
    durability.bypass()
    assert not durability.renew() and durability.losses.count == 1
    assert not durability.renew() and durability.losses.count == 1
