"""The tcp datamover of an initiator, from the first byte of a connection on.

The end of the login decides on the rest: at ErrorRecoveryLevel 0 the connection stays with the
datamover of the login, at other levels another one takes it over, which asks for what is lost.
"""

from __future__ import annotations

from iserblk.datamover.seam import InitiatorDatamover
from iserblk.datamover.tcp_plain_initiator import PlainTcpInitiator
from iserblk.datamover.tcp_recovering_initiator import RecoveringTcpInitiator


class TcpInitiator(PlainTcpInitiator):
    """Implements InitiatorDatamover over a byte stream."""

    def enable_datamover(self) -> InitiatorDatamover:
        plain = super().enable_datamover()
        return RecoveringTcpInitiator(self) if self._parameters.error_recovery_level else plain
