"""The modules of scripts/boot: LUNs through boot and shutdown of a machine with systemd.

image.py    the machine's disk: Debian by mmdebstrap, with our package
machine.py  one boot of it in QEMU
agent.py    commands in the guest, by the QEMU guest agent
storage.py  the target on this machine, its LUNs, and what must be on them
guest/      programs and units that go into the guest
cases.py    the cases, and the boots that they share
"""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print one line on stderr, marked with the command's name."""
    print(f"boot: {text}", file=sys.stderr, flush=True)
