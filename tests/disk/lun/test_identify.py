"""What a LUN is asked after login, and what its errors mean."""

from __future__ import annotations

import pytest

from iserblk.disk import resume
from iserblk.disk.lun.identify import identify
from iserblk.errors import IserblkError, LunChanged, ScsiError, UnusableLun
from iserblk.initiator.session.session import Session
from iserblk.scsi import lba, luns, mode
from iserblk.scsi.sense import HARDWARE_ERROR, ILLEGAL_REQUEST, NOT_READY, encode_fixed
from tests.disk.fake_lun import FakeLun, FakeLuns, finish, known

INVALID_FIELD = encode_fixed(ILLEGAL_REQUEST, 0x24, 0x00)
NOT_THERE = [INVALID_FIELD, encode_fixed(ILLEGAL_REQUEST, 0x20, 0x00)]
# What a target may say for a while: INTERNAL TARGET FAILURE, LOGICAL UNIT NOT READY for no reason
# that it tells, SYSTEM RESOURCE FAILURE, and a busy array's COMMAND SEQUENCE ERROR.
PASSING = [
    encode_fixed(HARDWARE_ERROR, 0x44, 0x00),
    encode_fixed(NOT_READY, 0x04, 0x00),
    encode_fixed(ILLEGAL_REQUEST, 0x55, 0x00),
    encode_fixed(ILLEGAL_REQUEST, 0x2C, 0x00),
]
OPTIONAL = ["VPD 00", "VPD 80", "VPD 83", "READ CAPACITY(16)", "MODE SENSE", "GET LBA STATUS"]


@pytest.mark.parametrize("refusal", NOT_THERE, ids=["field", "opcode"])
@pytest.mark.parametrize("what", OPTIONAL)
def test_what_a_lun_does_not_have_it_does_without(what: str, refusal: bytes) -> None:
    """LIO says that it is thinly provisioned, and refuses GET LBA STATUS (seen on Linux 6.1)."""
    session = FakeLuns(FakeLun(errors={what: refusal}))
    info = known(session).info
    assert info.size == 1 << 20
    assert info.can_extents is (what not in ("GET LBA STATUS", "READ CAPACITY(16)"))
    assert info.write_cache is (what == "MODE SENSE")  # a LUN that does not tell may have a cache
    assert bool(info.serial) is (what not in ("VPD 00", "VPD 80"))
    assert bool(info.identifiers) is (what not in ("VPD 00", "VPD 83"))


def test_all_of_it_can_be_asked_while_the_lun_is_in_doubt() -> None:
    """Else a LUN that may have been replaced could never be compared."""
    session = FakeLuns()
    session.doubt(luns.encode(0))
    assert known(session).info.serial == "S1" and session.doubted


LIO_NAA = bytes.fromhex("60014051234567890abcdef012345678")


@pytest.mark.parametrize(
    ("vendor", "naa", "fua"),
    [
        ("LIO-ORG", LIO_NAA, False),
        ("LIO-ORG", bytes(8), False),
        ("SYNOLOGY", LIO_NAA, False),
        ("Vendor", bytes.fromhex("600140612345678900000000abcdef01"), True),
    ],
)
def test_fua_of_lio_is_not_used(vendor: str, naa: bytes, fua: bool) -> None:
    """It says GOOD where the data are lost, and the next flush does, too (seen on Linux 6.1)."""
    lun = FakeLun(vendor=vendor, naa=naa, specific=mode.DPOFUA)
    assert known(FakeLuns(lun)).info.fua is fua


@pytest.mark.parametrize("error", PASSING, ids=["hardware", "not ready", "resources", "sequence"])
@pytest.mark.parametrize("what", OPTIONAL)
def test_an_error_that_passes_is_no_answer(what: str, error: bytes) -> None:
    """While reconnecting such an error means a later attempt, not another or a smaller LUN."""
    lun = FakeLun(blocks=1 << 33)
    core = known(FakeLuns(lun))
    assert core.size == 512 << 33
    before = core.info
    # As often as one attempt repeats the command by itself.
    lun.errors[what] = error
    fresh = FakeLuns(lun)
    with pytest.raises(ScsiError) as raised:
        _within(fresh, resume.check_identity(core, _session(fresh)))
    assert not isinstance(raised.value, LunChanged)
    assert core.info == before and core.size == 512 << 33
    del lun.errors[what]
    finish(resume.check_identity(core, _session(FakeLuns(lun))))
    assert core.info == before and core.size == 512 << 33


