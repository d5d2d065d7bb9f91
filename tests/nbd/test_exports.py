"""What clients are told of an export."""

from __future__ import annotations

from typing import cast

import pytest

from iserblk.disk.seam import DirectDisk
from iserblk.nbd import messages as nbd
from iserblk.nbd.exports import Export
from tests.nbd.conversation import export
from tests.support.fake_disk import AsyncFake, FakeDisk, lun_info

ALWAYS = nbd.HAS_FLAGS | nbd.SEND_FLUSH | nbd.SEND_FUA | nbd.CAN_MULTI_CONN | nbd.SEND_CACHE
CHANGES = nbd.SEND_TRIM | nbd.SEND_WRITE_ZEROES | nbd.SEND_FAST_ZERO


def test_flags_of_a_disk() -> None:
    assert export().flags(structured=False) == ALWAYS | CHANGES
    assert export().flags(structured=True) == ALWAYS | CHANGES | nbd.SEND_DF
    assert export(rotational=True).flags(structured=False) == ALWAYS | CHANGES | nbd.ROTATIONAL
    assert export(can_trim=False).flags(structured=False) == ALWAYS | CHANGES & ~nbd.SEND_TRIM
    # Zeroes can be written to any disk.
    assert export(can_zero=False).flags(structured=False) == ALWAYS | CHANGES


@pytest.mark.parametrize("can_zero", [False, True])
def test_the_kernel_writes_zeroes_itself_where_data_would_have_to_move(can_zero: bool) -> None:
    """It gives a server up that takes long over a request, which may be for 4 GiB."""
    disk = AsyncFake(FakeDisk(lun_info(0, can_zero=can_zero)))
    each = Export("x", cast(DirectDisk, disk), patient=False)
    zeroes = nbd.SEND_WRITE_ZEROES | nbd.SEND_FAST_ZERO
    assert each.flags(structured=False) == ALWAYS | CHANGES & ~(0 if can_zero else zeroes)


@pytest.mark.parametrize(("server", "lun"), [(True, False), (False, True), (True, True)])
def test_what_is_read_only_offers_no_changes(server: bool, lun: bool) -> None:
    """Also where only the LUN itself is."""
    disk = AsyncFake(FakeDisk(lun_info(0, read_only=lun)))
    each = Export("x", cast(DirectDisk, disk), read_only=server)
    assert each.read_only
    assert each.flags(structured=False) == ALWAYS | nbd.READ_ONLY
    assert each.flags(structured=True) == ALWAYS | nbd.READ_ONLY | nbd.SEND_DF


@pytest.mark.parametrize(
    ("physical", "preferred"),
    [
        (512, 4096),
        (4096, 4096),
        (65536, 65536),
        (12288, 4096),
        (64 << 20, 4096),
        (32 << 20, 32 << 20),
    ],
)
def test_block_sizes_keep_to_the_protocol(physical: int, preferred: int) -> None:
    """Section "Size constraints": a power of two, at least 512, at most the largest payload."""
    each = export(physical_block_size=physical)
    assert (each.minimum, each.preferred) == (1, preferred)


def test_the_size_is_that_of_the_disk_now() -> None:
    fake = AsyncFake(FakeDisk(lun_info(0, size=4096)))
    each = Export("x", cast(DirectDisk, fake))
    assert each.size == 4096
    fake.info = lun_info(0, size=8192)
    assert each.size == 8192


def test_its_description_says_which_lun_it_is() -> None:
    assert export().description == "iserblk fake, iqn.2026-11.example:fake LUN 0"


def test_who_comes_later_is_told_what_the_lun_is_then() -> None:
    """It may have refused trims, or have become read-only, since the export was made."""
    fake = AsyncFake(FakeDisk(lun_info(0)))
    each = Export("x", cast(DirectDisk, fake))
    assert each.flags(structured=False) == ALWAYS | CHANGES
    fake.info = lun_info(0, can_trim=False)
    assert each.flags(structured=False) == ALWAYS | CHANGES & ~nbd.SEND_TRIM
    fake.info = lun_info(0, read_only=True)
    assert each.read_only and each.flags(structured=False) == ALWAYS | nbd.READ_ONLY
