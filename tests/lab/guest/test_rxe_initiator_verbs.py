"""Our target on a verbs device (Soft-RoCE): the kernel's ib_iser and libiscsi as its initiators."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.lab.guest import kernel_initiator as kernel
from tests.lab.guest.test_siw_initiator import TREE
from tests.support.interop import Record

MIB = 1 << 20


# shows: SYSTEM-2, SYSTEM-11, SYSTEM-16, SYSTEM-53
@pytest.mark.parametrize(
    ("immediate", "initial_r2t"), [("Yes", "No"), pytest.param("No", "Yes", marks=pytest.mark.long)]
)
def test_a_disk_of_the_kernel(
    immediate: str, initial_r2t: str, tmp_path: Path, record: Record
) -> None:
    listen = os.environ["LAB_LISTEN"]
    file = tmp_path / "disk"
    with open(file, "wb") as whole:
        whole.truncate(160 * MIB)
    settings = {
        "node.session.iscsi.ImmediateData": immediate,
        "node.session.iscsi.InitialR2T": initial_r2t,
        "node.session.iscsi.FirstBurstLength": "65536",
    }
    with (
        kernel.our_target(file, listen, "--rcap", "verbs"),
        kernel.logged_in(listen, settings) as device,
    ):
        keys = kernel.negotiated()
        assert (keys["ImmediateData"], keys["InitialR2T"]) == (immediate, initial_r2t)
        kernel.fio_verify(device, "8m")
        kernel.file_system(device, tmp_path / "mnt", TREE)
    record(
        ours="target, pyverbs",
        peer="ib_iser with open-iscsi, on rxe",
        transport="RoCE v2",
        ran="login, fio verify, mkfs.ext4, files compared after a new mount, fsck, logout; "
        f"ImmediateData={immediate}, InitialR2T={initial_r2t}",
    )


# shows: SYSTEM-7, SYSTEM-11, SYSTEM-53
def test_libiscsi_s_tools(tmp_path: Path, record: Record) -> None:
    listen = os.environ["LAB_LISTEN"]
    file = tmp_path / "disk"
    with open(file, "wb") as whole:
        whole.truncate(48 * MIB)
    with kernel.our_target(file, listen, "--rcap", "verbs") as url:
        inquiry = kernel.run("iscsi-inq", f"{url}/0")
        assert "DIRECT_ACCESS" in inquiry and re.search(
            r"Vendor:\s*iserblk", inquiry, re.IGNORECASE
        )
        capacity = kernel.run("iscsi-readcapacity16", f"{url}/0")
        assert re.search(rf"Total size:\s*{48 * MIB}\b", capacity), capacity
        listed = discovered(listen)
        assert f"Target:{kernel.IQN} Portal:{listen}:3260,1" in listed, listed
        assert re.search(r"^Lun:0\s+Type:DIRECT_ACCESS", listed, re.MULTILINE), listed
    version = kernel.run("dpkg-query", "-W", "-f", "${Version}", "libiscsi-bin")
    record(
        ours="target, pyverbs",
        peer="libiscsi (iser://) on rxe",
        version=f"libiscsi {version}",
        transport="RoCE v2",
        ran="iscsi-inq, iscsi-readcapacity16, iscsi-ls -s (discovery; libiscsi crashes when it is "
        "over, with every target, and looks at LUNs over TCP)",
    )


def discovered(listen: str) -> str:
    """The output of iscsi-ls for a discovery session over iSER.

    libiscsi 1.19 crashes at the end of the session, with LIO and tgtd as with our target: the tool
    disconnects in the callback of its Logout, which destroys the completion queue that its caller,
    cq_event_handler, goes on to poll. Mostly it crashes; once it never ended. So the tool must
    write its lines as they come, and only they are checked. It looks at LUNs in another session,
    which is over TCP whatever the URL says.
    """
    try:
        done = subprocess.run(
            ["stdbuf", "-oL", "iscsi-ls", "-d", "-s", f"iscsi://{listen}:3260/?iser"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=kernel.SLOW_S,
        )
    except subprocess.TimeoutExpired as hung:
        said = hung.stdout or b""
        return said if isinstance(said, str) else said.decode()
    assert done.returncode in (0, -signal.SIGSEGV), done
    return done.stdout
