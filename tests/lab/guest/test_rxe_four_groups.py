"""One target with four portal groups: RDMA devices, iWARP and Traditional iSCSI, iWARP over SCTP,
Traditional iSCSI alone."""

from __future__ import annotations

import os
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from iserblk.disk.aio import open_disks
from tests.cli.commands import good_json, serving
from tests.support.target import IQN

GROUPS = {
    1: (3260, ",1,transport=verbs"),
    2: (3261, ",2"),
    3: (3262, ",3,transport=sctp"),
    4: (3263, ",4,transport=tcp"),
}


@pytest.fixture
def sctp() -> None:
    subprocess.run(["modprobe", "sctp"], check=True)


# shows: SYSTEM-25
@pytest.mark.usefixtures("sctp")
async def test_what_is_written_through_one_group_is_read_through_all(tmp_path: Path) -> None:
    # proves: ISER-GEN-3.2-1
    address = os.environ["LAB_ADDRESS"]
    portals = [
        word for port, rest in GROUPS.values() for word in ("--listen", f"{address}:{port}{rest}")
    ]
    lun = ("--iqn", IQN, "--lun", f"{tmp_path}/disk:size=16M")
    with serving("target", *portals, *lun, log=tmp_path / "log"):
        (found,) = good_json("discover", f"iscsi://{address}:3263")["targets"]
        assert found["name"] == IQN
        assert {each["group"]: each["port"] for each in found["portals"]} == {
            group: port for group, (port, _) in GROUPS.items()
        }
        ways = {
            f"iser://{address}:3260/{IQN}/0?rcap=verbs": "verbs",
            f"iser://{address}:3261/{IQN}/0?rcap=iwarp": "iwarp",
            f"iser://{address}:3262/{IQN}/0?rcap=iwarp-sctp": "iwarp-sctp",
            f"iscsi://{address}:3263/{IQN}/0": "tcp",
        }
        async with AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(open_disks([way], {})) for way in ways]
            disks = [each.disks[each.default] for each in opened]
            carried = [disk.info.connection.get("provider", "tcp") for disk in disks]
            assert carried == [*ways.values()]
            for number, writer in enumerate(disks, 1):
                data = bytes([number]) * 100_000
                await writer.write(memoryview(data), number << 20)
                await writer.flush()
                for reader in disks:
                    buffer = bytearray(len(data))
                    await reader.read_into(memoryview(buffer), number << 20)
                    assert buffer == data
