"""Our initiator on software iWARP, and LIO's iSER target on the kernel's siw."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.support.blockwork import everything
from tests.support.interop import Record


def set_mtu(mtu: int) -> None:
    """Of the link that connects the guest with itself."""
    subprocess.run(["ip", "link", "set", "lo", "mtu", str(mtu)], check=True)


@pytest.mark.parametrize("mtu", [65536, 1500])
@pytest.mark.parametrize("crc", ["yes", "no"])
async def test_all_block_operations(crc: str, mtu: int, record: Record) -> None:
    set_mtu(mtu)
    options = {"rcap": "iwarp", "mpa-crc": crc}
    outcome = await everything(os.environ["LAB_URL"], options)
    assert outcome.connection["provider"] == "iwarp"
    record(
        ours="initiator, software iWARP",
        peer="LIO isert on siw",
        transport=f"iWARP, CRC {'on' if crc == 'yes' else 'off'}, MTU {mtu}",
        outcome=outcome,
    )
