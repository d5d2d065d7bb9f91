"""What a LUN is asked after login, and what its errors mean."""

from __future__ import annotations

import pytest

from iserblk.disk import resume
from iserblk.disk.lun.identify import identify
from iserblk.errors import IserblkError, LunChanged, ScsiError
from iserblk.initiator.session.session import Session
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
