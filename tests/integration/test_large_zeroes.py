"""Zeroes on a LUN that has to be sent them, more of them than one `io-timeout` is enough for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.nbd_servers import libnbd
from tests.support.nbdkit import need, running_nbd
from tests.support.profiles import slow_longhorn
from tests.support.target import running_target

nbd = libnbd()
MIB = 1 << 20
COUNT = 80  # MiB: one WRITE each
IO_TIMEOUT_S = 2


@pytest.mark.parametrize("by", ["iserblk", "nbdkit"])
def test_they_take_as_long_as_they_make_progress(by: str, tmp_path: Path) -> None:
    assert COUNT * slow_longhorn.WRITE_S > 1.1 * IO_TIMEOUT_S
    if by == "nbdkit":
        need("nbdkit")
    lun = tmp_path / "lun"
    profile = {"PROFILE": "slow_longhorn"}
    with running_target([f"{lun}:size={COUNT + 1}M"], tmp_path / "log", environment=profile) as one:
        lun.write_bytes(b"x" * (COUNT + 1) * MIB)
        url = f"{one.url}/0?io-timeout={IO_TIMEOUT_S}"
        with running_nbd(by, [url], tmp_path) as uri:
            client = nbd.NBD()
            client.connect_uri(uri)
            client.zero(COUNT * MIB - 512, 256)
            client.flush()
            client.shutdown()
        data = lun.read_bytes()
    assert data == b"x" * 256 + bytes(COUNT * MIB - 512) + b"x" * (MIB + 256)
