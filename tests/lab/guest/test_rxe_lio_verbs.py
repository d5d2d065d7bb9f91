"""Our initiator on a verbs device (Soft-RoCE), and LIO's iSER target."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from iserblk.rcap.verbs import connecting
from tests.support.blockwork import everything
from tests.support.interop import Record


@pytest.fixture
def without_initial_r2t() -> Iterator[None]:
    """LIO agrees to InitialR2T=No."""
    key = Path(os.environ["LAB_TPG"]) / "param" / "InitialR2T"
    before = key.read_text()
    key.write_text("No")
    yield
    key.write_text(before)


# shows: SYSTEM-37
@pytest.mark.parametrize("immediate", ["yes", "no"])
async def test_unsolicited_data(immediate: str, without_initial_r2t: None, record: Record) -> None:
    """Data-Outs behind the command of each write of up to 64 KiB. LIO takes them at offsets that
    are multiples of a page, as ours are with its TargetRecvDataSegmentLength of 8192."""
    options = {"rcap": "verbs", "unsolicited-data": "yes", "immediate-data": immediate}
    outcome = await everything(os.environ["LAB_URL"], options)
    assert outcome.data_outs > 100
    record(
        ours="initiator, pyverbs",
        peer="LIO isert on rxe",
        transport=f"RoCE v2, InitialR2T=No, ImmediateData={immediate.capitalize()}",
        outcome=outcome,
    )


# shows: SYSTEM-1, SYSTEM-16, SYSTEM-18, SYSTEM-53
@pytest.mark.parametrize("mode", ["window", "region"])
async def test_all_block_operations(
    mode: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = functools.partial(connecting.VerbsConnector, mode=mode)
    monkeypatch.setattr(connecting, "VerbsConnector", connector)
    outcome = await everything(os.environ["LAB_URL"], {"rcap": "verbs"})
    assert (outcome.connection["provider"], outcome.connection["mode"]) == ("verbs", mode)
    # RoCE obliges no receiver to solicited events: all of this went in plain Sends.
    # proves: ISER-7145-1.5.2-4
    assert outcome.connection["solicits"] is False
    # A plain region and a Send with Invalidate end the connection: LIO must not have sent one.
    assert outcome.invalidated == (outcome.tagged if mode == "window" else 0)
    assert outcome.tagged > 100
    record(
        ours=f"initiator, pyverbs, {mode} mode",
        peer="LIO isert on rxe",
        transport="RoCE v2",
        outcome=outcome,
    )
