"""What a test of the lab says of its peer, for docs/interop.md."""

from __future__ import annotations

import json
import platform
from typing import Protocol

from tests.lab.guest.blockwork import Outcome


class Record(Protocol):
    def __call__(
        self,
        *,
        ours: str,
        peer: str,
        transport: str,
        outcome: Outcome | None = None,
        ran: str = "",
        version: str = "",
    ) -> None: ...


def row(
    *,
    ours: str,
    peer: str,
    transport: str,
    outcome: Outcome | None = None,
    ran: str = "",
    version: str = "",
) -> str:
    """One row of the table, as JSON. ``version``: the kernel's, unless said."""
    words = ran
    if outcome is not None:
        words = f"{outcome.operations} operations, {outcome.compared >> 20} MiB compared"
        if outcome.skipped:
            words += f" (the peer has no {', '.join(outcome.skipped)})"
        if outcome.invalidated:
            words += f", {outcome.invalidated} of {outcome.tagged} STags invalidated by the peer"
        if ran:
            words += f"; {ran}"
    return json.dumps(
        {
            "ours": ours,
            "peer": peer,
            "version": version or f"Linux {platform.release()}",
            "transport": transport,
            "ran": words,
        }
    )
