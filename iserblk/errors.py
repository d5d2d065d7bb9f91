"""Every error that iserblk raises, branched by what the caller may do next.

    IserblkError
    ├── LocalProtocolError        our own caller broke a rule of ours: a bug, nothing was sent
    ├── BadArgument               an option, URL or path is wrong: correct it and call again
    ├── NotSupported              the request is clear, but cannot be done: the text says what can
    ├── PermissionDenied          more rights are needed
    ├── Busy                      the thing is in use: try again later
    │   └── ReservationLost       another initiator has taken over a LUN that was ours: never write
    ├── TransportError            the connection is (or was never) there; nothing in flight survives
    │   ├── RemoteProtocolError   the peer broke its protocol; the connection has been closed
    │   ├── ConnectionLost        the connection ended under us
    │   ├── ConnectFailed         no connection could be made
    │   ├── HostNotFound          the portal's name does not resolve
    │   ├── ConnectTimeout        nobody answered in time
    │   └── LunChanged            connected again, but it is another LUN: the session is over
    ├── LoginError                the target refused the login; carries status class and detail
    │   ├── IserRefused           it does not agree to iSER; Traditional iSCSI may be possible
    │   ├── TargetNotFound        no such target name there
    │   └── AuthenticationError   the credentials were refused
    └── CommandError              one command failed; the session goes on
        ├── CommandTimeout        its deadline passed; it was aborted, its buffer is free
        ├── CommandRejected       a Reject PDU or a task management answer ended it
        └── ScsiError             a SCSI status other than GOOD; carries status and sense
            ├── NoSuchLun
            ├── WriteProtected
            ├── OutOfSpace        there is no room left behind a thin LUN
            ├── ReservationConflict   another initiator has reserved the LUN
            └── OutOfRange        the address is past the end

``errno`` is what the two front-ends hand on; ``exit_status`` is what the command line ends with
(design: 0 done, 1 other, 4 transport, 5 login refused, 7 bad argument, 8 connect timeout,
11 command timeout, 13 permission, 21 no such target or LUN, 23 host not found,
24 authentication, 27 not supported, 28 busy).
"""

from __future__ import annotations

import errno as _errno
from typing import ClassVar


class IserblkError(Exception):
    """Root of the tree. ``str(error)`` is one line that names the thing and the remedy."""

    errno: int = _errno.EIO
    exit_status: ClassVar[int] = 1


class LocalProtocolError(IserblkError):
    """A caller inside iserblk broke the rule named in the text; no state was changed."""

    errno = _errno.EINVAL


class BadArgument(IserblkError):
    """A URL, option or path that cannot be used as given."""

    errno = _errno.EINVAL
    exit_status = 7


class NotSupported(IserblkError):
    """Clear, but not possible here; the text says what to do instead."""

    errno = _errno.EOPNOTSUPP
    exit_status = 27


class PermissionDenied(IserblkError):
    errno = _errno.EACCES
    exit_status = 13


class Busy(IserblkError):
    errno = _errno.EBUSY
    exit_status = 28


class ReservationLost(Busy):
    """``reserve=exclusive``: the LUN is another initiator's now, or was. No session that had it
    may write to it any more."""


class TransportError(IserblkError):
    """The connection is gone, or never was. Every task in flight on it has ended."""

    errno = _errno.EIO
    exit_status = 4


class RemoteProtocolError(TransportError):
    """The peer sent what its protocol forbids.

    The only error that bytes from the network may raise. ``layer`` names the standard
    ("MPA", "DDP", "RDMAP", "iSER", "iSCSI", "SCSI"). ``terminate`` is the (layer, etype, ecode)
    of the RDMAP Terminate that belongs to it (RFC 5040 section 4.8), or None.
    """

    errno = _errno.EPROTO

    def __init__(
        self, layer: str, text: str, terminate: tuple[int, int, int] | None = None
    ) -> None:
        super().__init__(f"{layer}: {text}")
        self.layer = layer
        self.terminate = terminate


class ConnectionLost(TransportError):
    errno = _errno.ECONNRESET


class ConnectFailed(TransportError):
    errno = _errno.ECONNREFUSED


class HostNotFound(TransportError):
    errno = _errno.ENOENT
    exit_status = 23


class ConnectTimeout(TransportError):
    errno = _errno.ETIMEDOUT
    exit_status = 8


class LunChanged(TransportError):
    """After a reconnection another LUN is where the one in use was. Nothing was sent to it, and
    nothing ever will be: what is at hand belongs to the LUN that is gone."""


class LoginError(IserblkError):
    """Login refused. ``status`` is (Status-Class << 8) | Status-Detail, RFC 7143 11.13.5.

    ``address``: where the target has moved to (TargetAddress, ``host[:port]``), else "".
    """

    errno = _errno.EACCES
    exit_status = 5

    def __init__(self, text: str, status: int = 0, address: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.address = address


class IserRefused(LoginError):
    """RDMAExtensions was not answered with Yes (RFC 7145 section 6.3)."""

    errno = _errno.EPROTONOSUPPORT


class TargetNotFound(LoginError):
    errno = _errno.ENOENT
    exit_status = 21


class AuthenticationError(LoginError):
    exit_status = 24


class CommandError(IserblkError):
    """One command failed; session and connection go on."""


class CommandTimeout(CommandError):
    exit_status = 11


class CommandRejected(CommandError):
    """The target ended the command with a Reject PDU or a task management response."""


class ScsiError(CommandError):
    """A command that ended with a status other than GOOD.

    ``status`` is the SAM status byte, ``sense`` the decoded sense data
    (``iserblk.scsi.sense.Sense``) or None.
    """

    def __init__(self, text: str, status: int = 0, sense: object | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.sense = sense


class NoSuchLun(ScsiError):
    errno = _errno.ENXIO
    exit_status = 21


class WriteProtected(ScsiError):
    errno = _errno.EROFS
    exit_status = 13


class OutOfSpace(ScsiError):
    """The target has no room for what was written (DATA PROTECT, SPACE ALLOCATION FAILED WRITE
    PROTECT, of SBC-4). Nothing of the command may be counted on; the LUN is whole."""

    errno = _errno.ENOSPC


class ReservationConflict(ScsiError):
    errno = _errno.EBUSY
    exit_status = 28


class OutOfRange(ScsiError):
    errno = _errno.EINVAL