def test_a_refusal_without_sense_data_is_no_answer() -> None:
    session = FakeLuns(FakeLun(errors={"VPD 83": 0x30}))  # ACA ACTIVE
    with pytest.raises(ScsiError, match="ACA ACTIVE"):
        known(session)


@pytest.mark.parametrize("what", ["MODE SENSE", "GET LBA STATUS"])
def test_a_reserved_lun_that_does_not_tell_all(what: str) -> None:
    """tgtd refuses MODE SENSE to other initiators; the worst is assumed."""
    info = known(FakeLuns(FakeLun(errors={what: 0x18}))).info
    assert info.write_cache if what == "MODE SENSE" else not info.can_extents


def test_a_size_that_nothing_tells() -> None:
    """READ CAPACITY(10) at its maximum, and (16) refused: not a LUN of 2 TiB."""
    lun = FakeLun(blocks=1 << 33, errors={"READ CAPACITY(16)": NOT_THERE[1]})
    with pytest.raises(
        UnusableLun, match=r"iqn/0: lun0 has 2\^32 blocks or more: only READ"
    ) as raised:
        known(FakeLuns(lun))
    assert raised.value.exit_status == 27


@pytest.mark.parametrize("block", [256, 520, 4104, 1 << 17])
@pytest.mark.parametrize("short", [False, True])
def test_blocks_that_cannot_be_used(block: int, short: bool) -> None:
    errors: dict[str, bytes | int | list[bytes | int]] = {}
    if short:
        errors["READ CAPACITY(16)"] = NOT_THERE[1]
    with pytest.raises(UnusableLun, match=f"iqn/0: lun0 has a block length of {block} bytes"):
        known(FakeLuns(FakeLun(block=block, errors=errors)))


def test_a_capacity_that_cannot_be_used() -> None:
    with pytest.raises(UnusableLun, match=f"lun0 has {1 << 60} blocks of 512 bytes"):
        known(FakeLuns(FakeLun(blocks=1 << 60)))


class OtherBlocks(FakeLun):
    """As EqualLogic's: it counts blocks of 512 bytes, and has such of 4096."""

    def answer(self, cdb: bytearray) -> tuple[str, bytes]:
        what, data = super().answer(cdb)
        if what == "GET LBA STATUS":
            first = int.from_bytes(cdb[2:10], "big")
            data = lba.encode_lba_status([(first * 8, 8, 1)])
        return what, data


def test_status_in_other_blocks_is_found_out_at_once(caplog: pytest.LogCaptureFixture) -> None:
    info = known(FakeLuns(OtherBlocks(block=4096))).info
    assert not info.can_extents
    assert "all of the LUN counts as data" in caplog.text


@pytest.mark.parametrize("what", ["with", "without", "not at all"])
def test_whether_the_lun_tells_of_a_cache(what: str) -> None:
    """A LUN that does not tell may have one; but it need not know how to flush it."""

    class Lun(FakeLun):
        def answer(self, cdb: bytearray) -> tuple[str, bytes]:
            asked, data = super().answer(cdb)
            if asked == "MODE SENSE" and what == "without":
                data = mode.encode_sense6(0, b"", b"")
            return asked, data

    errors: dict[str, bytes | int | list[bytes | int]] = {}
    if what == "not at all":
        errors["MODE SENSE"] = NOT_THERE[0]
    core = known(FakeLuns(Lun(errors=errors)))
    assert core.geometry.tells_cache is (what == "with")
    assert core.info.write_cache is (what != "with")


def test_another_lun_is_found_out_as_ever() -> None:
    core = known(FakeLuns())
    with pytest.raises(LunChanged):
        finish(resume.check_identity(core, _session(FakeLuns(FakeLun(serial="S2")))))


def test_an_invalid_field_in_what_every_lun_has_is_an_error() -> None:
    session = FakeLuns(FakeLun(errors={"INQUIRY": INVALID_FIELD}))
    with pytest.raises(IserblkError):
        finish(identify(_session(session), 0, "lun0", "iser://portal/iqn/0", "iqn"))


def _session(fake: FakeLuns) -> Session:
    return fake  # type: ignore[return-value]


def _within(fake: FakeLuns, operation: object) -> object:
    """Run an operation whose session has little time to try anything again."""
    fake.io_timeout = 1.0
    return finish(operation)  # type: ignore[arg-type]
