"""What a test says of its peer, for interop-results (scripts/interop.py)."""

from __future__ import annotations

import json
import platform
import subprocess
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tests.support.blockwork import Outcome

Row = dict[str, str]
PROPERTY = "interop"


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
    """One row of the table of peers, as JSON. ``version``: the kernel's, unless said."""
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


def package(name: str) -> str:
    """The version of a package of the distribution, with its name."""
    command = ["dpkg-query", "-W", "-f", "${Version}", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return f"{name} {done.stdout.strip() or 'of unknown version'}"


class Rows:
    """The rows of one session of pytest, by test; None: the test failed."""

    def __init__(self) -> None:
        self.by_test: dict[str, Row | None] = {}

    def take(self, nodeid: str, when: str, failed: bool, said: list[tuple[str, object]]) -> None:
        """One report of a test: setup, call or teardown."""
        if failed:
            self.by_test[nodeid] = None
        elif when == "call":
            for name, value in said:
                if name == PROPERTY:
                    assert isinstance(value, str)
                    self.by_test.setdefault(nodeid, json.loads(value))
