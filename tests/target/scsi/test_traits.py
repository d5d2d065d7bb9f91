"""Which commands a unit lacks, by what its medium can do."""

from __future__ import annotations

import pytest

from iserblk.scsi import opcodes
from iserblk.scsi.inquiry import Provisioning
from iserblk.target.scsi.traits import Traits

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
