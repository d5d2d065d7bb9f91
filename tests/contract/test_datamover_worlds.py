"""Both datamovers of a session in worlds of a seed: whatever the lines lose, each task ends once,
as its target had it, with the right bytes, and then nothing of it is in use.

A world (``datamover_world``) has commands of all directions and sizes about the bounds that login
agreed on, residuals, sense data, aborts, pings, and over TCP (``lossy_lines``) lines that split and
delay bytes, fill up, damage and drop PDUs, and are cut. At ErrorRecoveryLevel 2 the tasks of a lost
connection are reassigned to the next. What leaves is looked at as well: it breaks no rule of the
standard, asks for nothing that was not lost, and where nothing was, no byte leaves twice.

What this cannot show, and other modules do: a peer that lies or floods, and the bounds of what is
kept, asked for and remembered for its sake; R-Data SNACKs, which our initiator never sends; targets
that number less than they may; when and how often what comes in vain is asked for again; what is
laid out, copied and sent in one turn; Hello, private data and unsolicited Data-Outs over iSER, and
there a task that ends before its target knows. Changes of the code that it does not notice, and
what notices them, are the reason for each test of test_datamover_recovery.

ISERBLK_DATAMOVERS=SEED plays the worlds of one seed, which are otherwise some that are always the
same, and a few fresh ones.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.contract.datamover_world import WAYS, Way, play

REPLAY = "ISERBLK_DATAMOVERS"
FRESH = 5
WORLDS = 300  # of a way of TCP
ISER_WORLDS = 40


def seeds(way: Way) -> list[int]:
    given = os.environ.get(REPLAY)
    if given:
        return [int(given)]
    fresh = [int.from_bytes(os.urandom(4), "big") for _ in range(FRESH)]
    return [*range(ISER_WORLDS if way.iser else WORLDS), *fresh]


# shows: SYSTEM-40
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_task_ends_once_with_its_data(way: Way) -> None:
    """And with all that is needed for that to happen in these worlds."""
    happened: Counter[str] = Counter()
    for seed in seeds(way):
        happened.update(play(way, seed))
    if REPLAY in os.environ:
        return
    wanted = {"commands", "ended", "aborted", "pings", "lost connections", "lost by a cut"}
    if not way.iser:
        wanted |= {"lost by a damaged header"}
        if way.level:  # commands, Data-Outs, SNACKs
            wanted |= {"rejected 0x1", "rejected 0x5", "rejected 0x10", "lost data of a read"}
        else:
            wanted |= {"lost by damaged data"}
    if way.level == 2:
        wanted |= {"reassigned"}
    assert not wanted - happened.keys()


def test_a_world_is_played_the_same_again() -> None:
    for way in (Way("", 2), Way("iser-memory", 2)):
        assert play(way, 7) == play(way, 7) != play(way, 8)
