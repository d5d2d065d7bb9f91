"""Software iWARP on the host, and LIO on siw in the guest: every block operation through an
emulated network.

These run on the host: the guest serves.
"""

from __future__ import annotations

import os

import pytest

from tests.support.blockwork import everything
from tests.support.interop import Record


@pytest.mark.parametrize("crc", ["yes", "no"])
async def test_all_block_operations(crc: str, record: Record) -> None:
    outcome = await everything(os.environ["LAB_URL"], {"rcap": "iwarp", "mpa-crc": crc})
    record(
        ours="initiator, software iWARP on another machine",
        peer="LIO isert on siw",
        version=f"Linux {os.environ.get('LAB_KERNEL', '6.1')}",
        transport=f"iWARP, CRC {'on' if crc == 'yes' else 'off'}, through an emulated network",
        outcome=outcome,
    )
