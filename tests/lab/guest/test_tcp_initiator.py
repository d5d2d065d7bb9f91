"""Our target, and the kernel's iscsi_tcp with open-iscsi, with CHAP and digests."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from iserblk.iscsi import bhs
from tests.lab.guest import kernel_initiator as kernel
from tests.lab.guest.test_siw_initiator import TREE
from tests.support.faults.behaviours import Item, Plain
from tests.support.faults.framing import Unit
from tests.support.faults.proxy import FaultProxy
from tests.support.interop import Record

MIB = 1 << 20
OWN, THEIRS = ("host", "hush-hush-hush"), ("disk", "not-a-word-more")


def chap_of_the_target(folder: Path, chap: str) -> list[str]:
    """The CHAP options of ``iserblk target``."""
    options = []
    for option, name, text in (
        ("--chap-accounts", "accounts", ":".join(OWN)),
        ("--chap-secret-file", "secret", THEIRS[1]),
    ):
        file = folder / name
        file.write_text(text + "\n")
        file.chmod(0o600)
        options += [option, str(file)]
    return [] if chap == "none" else [*options, "--chap-user", THEIRS[0]]


def chap_of_the_kernel(chap: str) -> dict[str, str]:
    auth = "node.session.auth"
    settings = {f"{auth}.authmethod": "None" if chap == "none" else "CHAP"}
    if chap != "none":
        settings |= {f"{auth}.username": OWN[0], f"{auth}.password": OWN[1]}
    if chap == "mutual":
        settings |= {f"{auth}.username_in": THEIRS[0], f"{auth}.password_in": THEIRS[1]}
    return settings


# shows: SYSTEM-37, SYSTEM-45, SYSTEM-51
@pytest.mark.parametrize(
    ("chap", "digest", "immediate"), [("one-way", "None", "Yes"), ("mutual", "CRC32C", "No")]
)
def test_a_disk_of_the_kernel(
    tmp_path: Path, record: Record, chap: str, digest: str, immediate: str
) -> None:
    listen = os.environ["LAB_LISTEN"]
    file = tmp_path / "disk"
    with open(file, "wb") as whole:
        whole.truncate(160 * MIB)
    initial_r2t = "No" if immediate == "Yes" else "Yes"
    settings = {
        "node.session.iscsi.ImmediateData": immediate,
        "node.session.iscsi.InitialR2T": initial_r2t,
        "node.conn[0].iscsi.HeaderDigest": digest,
        "node.conn[0].iscsi.DataDigest": digest,
        **chap_of_the_kernel(chap),
    }
    with kernel.our_target(file, listen, *chap_of_the_target(tmp_path, chap)):
        with kernel.logged_in(listen, settings, "default") as device:
            keys = kernel.negotiated()
            assert (keys["ImmediateData"], keys["InitialR2T"]) == (immediate, initial_r2t)
            assert (keys["HeaderDigest"], keys["DataDigest"]) == (digest, digest)
            kernel.fio_verify(device, "8m")
            kernel.file_system(device, tmp_path / "mnt", TREE)
            data = random.Random(1).randbytes(MIB)
            (tmp_path / "data").write_bytes(data)
            kernel.run("dd", f"if={tmp_path / 'data'}", f"of={device}", "bs=1M", "seek=150",
                       "oflag=direct", "conv=fsync")  # fmt: skip
        with open(file, "rb") as whole:
            whole.seek(150 * MIB)
            assert whole.read(len(data)) == data
    record(
        ours="target",
        peer="iscsi_tcp with open-iscsi",
        transport=f"TCP, digests {digest}, CHAP {chap}",
        ran="login, fio verify, mkfs.ext4, files compared after a new mount, fsck, logout; "
        f"ImmediateData={immediate}, InitialR2T={initial_r2t}",
    )


class LoginKeys(Plain):
    """Keeps the keys of the login PDUs that pass. ``keys``: the last value of each."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def unit(self, unit: Unit) -> Iterable[Item]:
        if unit.opcode in (bhs.LOGIN_REQUEST, bhs.LOGIN_RESPONSE):
            data = bhs.data_segment_untrusted(memoryview(unit.data), 0)
            pairs = (pair.partition("=") for pair in bytes(data).decode().split("\0") if pair)
            self.keys.update((key, value) for key, _, value in pairs)
        return [unit]


def test_open_iscsi_has_one_connection_at_level_0(tmp_path: Path, record: Record) -> None:
    """Whatever its node record says, and whatever the target would agree to."""
    listen = os.environ["LAB_LISTEN"]
    file = tmp_path / "disk"
    with open(file, "wb") as whole:
        whole.truncate(64 * MIB)
    up, down = LoginKeys(), LoginKeys()
    settings = {
        **chap_of_the_kernel("none"),
        "node.session.iscsi.ERL": "2",
        "node.session.iscsi.MaxConnections": "4",
        "node.conn[0].iscsi.HeaderDigest": "CRC32C",
        "node.conn[0].iscsi.DataDigest": "CRC32C",
    }
    options = ("--max-connections", "8", "--error-recovery-level", "2")
    with (
        kernel.our_target(file, listen, *options),
        FaultProxy((listen, 3260), lambda _number: ([up], [down]), port=3260) as proxy,
        kernel.logged_in("127.0.0.1", settings, "default") as device,
    ):
        for keys in (up.keys, down.keys):
            assert (keys["MaxConnections"], keys["ErrorRecoveryLevel"]) == ("1", "0")
        kernel.fio_verify(device, "8m")
        assert len(proxy.links) == 1
    record(
        ours="target",
        peer="iscsi_tcp with open-iscsi",
        transport="TCP, digests CRC32C",
        ran="fio verify; the target would take 8 connections and ErrorRecoveryLevel 2; open-iscsi "
        "offers MaxConnections=1 and ErrorRecoveryLevel=0, also where its node record says 4 and 2",
    )
