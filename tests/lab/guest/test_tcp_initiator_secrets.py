"""Where open-iscsi keeps a CHAP secret. Where ours is: tests/nbd/kernel/test_attaching.py and
tests/csi/test_csi_node.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.lab.guest import kernel_initiator as kernel
from tests.lab.guest.test_tcp_initiator import (
    OWN,
    THEIRS,
    chap_of_the_kernel,
    chap_of_the_target,
)

RECORDS = "/etc/iscsi/nodes", "/var/lib/iscsi/nodes"  # by the version of open-iscsi


def holding(secret: str) -> list[Path]:
    """The node records that have the secret, as it is."""
    files = [path for place in RECORDS for path in Path(place).rglob("*") if path.is_file()]
    return [path for path in files if secret in path.read_text()]


@pytest.mark.long  # three logins and logouts, in which nothing of ours is tested
def test_secrets_in_node_records(tmp_path: Path) -> None:
    """Both secrets of mutual CHAP are there in clear text from before the login on, and go only
    with the record."""
    listen = os.environ["LAB_LISTEN"]
    file = tmp_path / "disk"
    file.touch()
    os.truncate(file, 16 << 20)
    with (
        kernel.our_target(file, listen, *chap_of_the_target(tmp_path, "mutual")),
        kernel.logged_in(listen, chap_of_the_kernel("mutual"), "default"),
    ):
        node = ("-m", "node", "-T", kernel.IQN, "-p", f"{listen}:3260")
        kernel.iscsiadm(*node, "--logout")
        found = [holding(secret) for _, secret in (OWN, THEIRS)]
        kernel.iscsiadm(*node, "--login")
        assert all(found)
    for _, secret in (OWN, THEIRS):
        assert not holding(secret)
