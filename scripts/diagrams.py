"""Generates docs/states.md: diagrams of the state tables in the code.

    scripts/diagrams.py [--check]

If the document is out of date, rewrites it, and says so. With --check it only says so, and ends
with status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from documents import made

from iserblk.datamover import allocation
from iserblk.initiator.session import life, recovery
from iserblk.iscsi import stages
from iserblk.nbd import handshake
from iserblk.nbd.kernel import handover

Table = Mapping[Any, StrEnum]  # (state, event) → state; states and events are StrEnums

HEAD = """# States

Made by scripts/diagrams.py from all state tables of the code; do not edit. What a table does not
have cannot happen: it is an error, and changes nothing. With -vv each step is logged
(iserblk/state_tables.py).
"""

SECTIONS: list[tuple[str, str, StrEnum, Table]] = [
    (
        "The life of a session",
        "`TABLE` in iserblk/initiator/session/life.py. The connection is lost and replaced in it; "
        "the session stays.",
        life.State.FREE,
        life.TABLE,
    ),
    (
        "One lost connection",
        "`TABLE` in iserblk/initiator/session/recovery.py. The session goes on by others, or by "
        "one that is reinstated; only when the recovery is given up, all of it is reconnected.",
        recovery.Stage.LOST,
        recovery.TABLE,
    ),
    (
        "A login, as the initiator sees it",
        "`INITIATOR` in iserblk/iscsi/stages.py. Each round of requests and responses stays in its "
        "stage until both ends go on.",
        stages.State.START,
        stages.INITIATOR,
    ),
    (
        "A login, as the target sees it",
        "`TARGET` in iserblk/iscsi/stages.py. Only a discovery session goes on to full feature "
        "phase from the security stage.",
        stages.State.START,
        stages.TARGET,
    ),
    (
        "The resources of a connection, at each end",
        "`TABLE` in iserblk/datamover/allocation.py. Resources may be asked for again: that "
        "changes nothing.",
        allocation.State.EMPTY,
        allocation.TABLE,
    ),
    (
        "An NBD handshake, as the server sees it",
        "`TABLE` in iserblk/nbd/handshake.py. Options that only negotiate stay in their state.",
        handshake.State.GREETED,
        handshake.TABLE,
    ),
    (
        "The connections of a device's server, when a successor asks for them",
        "`TABLE` in iserblk/nbd/kernel/handover.py. What is given is the successor's; in every "
        "other state the server can go on.",
        handover.State.SERVING,
        handover.TABLE,
    ),
]


def diagram(first: StrEnum, table: Table) -> str:
    """``table`` as a Mermaid state diagram that begins in ``first``. A state that no event leaves
    is final."""
    states = list(dict.fromkeys([first, *(state for state, _ in table), *table.values()]))
    left = {state for state, _ in table}
    lines = ["stateDiagram-v2"]
    lines += [f'    state "{state.value}" as {state.name}' for state in states]
    lines.append(f"    [*] --> {first.name}")
    for (state, event), after in table.items():
        lines.append(f"    {state.name} --> {after.name}: {event.value.replace(':', ',')}")
    lines += [f"    {state.name} --> [*]" for state in states if state not in left]
    return "\n".join(lines)


def document() -> str:
    out = [HEAD]
    for title, words, first, table in SECTIONS:
        out.append(f"\n## {title}\n\n{words}\n\n```mermaid\n{diagram(first, table)}\n```\n")
    return "".join(out)


if __name__ == "__main__":
    sys.exit(made("diagrams", __doc__, "docs/states.md", document))
