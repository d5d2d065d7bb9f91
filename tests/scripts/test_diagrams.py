"""The diagrams of the state tables."""

from __future__ import annotations

import subprocess
import sys

from iserblk.initiator.session.life import TABLE

from ..support.target import ROOT


def test_the_document_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/diagrams.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_every_transition_is_an_arrow() -> None:
    text = (ROOT / "docs/states.md").read_text(encoding="utf-8")
    for (state, event), after in TABLE.items():
        assert f"    {state.name} --> {after.name}: {event.value}\n" in text
