"""Which commands a unit lacks, by what its medium can do."""

from __future__ import annotations

import pytest

from iserblk.scsi import cdb, opcodes
from iserblk.scsi.inquiry import Provisioning
from iserblk.scsi.sense import (
    DATA_PROTECT,
    ILLEGAL_REQUEST,
    INQUIRY_DATA_CHANGED,
    INVALID_FIELD_IN_CDB,
    INVALID_OPERATION_CODE,
    UNIT_ATTENTION,
    WRITE_PROTECTED,
)
from iserblk.target.scsi.device import DeviceServer, LogicalUnit
from iserblk.target.scsi.traits import Traits
from tests.target.fake_store import FakeStore
from tests.target.scsi_client import GOOD, IQN, Client

LBA_STATUS = opcodes.SERVICE_ACTION_IN_16 << 8 | opcodes.SA_GET_LBA_STATUS


def traits(*, unmaps: bool, lba_status: bool, reservable: bool, atomic: bool) -> Traits:
    return Traits(
        vendor="vendor",
        product="product",
        revision="1",
        designators=(),
        provisioning=Provisioning(lbpu=unmaps),
        granularity=0,
        alignment=0,
        physical_block=512,
        optimal_transfer=0,
        rotational=False,
        lba_status=lba_status,
        reservable=reservable,
        atomic=atomic,
    )


def test_a_medium_that_can_do_all_lacks_nothing() -> None:
    assert not traits(unmaps=True, lba_status=True, reservable=True, atomic=True).lacks()


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("unmaps", {opcodes.UNMAP}),
        ("lba_status", {LBA_STATUS}),
        (
            "reservable",
            {
                opcodes.RESERVE_6,
                opcodes.RELEASE_6,
                opcodes.PERSISTENT_RESERVE_IN,
                opcodes.PERSISTENT_RESERVE_OUT,
            },
        ),
        ("atomic", {opcodes.COMPARE_AND_WRITE, opcodes.XDWRITEREAD_10}),
    ],
)
def test_what_a_medium_cannot_do_is_no_command(name: str, lacks: set[int]) -> None:
    able = dict.fromkeys(("unmaps", "lba_status", "reservable", "atomic"), True)
    assert traits(**(able | {name: False})).lacks() == lacks


def test_a_unit_that_is_renewed_says_so_to_every_nexus() -> None:
    able = dict.fromkeys(("unmaps", "lba_status", "reservable", "atomic"), True)
    unit = LogicalUnit(FakeStore(1 << 20), serial="S0", traits=traits(**able))
    server = DeviceServer({0: unit}, IQN)
    one, other = Client(server), Client(server, name="iqn.2026-11.example:other")
    page = cdb.inquiry(255, 0xB2)
    assert one.run(page).data[5] & 0x80
    unit.renew(traits(**able), False)  # the same
    assert one.code(bytes(6)) == GOOD
    unit.renew(traits(**able | {"unmaps": False}), True)
    for client in (one, other):
        assert client.code(bytes(6)) == (UNIT_ATTENTION, INQUIRY_DATA_CHANGED)
        assert client.code(bytes(6)) == GOOD
        assert client.code(page) == (ILLEGAL_REQUEST, INVALID_FIELD_IN_CDB)  # not thin any more
        assert client.code(cdb.unmap(0)) == (ILLEGAL_REQUEST, INVALID_OPERATION_CODE)
        assert client.code(cdb.write_same16(0, 1, ndob=True)) == (DATA_PROTECT, WRITE_PROTECTED)
