"""The kernel's reservation calls on a LUN of our target, which is started again meanwhile: the
kernel asks for APTPL."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest

from iserblk.errors import ReservationConflict
from iserblk.scsi import reservations as pr
from tests.lab.guest import kernel_initiator as kernel
from tests.lab.guest.pr_calls import (
    CONFLICT,
    EXCLUSIVE_ACCESS_REG_ONLY,
    WRITE_EXCLUSIVE,
    Calls,
    calls,
)
from tests.support.interop import Record
from tests.support.sessions import host_of

MIB = 1 << 20
KEY, OTHER_KEY, NO_KEY = 0xA11CE, 0xB0B, 0xBAD
OTHER_NAME = "iqn.2026-11.lab:other"
NO_CHAP = {"node.session.auth.authmethod": "None"}


def url_at(listen: str) -> str:
    return f"iscsi://{listen}:3260/{kernel.IQN}/0"


async def keeps_out(listen: str) -> None:
    """The kernel holds an exclusive reservation, and the other host may neither read nor write."""
    async with host_of(url_at(listen), OTHER_NAME) as other:
        assert await other.keys() == [KEY]
        held = await other.held()
        assert held is not None
        assert (held.key, held.type) == (KEY, pr.EXCLUSIVE_ACCESS_REGISTRANTS)
        with pytest.raises(ReservationConflict):
            await other.write(b"o" * 512)
        with pytest.raises(ReservationConflict):
            await other.read()


def write_directly(device: Path, data: bytes, folder: Path) -> None:
    """Past the page cache, to the beginning of the device."""
    (folder / "data").write_bytes(data)
    kernel.run("dd", f"if={folder / 'data'}", f"of={device}", "bs=4096", "oflag=direct")


async def reserve_and_restart(
    device: Path, kernels: Calls, file: Path, target: ExitStack, listen: str
) -> None:
    assert kernels.register(0, KEY) == 0
    assert kernels.register(NO_KEY, KEY) == CONFLICT
    assert kernels.reserve(KEY, EXCLUSIVE_ACCESS_REG_ONLY) == 0
    await keeps_out(listen)
    write_directly(device, b"1" * 4096, file.parent)
    target.close()
    target.enter_context(kernel.our_target(file, listen))
    await keeps_out(listen)
    write_directly(device, b"2" * 4096, file.parent)  # when the kernel has logged in again
    await keeps_out(listen)
    assert kernels.release(KEY, EXCLUSIVE_ACCESS_REG_ONLY) == 0
    async with host_of(url_at(listen), OTHER_NAME) as other:
        assert await other.held() is None and await other.keys() == [KEY]
        assert (await other.read()) == b"2" * 512


async def preempt(kernels: Calls, listen: str, abort: bool) -> None:
    """The other host holds a reservation; the kernel takes it away."""
    async with host_of(url_at(listen), OTHER_NAME) as other:
        await other.out(pr.REGISTER, 0, OTHER_KEY)
        await other.out(pr.RESERVE, OTHER_KEY)
        assert kernels.reserve(KEY, WRITE_EXCLUSIVE) == CONFLICT
        assert kernels.preempt(KEY, OTHER_KEY, WRITE_EXCLUSIVE, abort) == 0
        assert await other.keys() == [KEY]
        held = await other.held()
        assert held is not None and (held.key, held.type) == (KEY, pr.WRITE_EXCLUSIVE)
        with pytest.raises(ReservationConflict):
            await other.write(b"o" * 512)
        assert (await other.read()) == b"2" * 512
    assert kernels.release(KEY, WRITE_EXCLUSIVE) == 0


# shows: SYSTEM-51
async def test_the_kernel_s_reservation_calls(tmp_path: Path, record: Record) -> None:
    listen = os.environ["LAB_LISTEN"]
    file = tmp_path / "disk"
    file.touch()
    os.truncate(file, 16 * MIB)
    with ExitStack() as target:
        target.enter_context(kernel.our_target(file, listen))
        with kernel.logged_in(listen, NO_CHAP, "default") as device, calls(device) as ours:
            await reserve_and_restart(device, ours, file, target, listen)
            for abort in (False, True):
                await preempt(ours, listen, abort)
            assert ours.clear(KEY) == 0
            async with host_of(url_at(listen), OTHER_NAME) as other:
                assert await other.keys() == []
                await other.write(b"o" * 512)
    record(
        ours="target",
        peer="iscsi_tcp with open-iscsi",
        transport="TCP",
        ran="the kernel's reservation calls (IOC_PR_REGISTER, RESERVE, RELEASE, PREEMPT, "
        "PREEMPT_ABORT, CLEAR; the kernel asks for APTPL), with conflicts; the reservation holds "
        "when the target has been started again",
    )
