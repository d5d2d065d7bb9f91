"""The states of what is in use on this machine, as commands name them."""

from __future__ import annotations

from iserblk.metrics.reading import LunReading

KILLED = "killed"
SILENT = "no answer"
WRONG = "wrong answer"
CONNECTED = "connected"
DEGRADED = "degraded"  # fewer connections than there should be
AWAY = "not connected"
SERVING = "serving"
RUNNING = "running"  # and tells no more
DEAD = (KILLED, SILENT, WRONG)  # of a process
BAD = (*DEAD, DEGRADED, AWAY)


def lun_state(lun: LunReading) -> str:
    if not lun.connected:
        return AWAY
    return DEGRADED if lun.connections < lun.wanted else CONNECTED
