"""Our target on software iWARP, and the kernel's ib_iser on siw."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.lab.guest import kernel_initiator as kernel
from tests.support.interop import Record

TREE = Path(__file__).parents[2] / "scsi"  # any directory with some files


# shows: SYSTEM-2, SYSTEM-13, SYSTEM-37, SYSTEM-53
@pytest.mark.parametrize(
    ("immediate", "initial_r2t"), [("Yes", "No"), pytest.param("No", "Yes", marks=pytest.mark.long)]
)
def test_a_disk_of_the_kernel(
    immediate: str, initial_r2t: str, tmp_path: Path, record: Record
) -> None:
    listen = os.environ["LAB_LISTEN"]
    file = tmp_path / "disk"
    with open(file, "wb") as whole:
        whole.truncate(160 << 20)
    settings = {
        "node.session.iscsi.ImmediateData": immediate,
        "node.session.iscsi.InitialR2T": initial_r2t,
        "node.session.iscsi.FirstBurstLength": "65536",
    }
    with kernel.our_target(file, listen, namespace=os.environ["LAB_NETNS"]):
        with kernel.logged_in(listen, settings) as device:
            keys = kernel.negotiated()
            assert (keys["ImmediateData"], keys["InitialR2T"]) == (immediate, initial_r2t)
            kernel.fio_verify(device, "8m", "--loops=1")
            kernel.file_system(device, tmp_path / "mnt", TREE)
            data = random.Random(1).randbytes(1 << 20)
            (tmp_path / "data").write_bytes(data)
            kernel.run("dd", f"if={tmp_path / 'data'}", f"of={device}", "bs=1M", "seek=150",
                       "oflag=direct", "conv=fsync")  # fmt: skip
        with open(file, "rb") as whole:
            whole.seek(150 << 20)
            assert whole.read(len(data)) == data
    record(
        ours="target, software iWARP",
        peer="ib_iser with open-iscsi, on siw",
        transport="iWARP, CRC off",
        ran="login, fio verify, mkfs.ext4, files compared after a new mount, fsck, logout; "
        f"ImmediateData={immediate}, InitialR2T={initial_r2t}",
    )
