"""Our initiator on a verbs device (Soft-RoCE), and LIO's iSER target."""

from __future__ import annotations

import functools
import os

import pytest

from iserblk.rcap.verbs import connecting
from tests.support.blockwork import everything
from tests.support.interop import Record


@pytest.mark.parametrize("mode", ["window", "region"])
async def test_all_block_operations(
    mode: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = functools.partial(connecting.VerbsConnector, mode=mode)
    monkeypatch.setattr(connecting, "VerbsConnector", connector)
    outcome = await everything(os.environ["LAB_URL"], {"rcap": "verbs"})
    assert (outcome.connection["provider"], outcome.connection["mode"]) == ("verbs", mode)
    # A plain region and a Send with Invalidate end the connection: LIO must not have sent one.
    assert outcome.invalidated == (outcome.tagged if mode == "window" else 0)
    assert outcome.tagged > 100
    record(
        ours=f"initiator, pyverbs, {mode} mode",
        peer="LIO isert on rxe",
        transport="RoCE v2",
        outcome=outcome,
    )
