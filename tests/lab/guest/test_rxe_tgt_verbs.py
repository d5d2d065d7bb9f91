"""Our initiator on a verbs device (Soft-RoCE), and tgtd's iSER target.

tgtd starts with a closed command window, never invalidates an STag, and never ends a connection.
"""

from __future__ import annotations

import functools
import os
import subprocess

import pytest

from iserblk.rcap.verbs import connecting
from tests.support.blockwork import everything
from tests.support.interop import Record


def tgtd_version() -> str:
    done = subprocess.run(["tgtd", "-V"], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).split()[-1]


# shows: SYSTEM-1, SYSTEM-16, SYSTEM-18, SYSTEM-33, SYSTEM-53
@pytest.mark.parametrize("mode", ["window", "region"])
async def test_all_block_operations(
    mode: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = functools.partial(connecting.VerbsConnector, mode=mode)
    monkeypatch.setattr(connecting, "VerbsConnector", connector)
    outcome = await everything(os.environ["LAB_URL"], {"rcap": "verbs"})
    assert (outcome.connection["provider"], outcome.connection["mode"]) == ("verbs", mode)
    assert outcome.invalidated == 0 < outcome.tagged
    record(
        ours=f"initiator, pyverbs, {mode} mode",
        peer="tgtd with iSER on rxe",
        version=f"tgt {tgtd_version()}",
        transport="RoCE v2",
        outcome=outcome,
    )
