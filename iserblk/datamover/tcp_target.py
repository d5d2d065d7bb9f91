"""The tcp datamover of a target, from the first byte of a connection on.

The end of the login decides on the rest: at ErrorRecoveryLevel 0 the connection stays with the
datamover of the login, at other levels another one takes it over, which keeps what it sends.
"""

from __future__ import annotations

from iserblk.datamover.seam import TargetDatamover, TargetSlot
from iserblk.datamover.tcp_plain_target import PlainTcpTarget
from iserblk.datamover.tcp_recovering_target import RecoveringTcpTarget


class TcpTarget(PlainTcpTarget):
    """Implements TargetDatamover for one connection."""

    def enable_datamover(self, final: TargetSlot) -> TargetDatamover:
        plain = super().enable_datamover(final)
        return RecoveringTcpTarget(self) if self._parameters.error_recovery_level else plain
