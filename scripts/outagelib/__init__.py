"""The modules of scripts/outage: one outage of a target, under three initiators.

cases.py       the outages, and the targets
ledger.py      what a writer was told, and what of that is on the LUN afterwards
writer.py      in the guest: writes numbered records to a file, and notes what it is told
transactions.py
               in the guest: runs pgbench, and notes what it is told
work.py        in the guest: records or a database, and what is there afterwards
array.py       in the guest: the targets' machines, whose power can be cut
services.py    in the guest: LIO, tgtd or istgt on it
programs.py    in the guest: runs programs
initiators.py  in the guest: iserblk, open-iscsi and qemu-nbd, each as it is by default
guest.py       in the guest: the outage
report.py      the table
picture.py     throughput over time
"""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print one line on stderr, marked with the command's name."""
    print(f"outage: {text}", file=sys.stderr, flush=True)
