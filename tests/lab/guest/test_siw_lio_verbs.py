"""Our initiator on a verbs device that speaks iWARP (siw), and LIO's iSER target."""

from __future__ import annotations

import os

from tests.support.blockwork import everything
from tests.support.interop import Record


async def test_all_block_operations(record: Record) -> None:
    outcome = await everything(os.environ["LAB_URL"], {"rcap": "verbs"})
    # siw has no memory windows in user space.
    assert (outcome.connection["provider"], outcome.connection["mode"]) == ("verbs", "region")
    assert outcome.connection["transport"] == "iWARP"
    assert outcome.invalidated == 0 < outcome.tagged
    record(
        ours="initiator, pyverbs, region mode",
        peer="LIO isert on siw",
        transport="iWARP",
        outcome=outcome,
    )
