"""Software iWARP on the host, and LIO on siw in the guest: every block operation through an
emulated network.

These run on the host: the guest serves.
"""

from __future__ import annotations

import os

import pytest

from tests.support.blockwork import everything
from tests.support.interop import Record

# A guest of its own; test_siw_lio_iwarp has the same over the segments of a link of 1500 bytes.
pytestmark = pytest.mark.long


@pytest.mark.parametrize("crc", ["yes", "no"])
async def test_all_block_operations(
    crc: str, record: Record, caplog: pytest.LogCaptureFixture
) -> None:
    """The emulated network cuts the stream anew, wherever it is held up; siw finds no CRC that two
    segments share, and ends the connection. No data may differ behind that, either."""
    outcome = await everything(os.environ["LAB_URL"], {"rcap": "iwarp", "mpa-crc": crc})
    lost = [text for text in caplog.messages if "connection lost" in text]
    assert not [text for text in lost if "peer terminated the connection: MPA: CRC" not in text]
    assert not (lost and crc == "no")
    record(
        ours="initiator, software iWARP on another machine",
        peer="LIO isert on siw",
        version=f"Linux {os.environ.get('LAB_KERNEL', '6.1')}",
        transport=f"iWARP, CRC {'on' if crc == 'yes' else 'off'}, through an emulated network",
        outcome=outcome,
        ran=f"siw ended {len(lost)} connections for a CRC in two segments" if lost else "",
    )
